import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES, is_accurate, random

from xlafuse.triton_side.blocks import rope as plain_block
from xlafuse.triton_side.kernels import rope
from xlafuse.triton_side.kernels.rope import RopeConfig

THETA = 500000.0
# Tiles and groups that do not divide rows and heads, a program with queries and keys, and one without either.
CONFIGS = [
    RopeConfig(vectors=2, heads=1, splits=1, num_warps=1),
    RopeConfig(vectors=8, heads=2, splits=2, num_warps=1),
    RopeConfig(vectors=64, heads=8, splits=5, num_warps=4),
]


def plain(q, k, positions, theta):
    """Return the block's result; for float64 angle and rotation are float64 too."""
    if q.dtype != torch.float64:
        return tuple(plain_block.apply({"q": q, "k": k, "positions": positions}, theta=theta).values())
    half = q.shape[-1] // 2
    pairs = torch.arange(half, dtype=torch.float64, device=q.device)
    angles = positions[:, None, :, None] * theta ** (-pairs / half)
    turn = torch.polar(torch.ones_like(angles), angles)
    turned = [torch.complex(x[..., :half], x[..., half:]) * turn for x in (q, k)]
    return tuple(torch.cat([z.real, z.imag], dim=-1) for z in turned)


def trained(function):
    """function as a launch: q, k, positions, and the gradients of both outputs -> the outputs, dq and dk."""

    def launch(q, k, positions, dq_out, dk_out):
        leaves = [x.detach().requires_grad_() for x in (q, k)]
        outputs = function(*leaves, positions, THETA)
        gradients = torch.autograd.grad(outputs, leaves, (dq_out, dk_out))
        return *(y.detach() for y in outputs), *gradients

    return launch


def configured(config: RopeConfig, module=rope):
    def launch(q, k, positions, dq_out, dk_out):
        gradients = module.launch_rope(dq_out, dk_out, positions, THETA, backward=True, config=config)
        return *module.launch_rope(q, k, positions, THETA, config=config), *gradients

    return launch


def operands(batch, heads, kv_heads, sequence, head_dim, dtype=torch.float32):
    """Return q, k, positions (from 0 on in the first sequence, 100 higher in each next one) and the gradients."""
    q, dq_out = (random(batch, heads, sequence, head_dim, dtype=dtype, seed=seed) for seed in (0, 1))
    k, dk_out = (random(batch, kv_heads, sequence, head_dim, dtype=dtype, seed=seed) for seed in (2, 3))
    positions = 100 * torch.arange(batch)[:, None] + torch.arange(sequence)
    return q, k, positions.to(DEVICE, torch.int32), dq_out, dk_out


def agrees(launch, q, k, positions, dq_out, dk_out) -> bool:
    got = launch(q, k, positions, dq_out, dk_out)
    low = trained(plain)(q, k, positions, dq_out, dk_out)
    wide = (x.double() for x in (q, k, dq_out, dk_out))
    q64, k64, dq64, dk64 = wide
    reference = trained(plain)(q64, k64, positions, dq64, dk64)
    return all(is_accurate(*values) for values in zip(got, low, reference, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 2), (2, 5, 1, 37, 10), (1, 9, 3, 67, 64), (3, 2, 2, 1, 128), (1, 1, 4, 5, 300)]
)
def test_agrees_with_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert agrees(trained(rope.rope), *operands(*shape, dtype=dtype))


@pytest.mark.parametrize("config", CONFIGS)
def test_any_configuration_gives_the_same(config: RopeConfig) -> None:
    given = operands(2, 5, 2, 19, 12)
    for one, other in zip(configured(config)(*given), trained(rope.rope)(*given), strict=True):
        assert torch.equal(one, other)


def test_in_place_and_into_views() -> None:
    q, k, positions, *_ = operands(2, 5, 2, 19, 12)
    expected = rope.launch_rope(q, k, positions, THETA)
    rows = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, k)], dim=-1)  # queries, keys and values of a product
    turned = torch.empty_like(rows)

    def views(rows):
        return rows.unflatten(-1, (9, 12)).transpose(1, 2).split((5, 2, 2), dim=1)

    for source, target in ((rows, turned), (rows, rows)):
        rope.launch_rope(*views(source)[:2], positions, THETA, out=views(target)[:2])
        assert all(torch.equal(x, y) for x, y in zip(views(target), expected, strict=False))
    assert torch.equal(views(rows)[2], k)


def test_far_positions_rotate_as_in_plain_code() -> None:
    q, k, positions, *gradients = operands(1, 2, 1, 33, 64)
    assert agrees(trained(rope.rope), q, k, positions + 100_000, *gradients)
    assert agrees(trained(rope.rope), q, k, positions - 1000, *gradients)


@pytest.mark.parametrize("theta", [1.0, 0.5, 1e-3])
def test_frequencies_of_one_and_more(theta: float) -> None:
    q, k, positions, *_ = operands(1, 1, 1, 33, 8)
    wide = q.double(), k.double(), positions, theta
    for got, low, reference in zip(
        rope.rope(q, k, positions, theta), plain(q, k, positions, theta), plain(*wide), strict=True
    ):
        assert is_accurate(got, low, reference)


def test_angles_do_not_err_with_the_position() -> None:
    """A product in float32 would err by 0.03 radians here."""
    q, k, positions, *_ = operands(1, 1, 1, 33, 64)
    far = positions + 2**20
    for got, reference in zip(
        rope.rope(q, k, far, THETA), plain(q.double(), k.double(), far, THETA), strict=True
    ):
        torch.testing.assert_close(got.double(), reference, rtol=0, atol=2e-6)


def test_backward_undoes_forward_and_keeps_lengths() -> None:
    q, k, positions, *_ = operands(1, 2, 1, 33, 16)
    turned = rope.launch_rope(q, k, positions, THETA)
    for x, there, back in zip((q, k), turned, rope.launch_rope(*turned, positions, THETA, backward=True), strict=True):
        torch.testing.assert_close(back, x)
        torch.testing.assert_close(there.norm(dim=-1), x.norm(dim=-1))


def test_only_positions_are_saved_and_one_output_may_have_a_gradient() -> None:
    q, k, positions, dq_out, dk_out = operands(1, 2, 1, 5, 4)
    q_out, _ = rope.rope(q.requires_grad_(), k.requires_grad_(), positions, THETA)
    assert [x is positions for x in q_out.grad_fn.saved_tensors] == [True]
    dq, dk = torch.autograd.grad(q_out, (q, k), dq_out)
    expected, _ = rope.launch_rope(dq_out, dk_out, positions, THETA, backward=True)
    assert torch.equal(dq, expected) and not dk.any()
