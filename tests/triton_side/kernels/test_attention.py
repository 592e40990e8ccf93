import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES, is_accurate, mutant, random, with_gradients

from triton_side.kernels import attention, attention_backward
from triton_side.kernels.attention import ForwardConfig
from triton_side.kernels.attention_backward import BackwardConfig

FORWARD = [
    ForwardConfig(32, 32, num_warps=4, num_stages=2, descriptors=False),
    ForwardConfig(64, 16, num_warps=4, num_stages=1, descriptors=True),
    ForwardConfig(16, 64, num_warps=4, num_stages=1, descriptors=False),
]
DK_DV = [
    BackwardConfig(32, 32, num_warps=4, num_stages=2, descriptors=False),
    BackwardConfig(16, 64, num_warps=4, num_stages=1, descriptors=True),
    BackwardConfig(64, 16, num_warps=4, num_stages=1, descriptors=False),
]
DQ = [
    BackwardConfig(32, 32, num_warps=4, num_stages=2, descriptors=False),
    BackwardConfig(64, 16, num_warps=4, num_stages=1, descriptors=True),
    BackwardConfig(16, 64, num_warps=4, num_stages=1, descriptors=False),
]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(wide) * q.shape[-1] ** -0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1).to(q.dtype) @ v


def tensors(batch: int, heads: int, sequence: int, head_dim: int, dtype: torch.dtype = torch.float32):
    return [random(batch, heads, sequence, head_dim, dtype=dtype, seed=seed) for seed in range(4)]


def agrees(function, q, k, v, dout) -> bool:
    """Output and gradients against float64. The maximum over so few elements is luck, and how a CPU sums is, too, so
    that the errors of plain code are those of several draws."""
    got = with_gradients(function, q, k, v, dy=dout)
    low, reference = plainly(q, k, v, dout)
    draws = [[random(*q.shape, dtype=q.dtype, seed=seed + i) for i in range(4)] for seed in range(10, 90, 10)]
    others = [plainly(*draw) for draw in draws]
    return all(
        is_accurate(got[i], low[i], reference[i], others=[(lows[i], references[i]) for lows, references in others])
        for i in range(4)
    )


def plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor):
    """Of plain code in the same dtype and in float64."""
    low = with_gradients(plain, q, k, v, dy=dout)
    return low, with_gradients(plain, q.double(), k.double(), v.double(), dy=dout.double())


def configured(
    forward: ForwardConfig, dk_dv: BackwardConfig, dq: BackwardConfig, above=attention, below=attention_backward
):
    class Configured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, logsumexp2 = above.launch_forward(q, k, v, forward, save_logsumexp=True)
            ctx.save_for_backward(q, k, v, out, logsumexp2)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, logsumexp2 = ctx.saved_tensors
            arguments = (q, k, v, dout, logsumexp2, below.launch_delta(out, dout))
            return below.launch_dq(*arguments, dq), *below.launch_dk_dv(*arguments, dk_dv)

    return Configured.apply


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64])
@pytest.mark.parametrize("sequence", [1, 17, 64, 129])
def test_agrees_with_float64(sequence: int, head_dim: int, dtype: torch.dtype) -> None:
    q, k, v, dout = tensors(1, 2, sequence, head_dim, dtype)
    assert agrees(lambda q, k, v: attention.apply({"q": q, "k": k, "v": v})["out"], q, k, v, dout)


@pytest.mark.parametrize("sequence", [2, 48, 127, 129])
@pytest.mark.parametrize(("forward", "dk_dv", "dq"), list(zip(FORWARD, DK_DV, DQ, strict=True)))
def test_any_configuration_agrees(forward, dk_dv, dq, sequence: int) -> None:
    assert agrees(configured(forward, dk_dv, dq), *tensors(1, 1, sequence, 16, torch.float16))


def test_batches_and_heads_keep_apart() -> None:
    q, k, v, dout = tensors(2, 3, 33, 16)
    v[1, 2] = torch.nan
    out = attention.attention(q, k, v)
    assert out[1, 2].isnan().all()
    assert out[:, :2].isfinite().all() and out[0].isfinite().all()
    v[1, 2] = 1.0
    assert agrees(attention.attention, q, k, v, dout)


def test_strides() -> None:
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(2, 3, 33, 16))
    assert agrees(attention.attention, q, k, v, dout), "heads between positions"
    q, k, v, dout = (x.mT.contiguous().mT for x in tensors(1, 2, 33, 16))
    assert agrees(attention.attention, q, k, v, dout), "positions side by side"
    q, k, v = random(1, 2, 33, 51, seed=1)[..., 3:].split(16, dim=-1)
    dout = random(1, 2, 1, 16, seed=2).expand(1, 2, 33, 16)
    assert agrees(attention.attention, q, k, v, dout), "misaligned rows, one row repeated"


def test_large_scores_stay_finite() -> None:
    q, k, v, dout = tensors(1, 1, 40, 16, torch.float16)
    assert agrees(attention.attention, 40 * q, k, v, dout)
    assert attention.attention(1e4 * q.float(), 1e4 * k.float(), v.float()).isfinite().all()


def test_inference_saves_nothing_and_training_no_square() -> None:
    q, k, v, _ = tensors(1, 2, 40, 16)
    assert attention.attention(q, k, v).grad_fn is None
    with torch.no_grad():
        assert attention.attention(q.requires_grad_(), k, v).grad_fn is None
    out = attention.attention(q, k, v)
    saved = out.grad_fn.saved_tensors
    assert [tuple(x.shape) for x in saved] == [(1, 2, 40, 16)] * 4 + [(1, 2, 40)]
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_empty() -> None:
    q, k, v = (torch.zeros(0, 2, 5, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    out = attention.attention(q, k, v)
    out.sum().backward()
    assert out.shape == q.grad.shape == (0, 2, 5, 16)


def test_rejects() -> None:
    q, k, v, _ = tensors(1, 2, 8, 16)
    with pytest.raises(ValueError, match=r"got \(1, 2, 8, 16\), \(1, 1, 8, 16\).*repeat shared heads"):
        attention.attention(q, k[:, :1], v)
    with pytest.raises(ValueError, match="head_dim must be one of .* got 24; pad"):
        attention.attention(*(torch.zeros(1, 1, 4, 24, device=DEVICE),) * 3)
    with pytest.raises(TypeError, match="one dtype"):
        attention.attention(q, k.half(), v)


def test_medium_precision_is_refused() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ValueError, match="got float32_matmul_precision 'medium'; call"):
            attention.attention(*tensors(1, 1, 4, 16)[:3])
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("head_dim", attention.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_descriptors_are_chosen_only_where_they_fit(dtype, head_dim: int, precision: str, descriptors: bool) -> None:
    chosen = (dtype, head_dim, precision, descriptors)
    for choose in (attention.forward_config, attention.dk_dv_config, attention.dq_config):
        assert descriptors or not choose(*chosen).descriptors


@pytest.mark.parametrize(
    ("sound", "broken"),
    [
        ("row[:, None] >= column[None, :]", "row[:, None] >= 0"),
        ("row[:, None] >= column[None, :]", "row[:, None] > column[None, :]"),
        ("head_dim**-0.5 * LOG2_E", "head_dim**-0.5"),
        ("row_sum * correction", "row_sum"),
        ("accumulator = accumulator * correction[:, None]", "pass"),
        ("row_max + tl.log2(row_sum)", "row_max"),
        ("0, masked_from, sequence", "BLOCK_KV, masked_from, sequence"),
        ("head = head_index % heads", "head = 0"),
        ("masked_from = q_start // BLOCK_KV * BLOCK_KV", "masked_from = q_start"),
    ],
)
def test_comparison_catches(sound: str, broken: str, tmp_path) -> None:
    above = mutant(attention, sound, broken, tmp_path)
    assert not all(
        agrees(configured(forward, DK_DV[0], DQ[0], above=above), *tensors(1, 2, 70, 16))
        for forward in (FORWARD[0], FORWARD[2])
    )


@pytest.mark.parametrize(
    ("sound", "broken"),
    [
        ("row[None, :] >= column[:, None]", "row[None, :] >= 0"),
        ("row[:, None] >= column[None, :]", "row[:, None] >= 0"),
        ("scale * LOG2_E", "scale"),
        ("dk * scale", "dk"),
        ("dq * scale", "dq"),
        ("dp - delta[None, :]", "dp"),
        ("dp - delta[:, None]", "dp"),
        ("kv_start, diagonal_end, sequence, sequence", "kv_start, diagonal_end, diagonal_end, sequence"),
        ("row < sequence, other=0.0)\n            delta", "row < 0, other=0.0)\n            delta"),
        ("masked_from = q_start // BLOCK_KV * BLOCK_KV", "masked_from = q_start"),
        ("tl.cdiv(kv_start + BLOCK_KV, BLOCK_Q) * BLOCK_Q", "kv_start"),
        ("diagonal_begin = kv_start // BLOCK_Q * BLOCK_Q", "diagonal_begin = kv_start + BLOCK_KV"),
    ],
)
def test_comparison_catches_in_the_gradient(sound: str, broken: str, tmp_path) -> None:
    below = mutant(attention_backward, sound, broken, tmp_path)
    assert not all(
        agrees(configured(FORWARD[0], dk_dv, dq, below=below), *tensors(1, 2, 70, 16))
        for dk_dv, dq in ((DK_DV[0], DQ[0]), (DK_DV[2], DQ[2]))
    )
