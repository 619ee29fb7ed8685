"""Blockwise float8: an oracle of its own, torchao's reference to the bit, and the kernels' path on stand-ins.

The kernels run on SM90 only. What is tested without such a GPU is that our calls fit torchao's real signatures,
layouts and shapes, and that the products come out right when each kernel does what its name says.
"""

import importlib
import inspect
import sys
import types

import pytest
import torch
import torchao.float8
import torchao.quantization  # noqa: F401  # before the stub below: these ask whether Triton is there
from torch.utils._triton import has_triton, has_triton_package

from gnmr_lightning import backends
from gnmr_lightning.backends import blockwise

SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
BLOCK = 128
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def kernels():
    """torchao's file of kernels and references, with Triton's decorators replaced where there is no Triton."""
    missing = not has_triton_package()
    has_triton()  # both answers are kept from here on, so the stub cannot change them
    if missing:
        triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
        triton.language, language.constexpr = language, int
        triton.Config, triton.cdiv = (lambda *args, **kwargs: None), (lambda a, b: -(-a // b))
        triton.autotune, triton.jit = (lambda **kwargs: lambda kernel: kernel), (lambda kernel: kernel)
        sys.modules |= {"triton": triton, "triton.language": language}
    try:
        return importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
    finally:
        if missing:
            del sys.modules["triton"], sys.modules["triton.language"]


def dequantised(operand, rows, columns):
    """Block by block: the values that a block's float8 codes and its one float32 scale stand for, in float64."""
    operand, result = operand.double(), torch.empty(operand.shape, dtype=torch.float64)
    for i in range(0, operand.shape[0], rows):
        for j in range(0, operand.shape[1], columns):
            block = operand[i : i + rows, j : j + columns]
            scale = (448 / block.abs().max().clamp(min=1e-12)).float()
            result[i : i + rows, j : j + columns] = (block.float() * scale).to(E4M3).double() / scale.double()
    return result


def operands(m, k, n, dtype=torch.float32):
    """Of very different sizes from one block to the next, so that a scale taken from another block shows."""
    torch.manual_seed(0)
    x, grad, weight = torch.randn(m, k), torch.randn(m, n), torch.randn(n, k)
    for operand in (x, grad, weight):
        operand *= 10 ** torch.randn(-(-operand.shape[0] // 64), 1).repeat_interleave(64, 0)[: operand.shape[0]]
        operand *= 10 ** torch.randn(1, -(-operand.shape[1] // 64)).repeat_interleave(64, 1)[:, : operand.shape[1]]
    return x.to(dtype), grad.to(dtype), weight


def assert_close(ours, expected, rtol):
    """Relative to the size of the sum's terms, which is what rounding is relative to."""
    assert ours.shape == expected[0].shape
    assert (ours.double() - expected[0]).abs().le(rtol * expected[1] + 1e-30).all()


def product(left, right):
    """left @ right and the same of the absolute values."""
    return left @ right, left.abs() @ right.abs()


@pytest.mark.parametrize(
    ("m", "k", "n"), [(128, 256, 128), (256, 128, 384), (7, 200, 130), (1, 32, 10), (130, 64, 257), (300, 384, 48)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_products_equal_an_oracle_that_dequantises_and_multiplies(m, k, n, dtype):
    x, grad, weight = operands(m, k, n, dtype)
    backend = backends.resolve("float8_blockwise")
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    output = backend.output(x, weight)
    assert output.dtype == dtype
    assert_close(output, product(dequantised(x, 1, BLOCK), dequantised(weight, BLOCK, BLOCK).T), rtol)
    grad_input, grad_weight = backend.grads(grad, x, weight, need_input=True, need_weight=True)
    assert_close(grad_input, product(dequantised(grad, 1, BLOCK), dequantised(weight, BLOCK, BLOCK)), rtol)
    assert_close(grad_weight, product(dequantised(grad, BLOCK, 1).T, dequantised(x, BLOCK, 1)), rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_equals_torchaos_reference_to_the_bit(kernels, dtype):
    x, _, weight = operands(256, 384, 256, dtype)
    x[3], weight[:128, :128] = 0.0, 0.0
    codes, scale = kernels.torch_blockwise_scale_act_quant_lhs(x)
    assert torch.equal(blockwise._rounded(x, 1, BLOCK), codes.float() * scale.repeat_interleave(BLOCK, 1))
    codes, scale = kernels.torch_blockwise_scale_act_quant_rhs(x)
    assert torch.equal(blockwise._rounded(x, BLOCK, 1), codes.float() * scale.repeat_interleave(BLOCK, 0))
    codes, scale = kernels.torch_blockwise_scale_weight_quant(weight)
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert torch.equal(blockwise._rounded(weight, BLOCK, BLOCK), codes.float() * spread)


def stand_ins(kernels):
    """Each kernel that we call, in plain torch: torchao's reference, in the layout that the kernel's docstring says."""

    def column_major(tensor):
        return torch.empty_strided(tensor.shape, (1, tensor.shape[0]), dtype=tensor.dtype).copy_(tensor)

    def act_quant_lhs(x, block_size=128):
        assert x.is_contiguous()
        assert x.shape[1] % block_size == 0
        codes, scale = kernels.torch_blockwise_scale_act_quant_lhs(x)
        return codes, column_major(scale)

    def act_quant_transposed_lhs(x, block_size=128):
        assert x.is_contiguous()
        assert x.shape[0] % block_size == 0
        return act_quant_lhs(x.t().contiguous())

    def weight_quant_rhs(x, block_size=128):
        assert x.is_contiguous()
        codes, scale = kernels.torch_blockwise_scale_weight_quant(x)
        return column_major(codes), column_major(scale)

    def weight_quant_transposed_rhs(x, block_size=128):
        assert x.is_contiguous()
        return weight_quant_rhs(x.t().contiguous())

    def gemm(a, b, a_s, b_s, columns, dtype):
        assert kernels._is_row_major(a)
        assert kernels._is_column_major(b)
        assert a.shape[1] == b.shape[0]
        assert a_s.shape == (a.shape[0], a.shape[1] // BLOCK)
        assert b_s.shape == (b.shape[0] // BLOCK, b.shape[1] // columns)
        left = a.float() * a_s.repeat_interleave(BLOCK, 1)
        return (left @ (b.float() * b_s.repeat_interleave(BLOCK, 0).repeat_interleave(columns, 1))).to(dtype)

    def gemm_1x128_128x128(a, b, a_s, b_s, block_size=128, out_dtype=torch.float32):
        assert kernels._is_column_major(a_s)
        assert kernels._is_column_major(b_s)
        return gemm(a, b, a_s, b_s, BLOCK, out_dtype)

    def gemm_1x128_128x1(a, b, a_s, b_s, block_size=128, out_dtype=torch.float32):
        assert kernels._is_column_major(a_s)
        assert kernels._is_row_major(b_s)
        return gemm(a, b, a_s, b_s, 1, out_dtype)

    def scaled_mm(a, b, a_s, recipe_a, b_s, recipe_b, *, output_dtype):
        assert recipe_a == kernels.BLOCKWISE_1X128_SCALING_TYPE
        assert kernels._is_column_major(a_s)
        assert a.shape[0] % 4 == 0, "cuBLAS wants the columns of scales 16 bytes apart"
        if recipe_b == kernels.BLOCKWISE_1X128_SCALING_TYPE:
            assert b_s.shape == (b.shape[1], b.shape[0] // BLOCK)
            assert kernels._is_column_major(b_s)
            return gemm(a, b, a_s, b_s.t(), 1, output_dtype)
        assert recipe_b == kernels.BLOCKWISE_128X128_SCALING_TYPE
        assert b_s.shape[0] % 4 == 0
        return gemm(a, b, a_s, b_s[: b.shape[0] // BLOCK], BLOCK, output_dtype)

    return scaled_mm, {
        "triton_fp8_blockwise_act_quant_lhs": act_quant_lhs,
        "triton_fp8_blockwise_act_quant_rhs": kernels.torch_blockwise_scale_act_quant_rhs,
        "triton_fp8_blockwise_act_quant_transposed_lhs": act_quant_transposed_lhs,
        "triton_fp8_blockwise_weight_quant_rhs": weight_quant_rhs,
        "triton_fp8_blockwise_weight_quant_transposed_rhs": weight_quant_transposed_rhs,
        "triton_fp8_gemm_1x128_128x128": gemm_1x128_128x128,
        "triton_fp8_gemm_1x128_128x1": gemm_1x128_128x1,
    }


@pytest.mark.parametrize("cublas", [True, False])
@pytest.mark.parametrize(("m", "k", "n"), [(128, 256, 384), (7, 128, 128), (1, 640, 128), (130, 128, 256)])
def test_the_kernels_path_fits_torchaos_signatures_layouts_and_shapes(kernels, monkeypatch, cublas, m, k, n):
    called = set()
    scaled_mm, replaced = stand_ins(kernels)

    def checked(name, function):
        signature = inspect.signature(getattr(kernels, name)._init_fn)

        def call(*args, **kwargs):
            signature.bind(*args, **kwargs)
            called.add(name)
            return function(*args, **kwargs)

        return call

    for name, function in replaced.items():
        monkeypatch.setattr(kernels, name, checked(name, function))
    monkeypatch.setattr(blockwise.F, "scaled_mm", scaled_mm)
    x, grad, weight = operands(m, k, n, torch.bfloat16)
    backend = backends.resolve("float8_blockwise")
    expected = [backend.output(x, weight), backend.grad_input(grad, weight), backend.grad_weight(grad, x)]
    assert not called
    monkeypatch.setattr(blockwise, "_has_kernels", lambda device: True)
    monkeypatch.setattr(blockwise, "_cublas_takes_blocks", lambda device: cublas)
    # also as it may come: not contiguous
    wide = [torch.stack([t, t], 2).flatten(1)[:, ::2] for t in (x, grad, weight)]
    for x_, grad_, weight_ in ((x, grad, weight), wide):
        ours = [backend.output(x_, weight_), backend.grad_input(grad_, weight_), backend.grad_weight(grad_, x_)]
        for a, b in zip(ours, expected, strict=True):
            assert a.dtype == torch.bfloat16
            torch.testing.assert_close(a, b, rtol=2**-7, atol=0.02 * float(b.float().abs().mean()))
    assert called == {name for name in replaced if not (cublas and "gemm" in name)}


@pytest.mark.skipif(not SM90, reason="torchao's blockwise kernels need a CUDA GPU of compute capability 9.0")
@pytest.mark.parametrize(("m", "k", "n"), [(256, 512, 384), (7, 128, 128), (1, 640, 128), (130, 128, 256)])
@pytest.mark.parametrize("cublas", [True, False])
def test_the_kernels_equal_the_emulation_on_a_gpu(monkeypatch, m, k, n, cublas):
    if not cublas:
        monkeypatch.setattr(blockwise, "_cublas_takes_blocks", lambda device: False)
    x, grad, weight = operands(m, k, n, torch.bfloat16)
    backend = backends.resolve("float8_blockwise")
    assert blockwise._has_kernels(torch.device("cuda"))
    for name, given in (("output", (x, weight)), ("grad_input", (grad, weight)), ("grad_weight", (grad, x))):
        expected = getattr(backend, name)(*given).float()
        ours = getattr(backend, name)(*(t.cuda() for t in given)).float().cpu()
        assert (ours - expected).norm() <= 0.01 * expected.norm()


def test_on_a_gpu_a_layer_of_other_sizes_stays_as_it_is_and_rows_may_be_any():
    backend = backends.resolve("float8_blockwise")
    assert backend.refuses_layer(256, 128, "cuda") is None
    assert backend.refuses_layer(200, 128, "cuda") == "in_features=200; float8_blockwise needs a multiple of 128"
    assert backend.refuses_layer(256, 48, "cuda") == "out_features=48; float8_blockwise needs a multiple of 128"
    assert backend.refuses_layer(200, 48, "cpu") is None
    assert backend.takes_rows(7, "cuda")


@pytest.mark.parametrize(
    ("capability", "cuda", "triton", "kernels_run", "cublas"),
    [
        ((8, 0), "12.9", True, False, False),
        ((9, 0), "12.6", True, True, False),
        ((9, 0), "12.9", True, True, True),
        ((9, 0), "13.0", True, True, True),
        ((9, 0), "13.0", False, False, True),
        ((10, 0), "13.0", True, True, False),
    ],
)
def test_the_device_chooses_the_path(monkeypatch, capability, cuda, triton, kernels_run, cublas):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(blockwise, "has_triton", lambda: triton)
    assert blockwise._has_kernels(torch.device("cuda")) == kernels_run
    assert blockwise._cublas_takes_blocks(torch.device("cuda")) == cublas
    assert not blockwise._has_kernels(torch.device("cpu"))


def test_a_torchao_without_the_kernels_is_refused_where_they_would_run(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(blockwise, "find_spec", lambda name: None)
    monkeypatch.setattr(blockwise, "_has_kernels", lambda device: False)
    assert backends.resolve("float8_blockwise").refuses_device(cuda) is None  # emulated
    monkeypatch.setattr(blockwise, "_has_kernels", lambda device: True)
    assert "which this torchao lacks: install 0.18 or later" in backends.resolve("float8_blockwise").refuses_device(
        cuda
    )
