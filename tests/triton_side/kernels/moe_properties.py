"""Properties of each part of a mixture of experts for any finite input, like kernel_properties for other blocks."""

from __future__ import annotations

import torch
from kernel_properties import Launch, Tensors, _product_bound, _silu, first, launched, named
from property_checks import FP32, TINY, problem

from xlafuse.triton_side.kernels.moe_routing import Route


def same(name: str, got: torch.Tensor, expected: torch.Tensor) -> str | None:
    return None if torch.equal(got.long(), expected) else f"{name}: {got.tolist()}, expected {expected.tolist()}"


def softmax_bound(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return the bound by exponents rounded before and in the exponential, and by their sum."""
    spread = (x.amax(dim=-1, keepdim=True) - x.amin(dim=-1, keepdim=True)).clamp(max=100)
    return FP32 * (16 + x.shape[-1] + 4 * spread) * p + TINY


def routing(launch: Launch, x: torch.Tensor, router: torch.Tensor, top_k: int) -> str | None:
    """launch: x, router -> chosen, weights, slots, rows, offsets, logits, balance_loss.

    The stored logits decide every choice and every position in the order, including ties.
    """
    (chosen, weights, slots, rows, offsets, logits, balance_loss), stray = launched(launch, x, router)
    tokens, experts = logits.shape
    values, order = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    exact = torch.softmax(values[:, :top_k], dim=-1)
    by_expert = order[:, :top_k].flatten().sort(stable=True)[1]
    counts = order[:, :top_k].flatten().bincount(minlength=experts)
    probabilities = torch.softmax(logits.double(), dim=-1)
    fraction = counts / (tokens * top_k)
    loss = experts * (fraction * probabilities.mean(dim=0)).sum()
    bound = softmax_bound(logits.double(), probabilities).mean(dim=0) + FP32 * (4 + tokens) * probabilities.mean(dim=0)
    bound_loss = experts * (fraction * bound).sum() + FP32 * (4 + experts) * loss
    return first(
        stray,
        named("logits", problem(logits, x.double() @ router.double().T, _product_bound(x, router.T))),
        same("chosen", chosen, order[:, :top_k]),
        named("weights", problem(weights, exact, softmax_bound(values[:, :top_k], exact))),
        same("rows", rows, by_expert // top_k),
        same("slots", slots.flatten()[by_expert], torch.arange(tokens * top_k, device=x.device)),
        same("offsets", offsets, torch.cat([counts.new_zeros(1), counts.cumsum(0)])),
        named("balance_loss", problem(balance_loss, loss, bound_loss)),
    )


def groups(offsets: torch.Tensor) -> list[slice]:
    return [slice(begin, end) for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def grouped(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> Tensors:
    """Return each group's rows of a times its b in float64, and the bound."""
    pairs = [(a[group], matrix) for group, matrix in zip(groups(offsets), b, strict=True)]
    return torch.cat([x.double() @ y.double() for x, y in pairs]), torch.cat([_product_bound(*pair) for pair in pairs])


def grouped_product(
    launch: Launch, a: torch.Tensor, rows: torch.Tensor | None, b: torch.Tensor, offsets: torch.Tensor,
    *second: torch.Tensor,
) -> str | None:
    (c,), stray = launched(launch, a, b, *second)
    exact, bound = grouped(a if rows is None else a[rows.long()], b, offsets)
    if second:
        more, its_bound = grouped(*second, offsets)
        exact, bound = exact + more, 2 * (bound + its_bound)  # one sum with twice as many terms
    return first(stray, named("c", problem(c, exact, bound)))


def gate_up(
    launch: Launch, x: torch.Tensor, rows: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, offsets: torch.Tensor
) -> str | None:
    """Check silu(x[rows] w_gate) * (x[rows] w_up), and both products."""
    (act, gate, up), stray = launched(launch, x, w_gate, w_up)
    (gate64, bound_gate), (up64, bound_up) = (grouped(x[rows.long()], w, offsets) for w in (w_gate, w_up))
    exact = _silu(gate64)
    bound = (1.1 * bound_gate + exact.value_bound) * (up64.abs() + bound_up) + exact.value.abs() * bound_up
    return first(
        stray,
        named("gate", problem(gate, gate64, bound_gate)),
        named("up", problem(up, up64, bound_up)),
        named("act", problem(act, exact.value * up64, bound + 4 * FP32 * (exact.value * up64).abs())),
    )


def group_gradients(launch: Launch, a: torch.Tensor, offsets: torch.Tensor, *bs: torch.Tensor) -> str | None:
    """a and bs are in the order of the slots, in whatever order the launch takes them."""
    found, stray = launched(launch)
    problems = [stray]
    for i, (c, b) in enumerate(zip(found, bs, strict=True)):
        for expert, group in enumerate(groups(offsets)):
            x, y = a[group].T, b[group]
            text = problem(c[expert], x.double() @ y.double(), _product_bound(x, y))
            problems.append(named(f"c{i + 1} of expert {expert}", text))
    return first(*problems)


def combine(launch: Launch, out: torch.Tensor, found: Route) -> str | None:
    (y,), stray = launched(launch, out)
    terms = found.weights.double()[:, :, None] * out.double()[found.slots.long()]
    return first(stray, named("y", problem(y, terms.sum(1), FP32 * (2 + terms.shape[1]) * terms.abs().sum(1))))


def activation_gradients(
    launch: Launch, dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, found: Route
) -> str | None:
    (dgate, dup, weighted_act, dweights), stray = launched(launch, dout, gate, up)
    weights = torch.empty(len(dout), 1, dtype=torch.float64, device=dout.device)
    weights[found.slots.long().flatten(), 0] = found.weights.double().flatten()
    exact, up64, dout64 = _silu(gate.double()), up.double(), dout.double()
    dact, act = weights * dout64, exact.value * up64
    bound_act = exact.value_bound * up64.abs() + 2 * FP32 * act.abs()
    at = found.slots.long()
    products, off = (dout64 * act)[at], (dout64.abs() * bound_act)[at]
    bound = (dact * up64).abs() * (exact.slope_bound + 4 * FP32 * exact.slope.abs())
    return first(
        stray,
        named("dgate", problem(dgate, dact * up64 * exact.slope, bound)),
        named("dup", problem(dup, dact * exact.value, dact.abs() * (exact.value_bound + 4 * FP32 * exact.value.abs()))),
        named("act", problem(weighted_act, weights * act, weights * (bound_act + 2 * FP32 * act.abs()))),
        named(
            "dweights",
            problem(dweights, products.sum(-1), (off + FP32 * (2 + dout.shape[1]) * products.abs()).sum(-1)),
        ),
    )


def dlogits(launch: Launch, found: Route, dweights: torch.Tensor, dloss: torch.Tensor) -> str | None:
    """launch: dweights, dloss -> dlogits."""
    assert found.logits is not None
    (got,), stray = launched(launch, dweights, dloss)
    (tokens, experts), top_k = found.logits.shape, found.chosen.shape[1]
    weights, dw, chosen = found.weights.double(), dweights.double(), found.chosen.long()
    p = torch.softmax(found.logits.double(), dim=-1)
    fraction = found.offsets.diff().double() / (tokens * top_k)
    g = dloss.double() * experts * fraction / tokens

    def centred(values: torch.Tensor, weights: torch.Tensor) -> Tensors:
        """Return weights (values - their weighted mean), and the size of the subtracted mean."""
        mean, size = (weights * values).sum(-1, keepdim=True), (weights * values.abs()).sum(-1, keepdim=True)
        return weights * (values - mean), weights * (values.abs() + size)

    (by_choice, choice_size), (balance, balance_size) = centred(dw, weights), centred(g.expand_as(p), p)
    # p is off by this share, and the mean by as much again.
    share = 2 * (softmax_bound(found.logits.double(), p) / p.clamp(min=TINY)).amax(dim=-1, keepdim=True)
    bound = (share + FP32 * (8 + experts)) * balance_size
    bound = bound.scatter_add(1, chosen, FP32 * (8 + top_k) * choice_size) + TINY
    return first(stray, named("dlogits", problem(got, balance.scatter_add(1, chosen, by_choice), bound)))


def rounded_product_bound(dlogits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the bound of a product with dlogits, which TF32 rounds if the other factor has 16 bits."""
    rounding = 2.0**-11 if other.dtype != torch.float32 else 0.0
    return _product_bound(dlogits, other) + rounding * (dlogits.double().abs() @ other.double().abs())


def drouter(launch: Launch, x: torch.Tensor, dlogits: torch.Tensor) -> str | None:
    (got,), stray = launched(launch, x, dlogits)
    exact, bound = dlogits.double().T @ x.double(), rounded_product_bound(dlogits.T, x)
    return first(stray, named("drouter", problem(got, exact, bound)))


def dx(
    launch: Launch, dx_of_experts: torch.Tensor, dlogits: torch.Tensor, router: torch.Tensor, found: Route
) -> str | None:
    (got,), stray = launched(launch, dx_of_experts, dlogits, router)
    terms = dx_of_experts.double()[found.slots.long()]
    product = dlogits.double() @ router.double()
    bound = rounded_product_bound(dlogits, router) + FP32 * (2 + terms.shape[1]) * (terms.abs().sum(1) + product.abs())
    return first(stray, named("dx", problem(got, terms.sum(1) + product, bound)))
