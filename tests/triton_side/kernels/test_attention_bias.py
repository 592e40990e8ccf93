from types import FunctionType

import pytest
import torch
from kernel_properties import attention as problem
from kernel_properties import training
from row_kernel_checks import DTYPES, random, with_gradients
from test_attention import DK_DV, DQ, FORWARD, configured

from xlafuse.triton_side.kernels import attention
from xlafuse.triton_side.kernels.attention_bias import attention_bias
from xlafuse.triton_side.kernels.shared import attention_tiles


def tensors(batch: int, heads: int, sequence: int, head_dim: int, dtype: torch.dtype = torch.float32):
    """Return q, k, v, dout and a bias that hides every third pair, and all keys of one query in each head."""
    bias = random(heads, sequence, sequence, dtype=dtype, seed=4)
    bias.view(-1)[::3] = -torch.inf
    bias[:, sequence // 2] = -torch.inf
    return *(random(batch, heads, sequence, head_dim, dtype=dtype, seed=seed) for seed in range(4)), bias


def of(function, q, k, v, dout, bias) -> str | None:
    return problem(training(function), q, k, v, dout, causal=False, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "sequence"), [(1, 1), (3, 17), (2, 64), (1, 129)])
def test_within_the_bounds_of_rounding(batch: int, sequence: int, dtype: torch.dtype) -> None:
    assert not of(attention_bias, *tensors(batch, 2, sequence, 32, dtype))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("forward", "dk_dv", "dq"), list(zip(FORWARD, DK_DV, DQ, strict=True)))
def test_any_configuration_is_within_the_bounds_of_rounding(forward, dk_dv, dq, batch: int) -> None:
    assert not of(configured(forward, dk_dv, dq, False), *tensors(batch, 2, 70, 16))


def test_a_query_without_keys_gives_zeros_and_no_gradient() -> None:
    q, k, v, dout, bias = tensors(2, 2, 40, 16)
    bias[:, :, 7] = -torch.inf
    out, dq, dk, dv, dbias = with_gradients(attention_bias, q, k, v, bias, dy=dout)
    assert not out[:, :, 20].any() and not dq[:, :, 20].any() and not dbias[:, 20].any()
    assert not dk[:, :, 7].any() and not dv[:, :, 7].any() and not dbias[:, :, 7].any(), "gradients of a hidden key"
    assert all(x.isfinite().all() for x in (out, dq, dk, dv, dbias))


def test_a_bias_without_gradient_launches_no_dbias_kernel(monkeypatch) -> None:
    q, k, v, dout, bias = tensors(1, 2, 17, 16)
    monkeypatch.setattr(attention, "launch_dbias", None)
    out = attention_bias(q.requires_grad_(), k, v, bias)
    assert torch.autograd.grad(out, q, dout)[0].any()
    with torch.no_grad():
        assert attention_bias(q, k, v, bias.requires_grad_()).grad_fn is None


@pytest.mark.parametrize("block", [16, 32])
def test_programs_that_read_the_same_bias_are_neighbours(block: int) -> None:
    """Each tile of each head has one program, and programs that read the same bias have consecutive numbers."""
    batch, heads, sequence = 3, 2, 70
    tiles = -(-sequence // block)
    numbers = [program_number(p, batch * heads * tiles, sequence, heads, block) for p in range(batch * heads * tiles)]
    assert sorted(numbers) == list(range(batch * heads * tiles))
    of_bias = [number % (heads * tiles) for number in numbers]
    assert of_bias == [i // batch for i in range(batch * heads * tiles)]


def program_number(program: int, programs: int, *arguments: int) -> int:
    class Language:
        @staticmethod
        def program_id(axis: int) -> int:
            return program

        @staticmethod
        def num_programs(axis: int) -> int:
            return programs

        @staticmethod
        def cdiv(a: int, b: int) -> int:
            return -(-a // b)

    function = attention_tiles.program_number.fn
    return FunctionType(function.__code__, {"tl": Language})("a bias", *arguments)
