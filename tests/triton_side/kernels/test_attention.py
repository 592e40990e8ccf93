from functools import partial
from types import FunctionType

import pytest
import torch
from kernel_properties import attention_mask
from row_kernel_checks import DEVICE, DTYPES, is_accurate, random, with_gradients

from xlafuse.triton_side.kernels import attention, attention_backward, attention_few_tokens
from xlafuse.triton_side.kernels.shared import attention_configs as configs
from xlafuse.triton_side.kernels.shared import attention_tiles, head_splits
from xlafuse.triton_side.kernels.shared.attention_configs import TileConfig
from xlafuse.triton_side.kernels.shared.head_splits import launch_sum_splits

FORWARD = [
    TileConfig(32, 32, num_warps=4, num_stages=2, descriptors=False),
    TileConfig(64, 16, num_warps=4, num_stages=1, descriptors=True),
    TileConfig(16, 64, num_warps=4, num_stages=1, descriptors=False),
]
DK_DV = [
    TileConfig(32, 32, num_warps=4, num_stages=2, descriptors=False),
    TileConfig(16, 64, num_warps=4, num_stages=1, descriptors=True),
    TileConfig(64, 16, num_warps=4, num_stages=1, descriptors=False),
]
DQ = [
    TileConfig(32, 32, num_warps=4, num_stages=2, descriptors=False),
    TileConfig(64, 16, num_warps=4, num_stages=1, descriptors=True),
    TileConfig(16, 64, num_warps=4, num_stages=1, descriptors=False),
]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, window: int = 0) -> torch.Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT).to(wide) * q.shape[-1] ** -0.5
    seen = attention_mask(q.shape[2], causal, window, q.device)
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1).to(q.dtype) @ v


def tensors(
    batch: int, heads: int, sequence: int, head_dim: int, dtype: torch.dtype = torch.float32, kv_heads: int = 0
):
    counts = (heads, kv_heads or heads, kv_heads or heads, heads)
    return [random(batch, n, sequence, head_dim, dtype=dtype, seed=seed) for seed, n in enumerate(counts)]


def agrees(function, q, k, v, dout, **mask: int) -> bool:
    """Compare output and gradients with float64.

    The errors of plain code are those of several draws, because the maximum over so few elements, and the order in
    which a CPU sums, are luck.
    """
    got = with_gradients(function, q, k, v, dy=dout)
    low, reference = plainly(q, k, v, dout, **mask)
    draws = [
        [random(*x.shape, dtype=x.dtype, seed=seed + i) for i, x in enumerate((q, k, v, dout))]
        for seed in range(10, 90, 10)
    ]
    others = [plainly(*draw, **mask) for draw in draws]
    return all(
        is_accurate(got[i], low[i], reference[i], others=[(lows[i], references[i]) for lows, references in others])
        for i in range(4)
    )


def plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, **mask: int):
    """Return the results of plain code in the same dtype and in float64."""
    function = partial(plain, **mask)
    low = with_gradients(function, q, k, v, dy=dout)
    return low, with_gradients(function, q.double(), k.double(), v.double(), dy=dout.double())


def configured(
    forward: TileConfig, dk_dv: TileConfig, dq: TileConfig, causal: bool = True, window: int = 0,
    above=attention, below=attention_backward, splits: int | None = None,
):
    """Return a function of q, k, v and perhaps a bias, whose gradient kernel has dq's tiles.

    splits: of dk and dv; None for the launcher's own choice.
    """

    class Configured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, bias=None):
            out, logsumexp2 = above.launch_forward(q, k, v, forward, True, causal, window, bias=bias)
            ctx.save_for_backward(q, k, v, bias, out, logsumexp2)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, bias, out, logsumexp2 = ctx.saved_tensors
            arguments = (q, k, v, dout, logsumexp2, below.launch_delta(out, dout))
            dk, dv = below.launch_dk_dv(*arguments, dk_dv, causal, window, bias=bias, splits=splits)
            dbias = None if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
            of_one = dbias if len(q) == 1 else None
            gradients = below.launch_dq(*arguments, dq, causal, window, bias=bias, dbias=of_one), dk, dv
            if bias is None:
                return gradients
            if of_one is None:
                below.launch_dbias(*arguments, bias, dbias, dq)
            return *gradients, dbias

    return Configured.apply


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("sequence", [1, 17, 129])
def test_agrees_with_float64(sequence: int, head_dim: int, dtype: torch.dtype) -> None:
    q, k, v, dout = tensors(1, 2, sequence, head_dim, dtype)
    assert agrees(lambda q, k, v: attention.apply({"q": q, "k": k, "v": v})["out"], q, k, v, dout)


def test_gradients_that_repeat_bit_for_bit_are_those_of_the_portable_kernels() -> None:
    q, k, v, dout = tensors(1, 4, 37, 16, kv_heads=2)

    def of(apply, **options):
        return with_gradients(lambda q, k, v: apply({"q": q, "k": k, "v": v}, **options)["out"], q, k, v, dy=dout)

    found = of(attention.apply_deterministic)
    assert all(torch.equal(a, b) for a, b in zip(found, of(attention.apply, kernels="portable"), strict=True))


@pytest.mark.parametrize("sequence", [2, 48, 127, 129])
@pytest.mark.parametrize(("forward", "dk_dv", "dq"), list(zip(FORWARD, DK_DV, DQ, strict=True)))
def test_any_configuration_agrees(forward, dk_dv, dq, sequence: int) -> None:
    assert agrees(configured(forward, dk_dv, dq), *tensors(1, 1, sequence, 16, torch.float16))


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 1), (True, 40)])
def test_shared_heads_and_masks(causal: bool, window: int) -> None:
    q, k, v, dout = tensors(1, 4, 70, 16, torch.float16, kv_heads=2)
    function = partial(attention.attention, causal=causal, window=window)
    assert agrees(function, q, k, v, dout, causal=causal, window=window)
    if window != 1:  # no kernel computes the gradient of a lone key
        function = configured(FORWARD[1], DK_DV[1], DQ[1], causal, window)
        assert agrees(function, q, k, v, dout, causal=causal, window=window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "splits", "causal", "window"),
    [(4, 1, 4, True, 0), (6, 2, 3, False, 0), (4, 1, 2, True, 19)],
)
@pytest.mark.parametrize(("dk_dv", "sequence"), list(zip(DK_DV, (37, 48, 33), strict=True)))
def test_splits_of_shared_heads_agree_with_float64(
    dk_dv, sequence: int, heads: int, kv_heads: int, splits: int, causal: bool, window: int
) -> None:
    given = tensors(2, heads, sequence, 16, torch.float16, kv_heads=kv_heads)
    function = configured(FORWARD[0], dk_dv, DQ[0], causal, window, splits=splits)
    assert agrees(function, *given, causal=causal, window=window)


def test_few_programs_have_splits(monkeypatch) -> None:
    launched = []

    def launch(sums, dk, dv):
        launched.append(sums[0].shape[1] // dk.shape[1])
        launch_sum_splits(sums, dk, dv)

    monkeypatch.setattr(attention_backward, "launch_sum_splits", launch)
    monkeypatch.setattr(head_splits, "HOST_QUERIES", 0)
    assert agrees(attention.attention, *tensors(1, 8, 129, 16, torch.float16, kv_heads=1))
    assert launched and min(launched) > 1
    launched.clear()
    assert agrees(attention.attention, *tensors(1, 8, 33, 16, torch.float16, kv_heads=4)) and not launched


def test_splits_repeat_bit_for_bit_and_change_the_result_by_rounding_alone() -> None:
    q, k, v, dout = tensors(1, 4, 37, 16, kv_heads=1)
    whole, *split = (
        with_gradients(configured(FORWARD[0], DK_DV[0], DQ[0], splits=splits), q, k, v, dy=dout)
        for splits in (1, 4, 4)
    )
    for one, four, again in zip(whole, *split, strict=True):
        assert torch.equal(four, again) and torch.allclose(one, four, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("forward", "dk_dv", "dq"), list(zip(FORWARD, DK_DV, DQ, strict=True)))
def test_results_are_written_to_given_memory_and_nowhere_else(forward, dk_dv, dq, splits: int) -> None:
    """Columns of heads in rows of tokens, as the layers have them, equal a contiguous result."""
    q, k, v, dout = tensors(2, 2, 37, 16, torch.float16, kv_heads=1)
    rows = torch.full((2, 37, 2 + 2 + 1 + 1 + 1, 16), torch.nan, dtype=q.dtype, device=DEVICE).transpose(1, 2)
    out, dq_columns, dk_columns, dv_columns, between = rows.split((2, 2, 1, 1, 1), dim=1)
    whole, logsumexp2 = attention.launch_forward(q, k, v, forward, True)
    written, _ = attention.launch_forward(q, k, v, forward, False, out=out)
    given = (q, k, v, dout, logsumexp2, attention_backward.launch_delta(whole, dout))
    dk, dv = attention_backward.launch_dk_dv(*given, dk_dv, splits=splits)
    contiguous = (dk, dv, attention_backward.launch_dq(*given, dq))
    attention_backward.launch_dk_dv(*given, dk_dv, out=(dk_columns, dv_columns), splits=splits)
    attention_backward.launch_dq(*given, dq, out=dq_columns)
    assert written is out and torch.equal(out, whole) and whole.is_contiguous()
    for columns, expected in zip((dk_columns, dv_columns, dq_columns), contiguous, strict=True):
        assert expected.is_contiguous() and torch.equal(columns, expected)
    assert between.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("sequence", [1, 2, 3, 4])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 2)])
def test_few_tokens_have_a_kernel_of_their_own(causal: bool, window: int, sequence: int, dtype: torch.dtype) -> None:
    q, k, v, dout = (x.mT.contiguous().mT for x in tensors(2, 4, sequence, 32, dtype, kv_heads=2))
    window = 0 if window >= sequence else window
    function = partial(attention.attention, causal=causal, window=window)
    assert agrees(function, q, k, v, dout, causal=causal, window=window)
    out, logsumexp2 = attention_few_tokens.launch_few_tokens(q, k, v, True, causal, window)
    assert torch.equal(out, function(q, k, v)) and out.is_contiguous()
    _, portable = attention.forward(q, k, v, True, hopper=False, causal=causal, window=window)
    torch.testing.assert_close(logsumexp2, portable, rtol=1e-5, atol=1e-5)


def test_the_kernel_of_few_tokens_takes_few_tokens_alone() -> None:
    four, five = (torch.zeros(1, 1, tokens, 16, dtype=torch.float16) for tokens in (4, 5))
    wide = four.float()
    assert attention_few_tokens.takes(four, None, None)
    assert not attention_few_tokens.takes(five, None, None) and not attention_few_tokens.takes(wide, None, None)
    assert not attention_few_tokens.takes(four, four, None) and not attention_few_tokens.takes(four, None, four)


def test_a_nan_in_a_lone_query_reaches_the_output() -> None:
    q, k, v, _ = tensors(1, 2, 1, 16, torch.float16)
    q[0, 1, 0, 3] = torch.nan
    out = attention.attention(q, k, v)
    assert out[0, 1].isnan().all() and torch.equal(out[0, 0], v[0, 0])


def test_head_dim_256() -> None:
    assert agrees(attention.attention, *tensors(1, 2, 37, 256, kv_heads=1))


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 1), (True, 7), (True, 16), (True, 40)])
@pytest.mark.parametrize(("block_q", "block_kv"), [(16, 16), (8, 32), (32, 8)])
def test_loops_cover_the_visible_tiles_and_no_others(block_q: int, block_kv: int, causal: bool, window: int) -> None:
    sequence = 75
    seen = attention_mask(sequence, causal, window)
    walked = torch.zeros_like(seen)
    arguments = (sequence, block_q, block_kv, causal, window)
    for start in range(0, sequence, block_q):
        begin, whole_from, whole_until, end = tiles_of("visible_keys", start, *arguments)
        rows = seen[start : start + block_q]
        assert rows[:, whole_from:whole_until].all() and begin <= whole_from <= whole_until <= end <= sequence
        walked[start : start + block_q, begin:end] = True
        for tile in range(begin, end, block_kv):
            assert rows[:, tile : tile + block_kv].any()
    assert (walked >= seen).all()
    walked[:] = False
    for start in range(0, sequence, block_kv):
        begin, whole_from, whole_until, end = tiles_of("visible_queries", start, *arguments)
        columns = seen[:, start : start + block_kv]
        assert columns[whole_from:whole_until].all() and begin <= whole_from <= whole_until <= sequence
        assert begin % block_q == 0 and (whole_from % block_q == 0 or whole_from == sequence)
        walked[begin : max(end, whole_until), start : start + block_kv] = True
        for tile in range(begin, end, block_q):
            assert columns[tile : tile + block_q].any()
    assert (walked >= seen).all()


def tiles_of(name: str, *arguments: int) -> list[int]:
    """Return the result of a helper in `attention_tiles` for Python's numbers."""

    class Language:
        minimum, maximum = min, max

        @staticmethod
        def cdiv(a: int, b: int) -> int:
            return -(-a // b)

    function = getattr(attention_tiles, name).fn
    return list(FunctionType(function.__code__, {"tl": Language})(*arguments))


def test_batches_and_heads_keep_apart() -> None:
    q, k, v, dout = tensors(2, 3, 33, 16)
    v[1, 2] = torch.nan
    out = attention.attention(q, k, v)
    assert out[1, 2].isnan().all()
    assert out[:, :2].isfinite().all() and out[0].isfinite().all()
    v[1, 2] = 1.0
    assert agrees(attention.attention, q, k, v, dout)


def test_large_scores_stay_finite() -> None:
    q, k, v, dout = tensors(1, 1, 40, 16, torch.float16)
    assert agrees(attention.attention, 40 * q, k, v, dout)
    assert attention.attention(1e4 * q.float(), 1e4 * k.float(), v.float()).isfinite().all()


def test_medium_precision_is_refused() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ValueError, match="got float32_matmul_precision 'medium'; call"):
            attention.attention(*tensors(1, 1, 4, 16)[:3])
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("head_dim", attention.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_descriptors_are_chosen_only_where_they_fit(dtype, head_dim: int, precision: str) -> None:
    for shared in (False, True):
        facts = (dtype, head_dim, precision, False, shared, shared, False, False)  # shared heads and a window
        for choose in (configs.forward_config, configs.dk_dv_config, configs.dq_config):
            assert not choose(*facts).descriptors
