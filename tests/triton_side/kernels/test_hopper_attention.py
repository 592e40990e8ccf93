"""The attention kernels for Hopper GPUs against float64. They run on such a GPU only; Gluon has no interpreter."""

from functools import partial

import pytest
import torch
from row_kernel_checks import DEVICE, random, with_gradients
from test_attention import agrees, tensors
from test_attention_packed import boundaries
from test_attention_packed import tensors as packed_tensors

from xlafuse.triton_side.kernels import attention
from xlafuse.triton_side.kernels.attention import hopper_problem
from xlafuse.triton_side.kernels.attention_packed import attention_packed
from xlafuse.triton_side.kernels.hopper import attention_backward as hopper_backward
from xlafuse.triton_side.kernels.hopper import attention_forward as hopper_forward


def on_hopper() -> bool:
    return DEVICE == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper(), reason="needs a GPU of compute capability 9.0")]

MASKS = [(True, 0), (False, 0), (True, 7), (True, 128), (True, 300), (True, 384)]
FUNCTION = partial(attention.attention, kernels="hopper")
BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("sequence", [2, 40, 129, 777, 1024])
def test_agrees_with_float64(sequence: int, causal: bool, window: int, head_dim: int, dtype: torch.dtype) -> None:
    mask = {"causal": causal, "window": window}
    assert agrees(partial(FUNCTION, **mask), *tensors(1, 4, sequence, head_dim, dtype, kv_heads=2), **mask)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 128)])
@pytest.mark.parametrize("sequence", [40, 129, 777])
def test_splits_agree_with_float64(
    monkeypatch, sequence: int, causal: bool, window: int, head_dim: int, splits: int
) -> None:
    monkeypatch.setattr(hopper_backward, "choose_splits", lambda *_: splits)
    mask = {"causal": causal, "window": window}
    assert agrees(partial(FUNCTION, **mask), *tensors(2, 8, sequence, head_dim, BFLOAT16, kv_heads=2), **mask)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (1, 128), (2, 256)])
def test_splits_give_equal_results_in_given_memory(kv_heads: int, head_dim: int) -> None:
    """A race would show in repeated calls."""
    q, k, v, dout = tensors(1, 16, 1030, head_dim, BFLOAT16, kv_heads=kv_heads)
    assert hopper_backward.choose_splits(q, k, hopper_backward.KEYS[head_dim], True, 0, None) > 1
    out, logsumexp2 = attention.forward(q, k, v, True, hopper=True)
    _, *first = attention.backward(q, k, v, out, dout, logsumexp2, hopper=True)
    rows = torch.full((1, 1030, 16 + 2 * kv_heads + 1, head_dim), torch.nan, dtype=q.dtype, device=DEVICE)
    *gradients, between = rows.transpose(1, 2).split((16, kv_heads, kv_heads, 1), dim=1)
    for _ in range(20):
        attention.backward(q, k, v, out, dout, logsumexp2, hopper=True, gradients=tuple(gradients))
        assert all(torch.equal(a, b) for a, b in zip(gradients[1:], first, strict=True))
    assert between.isnan().all()


@pytest.fixture
def four_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few heads get them, too."""
    monkeypatch.setattr(hopper_forward, "choose_tiling", lambda *_: hopper_forward.FULL_TILES[64])


@pytest.mark.usefixtures("four_consumers")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sequence", [2, 63, 64, 65, 129, 192, 255, 256, 257, 320, 777, 1024])
def test_four_consumers_agree_with_float64(sequence: int, dtype: torch.dtype) -> None:
    """Sequences end in each consumer's rows, and have from one tile of keys to several rounds of the buffers."""
    given = tensors(1, 4, sequence, 64, dtype, kv_heads=2)
    assert agrees(partial(FUNCTION, causal=False), *given, causal=False)


@pytest.mark.usefixtures("four_consumers")
def test_four_consumers_with_several_tiles_a_program() -> None:
    """A race would show in repeated calls."""
    q, k, v, dout = tensors(3, 50, 300, 64, BFLOAT16, kv_heads=25)
    assert agrees(partial(FUNCTION, causal=False), q, k, v, dout, causal=False)
    expected = FUNCTION(q, k, v, causal=False)
    assert all(torch.equal(FUNCTION(q, k, v, causal=False), expected) for _ in range(50))


def test_enough_heads_get_four_consumers() -> None:
    """One tile of 256 queries, or two of 128, for each multiprocessor."""
    heads = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    assert agrees(partial(FUNCTION, causal=False), *tensors(1, heads, 200, 64, BFLOAT16), causal=False)


@pytest.mark.parametrize("causal", [True, False])
def test_many_heads_and_batches(causal: bool) -> None:
    """More tiles than multiprocessors: programs take several, from several heads."""
    function = partial(FUNCTION, causal=causal)
    assert agrees(function, *tensors(3, 50, 300, 128, BFLOAT16), causal=causal)


def test_large_scores() -> None:
    q, k, v, dout = tensors(1, 2, 300, 128, BFLOAT16)
    assert agrees(FUNCTION, 30 * q, k, v, dout)


def test_strides() -> None:
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(2, 3, 200, 128, BFLOAT16))
    assert agrees(FUNCTION, q, k, v, dout), "heads between positions"
    q, k, v = random(2, 3, 200, 3 * 64, dtype=BFLOAT16, seed=1).split(64, dim=-1)
    dout = random(2, 3, 1, 64, dtype=BFLOAT16, seed=2).expand(2, 3, 200, 64)
    assert agrees(FUNCTION, q, k, v, dout), "columns of one tensor, one row repeated"
    flat = random(2 * 3 * 200 * 64 + 1, dtype=BFLOAT16, seed=4)
    assert agrees(FUNCTION, q, k, v, flat[1:].view(2, 3, 200, 64)), "contiguous, and 2 bytes off"
    whole = random(2, 1, 200, 64, dtype=BFLOAT16, seed=3).expand(2, 3, 200, 64)
    assert agrees(FUNCTION, whole, k, v, dout), "one head repeated"


def test_results_are_written_to_given_memory_and_nowhere_else() -> None:
    """Columns of heads in rows of tokens, as the layers have them, equal a contiguous result."""
    q, k, v, dout = tensors(2, 2, 137, 128, BFLOAT16, kv_heads=1)
    rows = torch.full((2, 137, 2 + 2 + 1 + 1 + 1, 128), torch.nan, dtype=q.dtype, device=DEVICE).transpose(1, 2)
    out, dq, dk, dv, between = rows.split((2, 2, 1, 1, 1), dim=1)
    whole, logsumexp2 = attention.forward(q, k, v, True, hopper=True)
    attention.forward(q, k, v, False, hopper=True, out=out)
    contiguous = attention.backward(q, k, v, whole, dout, logsumexp2, hopper=True)
    attention.backward(q, k, v, out, dout, logsumexp2, hopper=True, gradients=(dq, dk, dv))
    assert torch.equal(out, whole)
    assert torch.equal(dk, contiguous[1]) and torch.equal(dv, contiguous[2])
    assert torch.allclose(dq, contiguous[0], rtol=1e-2, atol=1e-2)  # summed in another order
    assert between.isnan().all()


def test_repeated_calls_give_equal_results() -> None:
    """A race would show. dq is a sum in an order that varies, of float32 numbers that are then rounded."""
    q, k, v, dout = tensors(2, 8, 1000, 128, BFLOAT16, kv_heads=4)
    first = with_gradients(FUNCTION, q, k, v, dy=dout)
    for _ in range(50):
        out, dq, dk, dv = with_gradients(FUNCTION, q, k, v, dy=dout)
        assert torch.equal(out, first[0]) and torch.equal(dk, first[2]) and torch.equal(dv, first[3])
        assert ((dq - first[1]).abs() <= 2**-7 * first[1].abs() + 1e-5).all()


@pytest.mark.parametrize("everywhere", [True, False])
def test_deterministic_gradients_on_request(everywhere: bool) -> None:
    q, k, v, dout = tensors(1, 4, 3000, 128, BFLOAT16, kv_heads=1)
    function = FUNCTION if everywhere else partial(FUNCTION, deterministic=True)
    torch.use_deterministic_algorithms(everywhere)
    try:
        first = with_gradients(function, q, k, v, dy=dout)
        for _ in range(10):
            again = with_gradients(function, q, k, v, dy=dout)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


LENGTHS = [[37], [1, 133, 16, 5], [128, 128, 256, 1, 1], [0, 200, 0, 0, 340, 0], [64] * 40]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_packed_sequence_is_computed_as_if_alone(lengths: list[int], head_dim: int) -> None:
    q, k, v, dout = packed_tensors(sum(lengths), 4, 2, head_dim, BFLOAT16)
    packed = with_gradients(lambda *x: attention_packed(*x, boundaries(lengths), kernels="hopper"), q, k, v, dy=dout)
    first = 0
    for length in filter(None, lengths):
        rows = slice(first, first + length)
        alone = (x[rows].transpose(0, 1)[None].contiguous() for x in (q, k, v))
        given = dout[rows].transpose(0, 1)[None].contiguous()
        expected = with_gradients(FUNCTION, *alone, dy=given)
        for i, (got, right) in enumerate(zip(packed, expected, strict=True)):
            found = got[rows].transpose(0, 1)[None]
            # A lone token's dq and dk are exact zeros without a kernel, and rounding errors with one.
            close = 0.3 if length == 1 and i in (1, 2) else 1e-2
            assert torch.allclose(found, right, rtol=1e-2, atol=close), (length, i)
        first += length


def test_streams_and_graphs_do_not_share_a_counter() -> None:
    q, k, v, _ = tensors(2, 16, 700, 128, BFLOAT16)
    expected = FUNCTION(q, k, v)
    streams = [torch.cuda.Stream() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = FUNCTION(q, k, v)
    outs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(FUNCTION(q, k, v))
        graph.replay()
        outs.append(FUNCTION(q, k, v))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in [*outs, captured])


def test_operands_that_they_cannot_take() -> None:
    q, k, v, _ = tensors(1, 2, 40, 128, BFLOAT16)
    assert hopper_problem(q, k, v, None) is None
    assert hopper_problem(q.float(), k.float(), v.float(), None)
    assert hopper_problem(*(x[..., :32] for x in (q, k, v)), None)
    misaligned = random(1, 2, 40, 129, dtype=BFLOAT16)[..., 1:]
    with pytest.raises(ValueError, match="TMA"):
        FUNCTION(misaligned, misaligned, misaligned)
    portable = attention.attention(misaligned, misaligned, misaligned)
    assert torch.allclose(portable, FUNCTION(*[misaligned.contiguous()] * 3), rtol=2e-2, atol=2e-2)
