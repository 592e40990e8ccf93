from collections.abc import Iterator, Sequence
from types import ModuleType

import moe_properties as properties
import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES_OF_COMPOSITIONS, is_accurate, random

from xlafuse.triton_side.blocks import moe as plain
from xlafuse.triton_side.kernels import moe, moe_routing
from xlafuse.triton_side.kernels.moe_routing import Route
from xlafuse.triton_side.kernels.shared import grouped_gradient, grouped_product
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig

# NumPy computes for the interpreter and warns about NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAMES = ("x", "router", "w_gate", "w_up", "w_down")
TILES = MatmulConfig(32, 32, 16, num_warps=4, num_stages=1, group_m=2, descriptors=False)
DESCRIPTORS = MatmulConfig(16, 32, 32, num_warps=4, num_stages=2, group_m=2)


def choices(tokens: int, experts: int, top_k: int, used: int) -> torch.Tensor:
    """Return different experts for each token out of those `used`, some far more often than others."""
    generator = torch.Generator().manual_seed(tokens)
    likely = 0.5 ** torch.arange(used, dtype=torch.float32)
    return torch.stack([torch.multinomial(likely + 1e-3, top_k, generator=generator) for _ in range(tokens)]).to(DEVICE)


def inputs(
    tokens: int, width: int, hidden: int, experts: int, top_k: int, used: int, dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return x, the router and the weights; x prefers its choices along its first coordinates, the router's rows."""
    x, router = random(tokens, width, seed=seed), 0.01 * random(experts, width, seed=seed + 1)
    router[:, :experts] += torch.eye(experts, device=DEVICE)
    x[:, :experts] = 0.1 * x[:, :experts] - 3
    chosen = choices(tokens, experts, top_k, used)
    x.scatter_(1, chosen, 1 + torch.arange(top_k, device=DEVICE).expand(tokens, top_k) / 2)
    return [
        x.to(dtype), router.to(dtype), (random(experts, width, hidden, seed=seed + 2) * width**-0.5).to(dtype),
        (random(experts, width, hidden, seed=seed + 3) * width**-0.5).to(dtype),
        (random(experts, hidden, width, seed=seed + 4) * hidden**-0.5).to(dtype),
    ]


def trained(function, tensors: list[torch.Tensor], top_k: int) -> tuple[torch.Tensor, ...]:
    """Return y, balance_loss, and the gradients for one random cotangent of each."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = function(dict(zip(NAMES, leaves, strict=True)), top_k=top_k)
    y, loss = outputs["y"], outputs["balance_loss"]
    dy = random(*y.shape, dtype=torch.float32, seed=9).to(leaves[0].dtype)
    torch.autograd.backward([y, loss], [dy, torch.full_like(loss, 20.0)])  # large next to y's
    return y.detach(), loss.detach(), *(leaf.grad for leaf in leaves)


def in_float64(given, *, top_k: int) -> dict[str, torch.Tensor]:
    """Return the formula in float64; the plain block routes in float32."""
    x, router, w_gate, w_up, w_down = (given[name] for name in NAMES)
    logits = x @ router.T
    values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    chosen = order[:, :top_k]
    weights = torch.zeros_like(logits).scatter(1, chosen, torch.softmax(values[:, :top_k], -1))
    gate = x @ w_gate
    y = torch.einsum("te,etw->tw", weights, (torch.nn.functional.silu(gate) * (x @ w_up)) @ w_down)
    fraction = chosen.flatten().bincount(minlength=len(router)) / chosen.numel()
    return {"y": y, "balance_loss": len(router) * (fraction * torch.softmax(logits, -1).mean(0)).sum()}


def agrees(function, tensors: list[torch.Tensor], top_k: int, draws: Sequence[list[torch.Tensor]] = ()) -> bool:
    """Compare y and the gradients with float64.

    balance_loss is one number, whose rounding error in plain code is luck; `properties.routing` has its bound. draws:
    more inputs whose errors in plain code count. A maximum over few elements, and the order in which a CPU sums, are
    luck: in 17 draws the router's gradient errs by 1e-7 to 8e-7 in plain code and by 1e-7 to 7e-7 in ours.
    """
    got = trained(function, tensors, top_k)
    low, exact = plainly(tensors, top_k)
    others = [plainly(draw, top_k) for draw in draws]
    return all(
        is_accurate(got[i], low[i], exact[i], others=[(lows[i], exacts[i]) for lows, exacts in others])
        for i in range(len(got)) if i != 1
    )


def plainly(tensors: list[torch.Tensor], top_k: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return the results of plain code in the same dtype and in float64."""
    return trained(plain.apply, tensors, top_k), trained(in_float64, [x.double() for x in tensors], top_k)


# tokens, width, hidden, experts, top_k, used: experts without a token, one expert for all tokens, all experts chosen.
SIZES = [(37, 37, 29, 5, 2, 4), (40, 32, 24, 8, 3, 8), (35, 24, 16, 3, 1, 1), (19, 37, 29, 4, 4, 4)]


@pytest.mark.parametrize("dtype", DTYPES_OF_COMPOSITIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_agrees_with_float64(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    draws = [inputs(*sizes, dtype, seed=seed) for seed in range(10, 90, 10)]
    assert agrees(moe.apply, inputs(*sizes, dtype), top_k=sizes[4], draws=draws)


def test_one_token_gives_the_same_result_alone() -> None:
    """Few tokens have a router of their own, whose sums round in another order."""
    x, *weights = inputs(*SIZES[0])
    (alone, _), (few, _), (many, _) = (moe.moe(tokens, *weights, 2) for tokens in (x[:1], x[:20], x))
    assert torch.equal(alone, few[:1])
    torch.testing.assert_close(alone, many[:1])


@pytest.mark.full
@pytest.mark.parametrize("unaligned", ["w_gate", "w_up"])
def test_a_weight_that_tma_cannot_read(unaligned: str) -> None:
    """It begins 2 bytes behind a multiple of 16; the other weights do not, and have the same strides."""
    tensors = dict(zip(NAMES, inputs(*SIZES[1], torch.bfloat16), strict=True))
    aligned = trained(moe.apply, list(tensors.values()), top_k=3)
    weight = tensors[unaligned]
    tensors[unaligned] = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)
    for got, expected in zip(trained(moe.apply, list(tensors.values()), top_k=3), aligned, strict=True):
        torch.testing.assert_close(got, expected)


def test_equal_logits_choose_the_lowest_experts() -> None:
    tensors = inputs(*SIZES[0])
    tensors[0][3] = 0
    tensors[1][2:4] = tensors[1][1]
    found, _ = moe_routing.route_tokens(tensors[0], tensors[1], 2, save=False)
    assert found.chosen[3].tolist() == [0, 1]
    assert plain.route(tensors[0], tensors[1], 2)[0].tolist() == found.chosen.tolist()
    assert agrees(moe.apply, tensors, top_k=2)


def test_a_nan_token_spoils_no_other() -> None:
    tensors = inputs(*SIZES[0])
    before, _ = moe.moe(*tensors, 2)
    tensors[0][7] = torch.nan
    after, loss = moe.moe(*tensors, 2)
    others = torch.arange(len(before), device=DEVICE) != 7
    assert torch.equal(before[others], after[others]) and after[7].isnan().all() and loss.isnan()


def test_a_nan_weight_spoils_no_other_expert() -> None:
    tensors = inputs(40, 32, 24, 8, 2, 7, torch.float16)
    before = trained(moe.apply, tensors, 2)
    tensors[2][1], tensors[4][1] = torch.nan, torch.inf
    after = trained(moe.apply, tensors, 2)
    found, _ = moe_routing.route_tokens(tensors[0], tensors[1], 2, save=False)
    without = ~(found.chosen == 1).any(dim=1)
    assert without.any() and torch.equal(before[0][without], after[0][without])
    others = torch.arange(8, device=DEVICE) != 1
    assert all(torch.equal(x[others], y[others]) for x, y in zip(before[4:], after[4:], strict=True))


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    _, _, _, _, *weights = trained(moe.apply, inputs(*SIZES[0]), 2)
    assert all((gradient[4] == 0).all() and (gradient[0] != 0).any() for gradient in weights)


def found_route(sizes: tuple[int, ...]) -> Route:
    tokens, width, hidden, experts, top_k, used = sizes
    return moe_routing.route_tokens(*inputs(*sizes)[:2], top_k, save=True)[0]


def routed(
    x: torch.Tensor, router: torch.Tensor, top_k: int, module: ModuleType = moe_routing
) -> tuple[torch.Tensor, ...]:
    """Return the values that `properties.routing` checks."""
    found, loss = module.route_tokens(x, router, top_k, save=True)
    return found.chosen, found.weights, found.slots, found.rows, found.offsets, found.logits, loss


def routing_problems(module: ModuleType = moe_routing) -> Iterator[str | None]:
    def launch(x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return routed(x, router, 2, module)

    x, router = random(70, 37), random(5, 37, seed=1)
    x[60] = 0
    for tokens in (70, 32, 1):  # several tiles of tokens, tiles of one token, and one tile
        yield properties.routing(launch, x[-tokens:], router, 2)
    yield properties.routing(launch, *inputs(*SIZES[0])[:2], 2)


def routing_gradient_problems(module: ModuleType = moe_routing) -> Iterator[str | None]:
    found, dloss = found_route(SIZES[0]), torch.tensor(20.0, device=DEVICE)
    yield properties.dlogits(
        lambda dweights, dloss: (module.launch_dlogits(found, dweights, dloss),), found, random(37, 2), dloss
    )
    for dtype in (torch.float32, torch.float16):
        x, dlogits = random(530, 37, dtype=dtype), random(530, 5, seed=1)  # more than one program's tokens
        yield properties.drouter(lambda x, dlogits: (module.launch_drouter(x, dlogits),), x, dlogits)


def row_problems(module: ModuleType = moe) -> Iterator[str | None]:
    """Check the kernels that work on a token's or a choice's rows."""
    found = found_route(SIZES[0])
    yield properties.combine(lambda out: (module.launch_combine(out, found),), random(74, 37), found)
    dout, gate, up = random(74, 29), 3 * random(74, 29, seed=1), random(74, 29, seed=2)
    yield properties.activation_gradients(
        lambda *x: module.launch_activation_gradients(*x, found), dout, gate, up, found
    )
    for dtype, experts in ((torch.float32, 40), (torch.float16, 5)):  # more than a step's columns, and fewer
        operands = random(74, 37, dtype=dtype), random(37, experts, seed=1), random(experts, 37, dtype=dtype, seed=2)
        yield properties.dx(lambda *x: (module.launch_dx(*x, found),), *operands, found)


def grouped_problems(module: ModuleType = grouped_product, config: MatmulConfig = TILES) -> Iterator[str | None]:
    """Check groups of several tiles, of part of one, and of none; sizes are multiples of 16 bytes in float16."""
    dtype = torch.float16 if config.descriptors else torch.float32
    k, n = (40, 40) if config.descriptors else (19, 37)
    found = found_route(SIZES[0])
    rows, offsets, slots = found.rows, found.offsets, len(found.rows)
    x = random(37, k, dtype=dtype)
    a, b, b2 = (random(slots, k if i == 2 else n, dtype=dtype, seed=i) for i in (2, 3, 4))
    w, w2 = (random(5, k, n, dtype=dtype, seed=i) for i in (5, 6))

    def product(rows: torch.Tensor | None, a: torch.Tensor, w: torch.Tensor, *second: torch.Tensor) -> tuple:
        return (module.launch_grouped_product(a, rows, w, offsets, slots, config, second or None),)

    yield properties.grouped_product(lambda *given: product(rows, *given), x, rows, w, offsets)
    yield properties.grouped_product(lambda *given: product(None, *given), a, None, w, offsets)
    yield properties.grouped_product(lambda *given: product(None, *given), b, None, w.mT, offsets, b2, w2.mT)
    yield properties.gate_up(
        lambda x, *ws: module.launch_gate_up(x, rows, *ws, offsets, config, True), x, rows, w, w2, offsets
    )


def group_gradient_problems(
    module: ModuleType = grouped_gradient, config: MatmulConfig = TILES
) -> Iterator[str | None]:
    """Check the gradients of the same groups."""
    dtype = torch.float16 if config.descriptors else torch.float32
    k, n = (40, 40) if config.descriptors else (19, 37)
    found = found_route(SIZES[0])
    rows, offsets, slots = found.rows, found.offsets, len(found.rows)
    x, dy = random(37, k, dtype=dtype), random(37, n, dtype=dtype, seed=1)
    a, b, b2 = (random(slots, k if i == 2 else n, dtype=dtype, seed=i) for i in (2, 3, 4))

    def gradients(
        a: torch.Tensor, *bs: torch.Tensor, rows: torch.Tensor | None = rows, a_gathered: bool = True
    ) -> tuple[torch.Tensor, ...]:
        given = dict(zip(("b", "b2"), bs, strict=False))
        found = module.launch_group_gradients(
            a=a, rows=rows, offsets=offsets, config=config, a_gathered=a_gathered, **given
        )
        return found[: len(bs)]

    at = rows.long()
    yield properties.group_gradients(lambda: gradients(x, b, b2), x[at], offsets, b, b2)
    yield properties.group_gradients(lambda: gradients(a, dy, a_gathered=False), a, offsets, dy[at])
    yield properties.group_gradients(lambda: gradients(a, b, b2, rows=None), a, offsets, b, b2)


@pytest.mark.parametrize("problems", [routing_problems, routing_gradient_problems, row_problems])
def test_every_part_is_within_its_bound(problems) -> None:
    assert [text for text in problems() if text] == []


@pytest.mark.parametrize("config", [TILES, DESCRIPTORS], ids=["pointers", "descriptors"])
def test_grouped_products_are_within_their_bounds(config: MatmulConfig) -> None:
    assert [text for text in grouped_problems(config=config) if text] == []
    assert [text for text in group_gradient_problems(config=config) if text] == []


@pytest.mark.parametrize("gathered", ["a", "b", "neither"])
@pytest.mark.parametrize("config", [TILES, DESCRIPTORS], ids=["pointers", "descriptors"])
def test_gradients_read_no_row_of_another_expert(config: MatmulConfig, gathered: str) -> None:
    """Groups end within a step of the inner axis; their neighbours' rows and the first gathered row are NaN."""
    found = found_route(SIZES[0])
    begin, end = found.offsets[1:3].tolist()
    assert begin % config.block_k and end % config.block_k
    operands = [random(len(found.rows), width, dtype=torch.float16, seed=width) for width in (40, 24, 24)]
    rows = (torch.arange(len(found.rows), dtype=torch.int32, device=DEVICE) - begin) % len(found.rows)

    def gradients() -> tuple[torch.Tensor, ...]:
        moved = range(len(operands))[{"a": slice(1), "b": slice(1, None), "neither": slice(0)}[gathered]]
        a, b, b2 = (x.roll(-begin, 0) if i in moved else x for i, x in enumerate(operands))
        return grouped_gradient.launch_group_gradients(
            a, b, rows if moved else None, found.offsets, config, a_gathered=gathered == "a", b2=b2
        )

    before = gradients()
    for operand in operands:
        operand[begin:end] = torch.nan
    after = gradients()
    others = torch.arange(len(before[0]), device=DEVICE) != 1
    for sound, now in zip(before, after, strict=True):
        assert torch.equal(now[others], sound[others]) and not now[1].isfinite().any()


def test_rejects_more_experts_than_a_tile_holds() -> None:
    with pytest.raises(ValueError, match="600 experts of torch.float32 are too many for more than 32 tokens"):
        moe.moe(*inputs(33, 600, 1, 600, 1, 1), 1)
