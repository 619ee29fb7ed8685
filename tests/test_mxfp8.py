"""MXFP8: an oracle of its own, torchao's own layer, and the calls that a Blackwell GPU would get."""

import sys

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from gnmr_lightning import backends
from gnmr_lightning.backends import mxfp8

SM100 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


def dequantised(operand_RS):
    """32 values at a time: what e4m3 codes under a power of two, the smallest that lets none overflow, stand for."""
    operand_RS = operand_RS.double()
    result = torch.empty_like(operand_RS)
    for j in range(0, operand_RS.shape[1], 32):
        block = operand_RS[:, j : j + 32]
        scale = torch.exp2(torch.ceil(torch.log2(block.abs().amax(1, keepdim=True).clamp(min=2**-100) / 448)))
        result[:, j : j + 32] = (block / scale).float().to(torch.float8_e4m3fn).double() * scale
    return result


def operands(m, k, n, dtype):
    torch.manual_seed(0)
    x, grad, weight = torch.randn(m, k), torch.randn(m, n), torch.randn(n, k)
    for operand in (x, grad, weight):  # blocks of very different sizes, along both dimensions
        operand *= 10 ** torch.randn(-(-operand.shape[0] // 32), 1).repeat_interleave(32, 0)[: operand.shape[0]]
        operand *= 10 ** torch.randn(1, -(-operand.shape[1] // 32)).repeat_interleave(32, 1)[:, : operand.shape[1]]
    x[m // 2] = 0.0
    return x.to(dtype), grad.to(dtype), weight


@pytest.mark.parametrize(("m", "k", "n"), [(64, 96, 32), (7, 40, 10), (1, 32, 64), (33, 70, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_products_equal_an_oracle_that_dequantises_and_multiplies(m, k, n, dtype):
    x, grad, weight = operands(m, k, n, dtype)
    backend = backends.resolve("mxfp8")
    output = backend.output(x, weight)
    grad_input, grad_weight = backend.grads(grad, x, weight, need_input=True, need_weight=True)
    for ours, left, right in (
        (output, dequantised(x), dequantised(weight)),
        (grad_input, dequantised(grad), dequantised(weight.T)),
        (grad_weight, dequantised(grad.T), dequantised(x.T)),
    ):
        assert ours.dtype == dtype
        assert ours.shape == (left.shape[0], right.shape[0])
        rounding = 1e-5 if dtype == torch.float32 else 2**-8
        assert (ours.double() - left @ right.T).abs().le(rounding * (left.abs() @ right.abs().T) + 1e-30).all()


def test_equals_torchaos_own_autograd_function():
    mxfp8_linear = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear", reason="a newer torchao has it")
    x, grad, weight = operands(64, 96, 32, torch.float32)
    x_, weight_ = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = mxfp8_linear._to_mxfp8_then_scaled_mm(x_, weight_, KernelPreference.EMULATED, ScaleCalculationMode.RCEIL)
    y.backward(grad)
    backend = backends.resolve("mxfp8")
    assert torch.equal(backend.output(x, weight), y)
    assert torch.equal(backend.grad_input(grad, weight), x_.grad)
    torch.testing.assert_close(backend.grad_weight(grad, x), weight_.grad)


def test_the_kernels_path_gives_to_mx_what_it_takes(monkeypatch):
    """The hardware's matmul is replaced by the emulated one; what is cast, and how it is laid out, is the real path."""
    x, grad, weight = operands(7, 96, 64, torch.bfloat16)
    backend = backends.resolve("mxfp8")
    expected = [backend.output(x, weight), backend.grad_input(grad, weight), backend.grad_weight(grad, x)]
    casts = []
    to_mx = MXTensor.to_mx

    def emulated(data, dtype, block, mode, preference, mxfp8_dim0_cast_kernel_choice):
        assert data.is_contiguous()
        assert data.shape[1] % 32 == 0
        casts.append((data.dtype, preference.name, mxfp8_dim0_cast_kernel_choice.name))
        return to_mx(data.float(), dtype, block, mode, KernelPreference.EMULATED)

    monkeypatch.setattr(MXTensor, "to_mx", emulated)
    monkeypatch.setattr(mxfp8, "_has_kernels", lambda device: True)
    ours = [backend.output(x, weight), backend.grad_input(grad, weight), backend.grad_weight(grad, x)]
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    activation, parameter = (torch.bfloat16, "AUTO", "TRITON"), (torch.float32, "AUTO", "TORCH")
    assert casts == [activation, parameter, activation, parameter, activation, activation]


@pytest.mark.skipif(not SM100, reason="MXFP8 matmuls need a CUDA GPU of compute capability 10.0")
def test_the_kernels_equal_the_emulation_on_a_gpu():
    x, grad, weight = operands(40, 96, 64, torch.bfloat16)
    backend = backends.resolve("mxfp8")
    for name, given in (("output", (x, weight)), ("grad_input", (grad, weight)), ("grad_weight", (grad, x))):
        expected = getattr(backend, name)(*given).float()
        ours = getattr(backend, name)(*(t.cuda() for t in given)).float().cpu()
        assert (ours - expected).norm() <= 0.01 * expected.norm()


def test_the_device_chooses_the_path_and_the_sizes(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, kernels in (((9, 0), False), ((10, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, answer=capability: answer)
        assert mxfp8._has_kernels(torch.device("cuda")) == kernels
    assert not mxfp8._has_kernels(torch.device("cpu"))
    backend = backends.resolve("mxfp8")
    assert backend.refuses_layer(96, 64, "cuda") is None
    assert backend.refuses_layer(96, 40, "cuda") == "out_features=40; mxfp8 needs a multiple of 32"
    assert backend.refuses_layer(40, 40, "cpu") is None
    assert backend.takes_rows(7, "cuda")


def test_an_older_torchao_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gnmr_lightning.backends.mxfp8", None)
    with pytest.raises(ValueError, match=r"recipe='mxfp8' needs a newer torchao.*pip install -U torchao"):
        backends.resolve("mxfp8")
