"""What a run leaves behind is a plain model, and can be copied, exported and quantised as one, with equal results.

Each is compared with a model that this package never touched and that loaded the trained weights.
"""

import copy
import io
import pickle

import lightning.pytorch as pl
import pytest
import torch
from conftest import kinds, trainer
from torch import nn

from benchmarks.families import FAMILIES
from gnmr_lightning import GNMRPrecision
from gnmr_lightning.linear import RecoverableLinear

NAMES = [name for name in FAMILIES if name != "GAN"]  # two models in one, of which neither is the module's forward


class Copies(pl.Callback):
    """Copies the model while its layers are converted."""

    def __init__(self, pickles: bool = True) -> None:
        self.pickles = pickles

    def on_train_end(self, trainer, pl_module):
        assert any(isinstance(m, RecoverableLinear) for m in pl_module.modules())
        self.nets = [copy.deepcopy(pl_module.net)]
        if self.pickles:
            file = io.BytesIO()
            torch.save(pl_module.net, file)
            file.seek(0)
            self.nets += [pickle.loads(pickle.dumps(pl_module.net)), torch.load(file, weights_only=False)]


def train(name, recipe="float8_rowwise", **kwargs):
    """A trained model, one that only has its weights, the copies made during the run, and an input."""
    torch.manual_seed(0)
    model, copies = FAMILIES[name](32), Copies(**kwargs)
    stock = copy.deepcopy(model)
    trainer(GNMRPrecision(recipe), callbacks=[copies]).fit(model, model.data(32))
    stock.load_state_dict(model.state_dict(), strict=True)
    x = next(iter(model.data(32)))[0]
    return model.eval(), stock.eval(), copies.nets, x[:, :5] if x.dtype == torch.int64 else x


@pytest.mark.parametrize("name", NAMES)
def test_the_trained_model_and_its_copies_are_plain_and_export_as_the_plain_one(name):
    model, stock, copies, x = train(name)
    assert kinds(model) == kinds(stock)
    assert list(model.state_dict()) == list(stock.state_dict())
    expected = stock.net(x)
    for net in (model.net, *(net.eval() for net in copies)):
        assert kinds(net) == kinds(stock.net)
        assert torch.equal(net(x), expected)
    ours, theirs = (torch.export.export(net, (x,)) for net in (model.net, stock.net))
    assert [str(node.target) for node in ours.graph.nodes] == [str(node.target) for node in theirs.graph.nodes]
    assert torch.equal(ours.module()(x), expected)


def test_copies_of_a_parametrized_layer_are_plain_too():
    """spectral_norm gives the layer a class with a deepcopy of its own; stock refuses to pickle it."""
    model, stock, copies, _ = train("GAN", pickles=False)
    assert kinds(model.net) == kinds(stock.net)
    layers = [net["critic"].layers[1] for net in (copies[0], stock.net)]
    assert not any(isinstance(m, RecoverableLinear) for m in copies[0].modules())
    assert not {"recovered", "flops", "probes", "backend"} & set(vars(layers[0]))
    x = torch.randn(3, 32)
    assert torch.equal(*(layer.eval()(x) for layer in layers))


def test_the_trained_model_goes_to_onnx_as_the_plain_one():
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model, stock, _, x = train("nn.TransformerEncoder")
    ours, theirs = (
        torch.onnx.export(net, (x,), dynamo=True, verbose=False).model_proto for net in (model.net, stock.net)
    )
    assert [node.op_type for node in ours.graph.node] == [node.op_type for node in theirs.graph.node]
    (y,) = reference.ReferenceEvaluator(ours).run(None, {ours.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), stock.net(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["int8", "float8_rowwise"])
@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_torchao_quantises_the_trained_model_for_inference_as_the_plain_one(recipe, config):
    from torchao import quantization

    model, stock, _, x = train("ViT", recipe)
    exact = stock.net(x)
    for net in (model.net, stock.net):
        quantization.quantize_(net, getattr(quantization, config)())
    assert sum(type(m.weight.data) is not torch.Tensor for m in model.modules() if isinstance(m, nn.Linear)) == 5
    y = model.net(x)
    assert torch.equal(y, stock.net(x))
    assert not torch.equal(y, exact)
    torch.testing.assert_close(y, exact, rtol=0.1, atol=0.1)
