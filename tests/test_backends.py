"""The registry, what a recipe may be, and the rules for shapes and devices (the CUDA ones are told, not run, here)."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchao.float8 import Float8LinearConfig
from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig

from gnmr_lightning import backends

CUDA = torch.device("cuda")


@pytest.fixture
def cuda_capability(monkeypatch):
    """Makes torch say that there is a CUDA device of this compute capability."""

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretend GPU")

    return pretend


@pytest.mark.parametrize("recipe", backends.RECIPES)
def test_a_recipe_resolves_to_a_registered_backend_of_its_name(recipe):
    backend = backends.resolve(recipe)
    assert backend.name == recipe
    assert backends.get(recipe) is backend


def test_a_torchao_config_is_a_recipe():
    config = Float8LinearConfig(pad_inner_dim=True)
    backend = backends.resolve(config)
    assert backend.config is config
    assert backend.name == backends.resolve(Float8LinearConfig(pad_inner_dim=True)).name
    assert backend.name != backends.resolve(Float8LinearConfig(emulate=True)).name
    assert backends.resolve(Int8MixedPrecisionTrainingConfig(grad_weight=False)).name == "int8_hp_grad_weight"


@pytest.mark.parametrize("recipe", ["fp8", "rowwise", "", None, 8, "auto "])
def test_an_unknown_recipe_is_one_sentence_that_lists_the_known(recipe):
    with pytest.raises(ValueError, match=r"is not known: write 'auto', one of 'float8_tensorwise'.*'int8'"):
        backends.resolve(recipe)


def test_float8_all_gather_is_refused():
    with pytest.raises(ValueError, match=r"enable_fsdp_float8_all_gather=True.*set it to False"):
        backends.resolve(Float8LinearConfig(enable_fsdp_float8_all_gather=True))


@pytest.mark.parametrize(
    ("capability", "recipe"),
    [((8, 0), "int8"), ((8, 9), "float8_tensorwise"), ((9, 0), "float8_rowwise"), ((12, 0), "float8_rowwise")],
)
def test_auto_picks_by_device(capability, recipe, cuda_capability):
    cuda_capability(capability)
    assert backends.auto_recipe(CUDA) == recipe
    assert backends.auto_recipe(torch.device("cpu")) == "int8"


@pytest.mark.parametrize(
    ("recipe", "capability", "refused"),
    [
        ("float8_rowwise", (8, 9), True),
        ("float8_rowwise", (9, 0), False),
        ("float8_rowwise_with_gw_hp", (8, 9), True),
        ("float8_tensorwise", (8, 9), False),
        ("float8_tensorwise", (8, 0), True),
        ("int8", (8, 0), False),
    ],
)
def test_a_gpu_too_old_for_the_recipe_is_refused_by_name(recipe, capability, refused, cuda_capability):
    cuda_capability(capability)
    refusal = backends.resolve(recipe).refuses_device(CUDA)
    if refused:
        assert f"Pretend GPU has compute capability {capability[0]}.{capability[1]}" in refusal
        assert f"{recipe} needs" in refusal
        assert "recipe='auto'" in refusal
    else:
        assert refusal is None
    assert backends.resolve(recipe).refuses_device(torch.device("cpu")) is None


@pytest.mark.parametrize("recipe", backends.RECIPES)
def test_a_device_without_kernels_is_refused(recipe):
    assert "no kernel for mps" in backends.resolve(recipe).refuses_device(SimpleNamespace(type="mps"))


@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp"])
def test_float8_on_cuda_takes_multiples_of_16(recipe):
    backend = backends.resolve(recipe)
    assert backend.refuses_layer(64, 48, "cuda") is None
    assert backend.refuses_layer(60, 48, "cuda") == "in_features=60; float8 needs a multiple of 16"
    assert backend.refuses_layer(64, 10, "cuda") == "out_features=10; float8 needs a multiple of 16"
    assert backend.refuses_layer(60, 10, "cpu") is None
    # only grad_weight contracts over the rows, and this recipe keeps it in high precision
    assert backend.takes_rows(7, "cuda") == (recipe == "float8_rowwise_with_gw_hp")
    assert backend.takes_rows(32, "cuda")
    assert backend.takes_rows(7, "cpu")


def test_padding_and_emulation_take_any_size():
    for config in (Float8LinearConfig(pad_inner_dim=True), Float8LinearConfig(emulate=True)):
        backend = backends.resolve(config)
        assert backend.refuses_layer(60, 10, "cuda") is None
        assert backend.takes_rows(7, "cuda")


def test_int8_on_cuda_follows_the_kernel_that_torchao_would_use(monkeypatch):
    backend = backends.resolve("int8")
    for triton in (True, False):
        monkeypatch.setattr("gnmr_lightning.backends.int8.has_triton", lambda triton=triton: triton)
        assert backend.takes_rows(7, "cuda") == triton
        assert backend.takes_rows(24, "cuda")
        assert (backend.refuses_layer(60, 64, "cuda") is None) == triton
        assert backend.refuses_layer(64, 24, "cuda") is None


def test_importing_torchao_through_us_is_quiet_without_a_gpu():
    code = "from gnmr_lightning import GNMRPrecision; GNMRPrecision('int8'); GNMRPrecision('mxfp8')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "Failed to load" not in done.stderr
    assert "Enum" not in done.stderr
    assert logging.getLogger("torchao").level == logging.NOTSET


def test_a_backend_of_ones_own_is_a_recipe_and_its_name_is_one_once_it_is_registered(monkeypatch):
    monkeypatch.setattr(backends, "_REGISTRY", dict(backends._REGISTRY))

    class Mine(backends.Backend):
        name = "mine"

    with pytest.raises(ValueError, match="'mine' is not known"):
        backends.resolve("mine")
    mine = Mine()
    assert backends.resolve(mine) is mine
    assert backends.resolve("mine") is mine
    again = Mine()
    backends.register(again)
    assert backends.get("mine") is again


def test_the_documents_name_every_recipe_and_every_member_of_the_protocol():
    root = Path(__file__).parent.parent
    documents = (root / "docs" / "backends.md").read_text(), (root / "README.md").read_text()
    for recipe in backends.RECIPES:
        assert all(f"| `{recipe}` |" in text or f'| `"{recipe}"` |' in text for text in documents), recipe
    for member in (name for name in vars(backends.Backend) if not name.startswith("_")):
        assert f"| `{member}(" in documents[0] or f"| `{member}`, an attribute" in documents[0], member
