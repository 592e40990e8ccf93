"""Properties of each operation for any input: one function an operation, which returns the error found, or None.

Bounds are first-order error analyses of the formulas (Higham, Accuracy and Stability of Numerical Algorithms, chapter
3) with fp32 arithmetic, sums in any order and exponentials that underflow early, so no correct kernel can fail. A
result is also wrong if the kernel wrote outside its outputs or changed an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from property_checks import FP32, TINY, guarded_memory, problem

from xlafuse.triton_side.blocks.adamw import adamw as plain_adamw

Tensors = tuple[torch.Tensor, ...]
Launch = Callable[..., Tensors]


def first(*problems: str | None) -> str | None:
    return next((text for text in problems if text), None)


def named(name: str, text: str | None) -> str | None:
    return f"{name}: {text}" if text else None


def launched(launch: Launch, *inputs: torch.Tensor) -> tuple[Tensors, str | None]:
    """Return the outputs, and whether the kernel wrote memory outside them."""
    before = [x.detach().clone() for x in inputs]
    with guarded_memory() as memory:
        outputs = launch(*inputs)
    changed = [i for i, (x, was) in enumerate(zip(inputs, before, strict=True)) if not _identical(x.detach(), was)]
    shape = memory.overrun()
    return outputs, first(
        f"input {changed[0]} was changed" if changed else None,
        f"written beside a tensor of shape {shape}" if shape is not None else None,
    )


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_floating_point() and a.element_size() == 1:
        a, b = a.float(), b.float()  # PyTorch compares no fp8
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def trained(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, dy: torch.Tensor) -> Tensors:
    """Return the output, then the gradient of each input."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def training(function: Callable[..., torch.Tensor]) -> Launch:
    """Return `function` as a launch of its forward and backward pass; the last input is the output's gradient."""
    return lambda *inputs: trained(function, *inputs[:-1], dy=inputs[-1])


def vector_add(launch: Launch, x: torch.Tensor, y: torch.Tensor) -> str | None:
    (out,), stray = launched(launch, x, y)
    return first(stray, None if _identical(out, x + y) else "not the bits of x + y")


def adamw(
    launch: Launch, param: torch.Tensor, gradient: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, step: int,
    *, rate: float, beta1: float, beta2: float, eps: float, decay: float,
) -> str | None:
    """Check the parameter and its moments after one step; nu is not negative."""
    outputs, stray = launched(launch, param, gradient, mu, nu)
    settings = {"rate": rate, "beta1": beta1, "beta2": beta2, "eps": eps, "decay": decay}
    native = plain_adamw(param, gradient, mu, nu, torch.tensor(step, device=param.device), **settings)
    p, g, m, v = (x.double() for x in (param, gradient, mu, nu))
    exact_mu, exact_nu = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    bound_mu = 2 * FP32 * (beta1 * m.abs() + (1 - beta1) * g.abs())
    bound_nu = 3 * FP32 * exact_nu + TINY
    kept1, kept2 = beta1**step, beta2**step
    # Relative error of 1 - beta^t: the exponent t log2(beta) is off by two roundings of its size, the power by two
    # units.
    off1, off2 = (
        FP32 * (1 + beta**step * (2 - 2 * step * math.log(beta)) / (1 - beta**step)) for beta in (beta1, beta2)
    )
    root, scale = exact_nu.sqrt(), (1 - kept2) ** -0.5
    bound_root = (bound_nu / torch.maximum(root, bound_nu.sqrt())).nan_to_num(0.0)
    below = root * scale + eps
    bound_below = scale * bound_root + (off2 + 4 * FP32) * below
    change = rate * exact_mu / (1 - kept1) / below
    exact = p - change - rate * decay * p
    bound_change = rate * bound_mu / (1 - kept1) / below + change.abs() * (bound_below / below + off1 + 4 * FP32)
    bound = bound_change + 4 * FP32 * (p.abs() + change.abs())
    exacts, bounds = (exact, exact_mu, exact_nu), (bound, bound_mu, bound_nu)
    found = zip(("param", "mu", "nu"), outputs, exacts, bounds, native, strict=True)
    return first(stray, *(named(name, problem(y, e, b.nan_to_num(0.0), n)) for name, y, e, b, n in found))


@dataclass(frozen=True)
class Activation:
    """An activation and its derivative at float64 numbers, and the effect of a few fp32 roundings on each."""

    value: torch.Tensor
    slope: torch.Tensor
    value_bound: torch.Tensor
    slope_bound: torch.Tensor


def _gelu(x: torch.Tensor) -> Activation:
    u2 = 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    slope = 2 * (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * x * x)
    s, rest = torch.sigmoid(u2), torch.sigmoid(-u2)
    # The effect on s of an error of u2 by a few roundings; zero where s is 0 or 1.
    moved = (s * rest * (4 * u2.abs() + 8)).nan_to_num(0.0)
    curved = (x * s * rest * slope).nan_to_num(0.0)  # of +-inf the limit
    return Activation(
        value=x * s,
        slope=s + curved,
        value_bound=FP32 * (8 * (x * s).abs() + x.abs() * moved) + TINY * x.abs(),
        slope_bound=FP32 * (8 * s + moved + curved.abs() * (16 + 4 * u2.abs()))
        + TINY * (1 + x.abs().clamp(max=100) ** 3),
    )


def _silu(x: torch.Tensor) -> Activation:
    s, rest = torch.sigmoid(x), torch.sigmoid(-x)
    value = x * s
    moved = (4 * x.abs() * s * rest).nan_to_num(0.0)  # effect on s of a few roundings of x
    # 1 - s is off by a rounding of 1, and 0 from 17 on.
    slope_bound = 8 * s + (8 + moved + 4 * x.abs().clamp(max=20)) * (s * x.abs()).clamp(max=20) + moved
    return Activation(
        value=value,
        slope=s + value * rest,
        value_bound=FP32 * (8 * value.abs() + x.abs() * moved) + TINY * x.abs(),
        slope_bound=FP32 * slope_bound + TINY * (1 + x.abs()),
    )


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def gelu(launch: Launch, x: torch.Tensor, dy: torch.Tensor) -> str | None:
    """Check GELU. The gradient at +-inf may be its limit or NaN, as in PyTorch."""
    (y, dx), stray = launched(launch, x, dy)
    native_y, native_dx = trained(_tanh_gelu, x, dy=dy)
    exact, dy = _gelu(x.double()), dy.double()
    bound_dx = dy.abs() * exact.slope_bound
    return first(
        stray,
        named("y", problem(y, exact.value, exact.value_bound.nan_to_num(0.0), native_y)),
        named("dx", problem(dx, dy * exact.slope, bound_dx.nan_to_num(0.0), native_dx)),
    )


def gated_unit(
    activation: str, launch: Launch, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor
) -> str | None:
    """Check y = activation(gate) * up and both gradients; activation is "gelu" or "silu".

    PyTorch runs in fp32, because it rounds activation(gate) to the dtype.
    """
    (y, dgate, dup), stray = launched(launch, gate, up, dy)
    exactly, plain = {"gelu": (_gelu, _tanh_gelu), "silu": (_silu, F.silu)}[activation]
    wide = (gate.float(), up.float())
    native_y, native_dgate, native_dup = trained(lambda gate, up: plain(gate) * up, *wide, dy=dy.float())
    exact, up, dy = exactly(gate.double()), up.double(), dy.double()
    return first(
        stray,
        named("y", problem(y, exact.value * up, (exact.value_bound * up.abs()).nan_to_num(0.0), native_y)),
        named(
            "dgate",
            problem(
                dgate, dy * up * exact.slope, ((dy * up).abs() * exact.slope_bound).nan_to_num(0.0), native_dgate
            ),
        ),
        named("dup", problem(dup, dy * exact.value, (dy.abs() * exact.value_bound).nan_to_num(0.0), native_dup)),
    )


def bias_gelu(launch: Launch, x: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor) -> str | None:
    """Check GELU of the sum as fp32 rounds it, which is one operation.

    The bias's gradient is checked in columns where fp32 holds the sum of its terms' magnitudes and PyTorch's derivative
    of GELU is finite.
    """
    (y, dx, dbias), stray = launched(launch, x, bias, dy)
    z, wide_dy = x.float() + bias.float(), dy.float()
    native_y, native_dx = trained(_tanh_gelu, z, dy=wide_dy)
    exact, dy = _gelu(z.double()), dy.double()
    dx64, bound_dx = dy * exact.slope, (dy.abs() * exact.slope_bound).nan_to_num(0.0)
    magnitude = dx64.abs().sum(dim=0)
    judged = native_dx.isfinite().all(dim=0) & (magnitude < 0.99 * torch.finfo(torch.float32).max)
    bound_dbias = bound_dx.sum(dim=0) + FP32 * len(x) * magnitude
    return first(
        stray,
        named("y", problem(y, exact.value, exact.value_bound.nan_to_num(0.0), native_y)),
        named("dx", problem(dx, dx64, bound_dx, native_dx)),
        named("dbias", problem(dbias[judged], dx64.sum(dim=0)[judged], bound_dbias[judged])),
    )


def sum_columns(launch: Launch, partial: torch.Tensor) -> str | None:
    """Check sums of partial [partials, columns], or [partials, vectors, columns] with one output a vector."""
    sums, stray = launched(launch, partial)
    wide = partial.double().view(len(partial), -1, partial.shape[-1])
    bounds = FP32 * len(partial) * wide.abs().sum(dim=0)
    found = zip(sums, wide.sum(dim=0), bounds, strict=True)
    return first(stray, *(named(f"sum {i}", problem(*each)) for i, each in enumerate(found)))


def softmax(launch: Launch, x: torch.Tensor, dy: torch.Tensor) -> str | None:
    """Check softmax; the reference gradient is that of the stored y, which the kernel reads."""
    (y, dx), stray = launched(launch, x, dy)

    def softmax_of(x: torch.Tensor) -> torch.Tensor:
        """Return torch.softmax, with zeros instead of NaN in a row of nothing but -inf."""
        return torch.where((x == -torch.inf).all(dim=1, keepdim=True), 0.0, torch.softmax(x, dim=1))

    reference = softmax_of(x.double())
    below = x.double().amax(dim=1, keepdim=True) - x.double()
    bound_y = (FP32 * (16 + below + x.shape[1] / 512) * reference).nan_to_num(0.0)
    y64, dy64 = y.double(), dy.double()
    terms = y64 * (dy64.abs() + (y64 * dy64).abs().sum(dim=1, keepdim=True))
    dx64 = y64 * (dy64 - (y64 * dy64).sum(dim=1, keepdim=True))
    return first(
        stray,
        named("y", problem(y, reference, bound_y, softmax_of(x))),
        named("dx", problem(dx, dx64, FP32 * (8 + x.shape[1]) * terms + TINY * dy64.abs())),
    )


def sorted_by_id(launch: Launch, ids: torch.Tensor) -> str | None:
    """Check the sorted ids and their tokens; equal ids keep the tokens' order."""
    (found, order), stray = launched(launch, ids)
    expected, positions = torch.sort(ids, stable=True)
    return first(
        stray,
        None if torch.equal(found, expected) else "the ids are not in order",
        None if torch.equal(order.long(), positions) else "the tokens are not in the ids' order",
    )


def embedding(launch: Launch, table: torch.Tensor, ids: torch.Tensor, dy: torch.Tensor) -> str | None:
    """Check that y has the bits of the table, and that rows without a token have a gradient of zero."""
    (y, dtable), stray = launched(launch, table, ids, dy)

    def scattered(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(table.shape, dtype=torch.float64, device=ids.device).index_add_(0, ids.long(), values)

    added = scattered(torch.ones_like(dy, dtype=torch.float64))
    bound = FP32 * added * scattered(dy.double().abs())
    return first(
        stray,
        None if _identical(y, table[ids]) else "y: not the bits of the table's rows",
        named("dtable", problem(dtable, scattered(dy.double()), bound)),
        None if (dtable[added == 0] == 0).all() else "dtable: a row without a token is not zero",
    )


@dataclass(frozen=True)
class Entropy:
    """The loss of float64 logits, its gradient in them, and the effect of fp32 on each."""

    loss: torch.Tensor
    gradient: torch.Tensor
    loss_bound: torch.Tensor
    gradient_bound: torch.Tensor


def _entropy(
    x: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor, smoothing: float, z_loss: float,
    error: torch.Tensor | None = None,
) -> Entropy:
    """error: the largest error of each token's logits, [tokens]; without it the kernel has x itself."""
    classes = x.shape[1]
    counted, label = labels != -100, labels.long().clamp(min=0)
    count = counted.sum().clamp(min=1)
    maximum = x.amax(dim=1)
    below = maximum[:, None] - x
    terms = torch.exp(-below)
    log_sum = terms.sum(dim=1).log()
    lse, p = maximum + log_sum, terms / terms.sum(dim=1, keepdim=True)
    chosen, mean = below.gather(1, label[:, None])[:, 0], x.mean(dim=1)
    losses = (1 - smoothing) * (chosen + log_sum) + smoothing * (maximum - mean + log_sum) + z_loss * lse * lse
    # Errors of log_sum by exponentials, additions in any order and the logarithm; then of each term of the loss.
    moved = FP32 * (8 + classes + 2 * (p * below).nan_to_num(0.0).sum(dim=1) + 2 * log_sum)
    slope = 1 + 2 * z_loss * lse.abs()
    bounds = slope * moved + 6 * FP32 * z_loss * lse.square() + 4 * FP32 * (chosen + (maximum - mean).abs() + log_sum)
    bounds = bounds + smoothing * FP32 * (4 + classes) * x.abs().mean(dim=1)
    error = torch.zeros_like(maximum) if error is None else error
    # The loss's derivatives in the logits add up to at most slope and 1; slope itself changes with the logits.
    bounds = bounds + (slope + 1 + 2 * z_loss * error) * error
    bound = torch.where(counted, bounds + FP32 * losses.abs(), 0.0).sum() / count
    scale = dloss.double() / count
    ours = torch.nn.functional.one_hot(label, classes) * (1 - smoothing)
    gradient = (p * (1 + 2 * z_loss * lse[:, None]) - smoothing / classes - ours) * scale
    relative = moved[:, None] + FP32 * (16 + 4 * below + 4 * log_sum[:, None])
    spread = (p * relative).nan_to_num(0.0) * slope[:, None] + 8 * FP32 * (smoothing / classes + ours)
    # A probability's own logit moves it one way and the others' the other way.
    spread = spread + p * (torch.expm1(2 * error) * (slope + 2 * z_loss * error) + 2 * z_loss * error)[:, None]
    spread = (spread + TINY * slope[:, None]) * scale.abs()
    return Entropy(
        loss=torch.where(counted, losses, 0.0).sum() / count,
        gradient=torch.where(counted[:, None], gradient, 0.0),
        loss_bound=bound.nan_to_num(0.0),
        gradient_bound=torch.where(counted[:, None], spread.nan_to_num(0.0), 0.0),
    )


def cross_entropy(
    launch: Launch, logits: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor, smoothing: float, z_loss: float
) -> str | None:
    """Check loss and dlogits; every label is a class or ignored."""
    (loss, dlogits), stray = launched(launch, logits, labels, dloss)
    exact = _entropy(logits.double(), labels, dloss, smoothing, z_loss)
    return first(
        stray,
        named("loss", problem(loss, exact.loss, exact.loss_bound)),
        named("dlogits", problem(dlogits, exact.gradient, exact.gradient_bound)),
    )


def linear_cross_entropy(
    launch: Launch, h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor, smoothing: float,
    z_loss: float,
) -> str | None:
    """Check loss, dh and dw of finite inputs.

    All are computed from logits in the inputs' dtype, in which the logits' gradient is stored too. dw is rounded
    to it after each chunk of tokens, and both gradients are rounded before they are multiplied by dloss.
    """
    (loss, dh, dw), stray = launched(launch, h, w, labels, dloss)
    wide_h, wide_w, info = h.double(), w.double(), torch.finfo(h.dtype)
    logits, error = wide_h @ wide_w.T, _product_bound(h, w.T).amax(dim=1)
    rounded = error + info.eps * logits.abs().amax(dim=1)
    of_rounded = _entropy(logits, labels, dloss, smoothing, z_loss, rounded)
    dx = of_rounded.gradient
    stored = of_rounded.gradient_bound + info.eps * (dx.abs() + of_rounded.gradient_bound + info.tiny * (dx != 0))
    chunks = 1 + len(h) // 128

    def checked(got: torch.Tensor, a: torch.Tensor, off: torch.Tensor, b: torch.Tensor, times: int) -> str | None:
        bound = off @ b.abs() + _product_bound(a, b)
        return problem(got, a @ b, bound + times * info.eps * (a.abs() @ b.abs() + bound))

    return first(
        stray,
        named("loss", problem(loss, of_rounded.loss, of_rounded.loss_bound)),
        named("dh", checked(dh, dx, stored, wide_w, 1)),
        named("dw", checked(dw, dx.T, stored.T, wide_h, chunks)),
    )


def _squares_overflow(x: torch.Tensor) -> torch.Tensor:
    return x.double().square().sum(dim=1, keepdim=True) > 0.99 * torch.finfo(torch.float32).max


def rmsnorm(launch: Launch, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, eps: float) -> str | None:
    (y, dx, dweight), stray = launched(launch, x, weight, dy)
    return first(stray, _rmsnorm_problem(y, dx, dweight, x, weight, dy, torch.zeros_like(dy), eps))


def rmsnorm_of_sum(
    launch: Launch, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor,
    dsum: torch.Tensor, eps: float,
) -> str | None:
    """Check norm and gradients; the references are those of the stored sum, which the kernel reads."""
    (y, total, dx, dweight), stray = launched(launch, x, residual, weight, dy, dsum)
    expected = (x.float() + residual.float()).to(x.dtype)
    return first(
        stray,
        None if _identical(total, expected) else "sum: not x + residual, rounded once",
        _rmsnorm_problem(y, dx, dweight, total, weight, dy, dsum, eps),
    )


def _rmsnorm_problem(
    y: torch.Tensor, dx: torch.Tensor, dweight: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor,
    dsum: torch.Tensor, eps: float,
) -> str | None:
    """Check RMSNorm. A row whose sum of squares overflows fp32 must be zero, as in PyTorch.

    The gradient of such a row is not checked, nor the weight's gradient if there is one. dsum: added to dx.
    """
    wide, w, g = x.double(), weight.double(), dy.double() * weight.double()
    columns = x.shape[1]
    rstd = torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + eps)
    n = wide * rstd
    overflow = _squares_overflow(x) & x.isfinite().all(dim=1, keepdim=True)
    expected_y = torch.where(overflow, 0.0, n * w)
    dx64 = rstd * (g - n * (g * n).mean(dim=1, keepdim=True)) + dsum.double()
    terms = rstd * (g.abs() + n.abs() * (g * n).abs().mean(dim=1, keepdim=True)) + dsum.double().abs()
    dweight64, weight_terms = (dy.double() * n).sum(dim=0), (dy.double() * n).abs().sum(dim=0)
    judged = ~overflow.squeeze(1)
    return first(
        named("y", problem(y, expected_y, FP32 * (8 + columns / 4) * expected_y.abs())),
        named("dx", problem(dx[judged], dx64[judged], FP32 * (16 + columns) * terms[judged])),
        named("dweight", problem(dweight, dweight64, FP32 * (16 + columns + len(x)) * weight_terms))
        if judged.all()
        else None,
    )


def layernorm(
    launch: Launch, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor, eps: float
) -> str | None:
    """Check rows of finite numbers whose squares fp32 holds and whose variance is clear of its rounding error.

    Variance plus eps must be more than twice that error; if a row is not so, the weight's gradient is not checked.

    With A = mean |x|, a mean, also a running one, is off by at most columns eps A. A sum of squares about such means
    (of all elements, or of a lane's, merged) is off by the mean's error squared and by the error of each square. To
    first order both vanish if the mean is that of all.
    """
    (y, dx, dweight, dbias), stray = launched(launch, x, weight, bias, dy)
    wide, w, d = x.double(), weight.double(), dy.double()
    rows, columns = x.shape

    def mean(terms: torch.Tensor) -> torch.Tensor:
        return terms.mean(dim=1, keepdim=True)

    centred = wide - mean(wide)
    variance = mean(centred.square())
    rstd = torch.rsqrt(variance + eps)
    n, g = centred * rstd, d * w
    sums = FP32 * (8 + columns)  # relative to the sum of a row's magnitudes
    off = sums * mean(wide.abs())
    variance_off = FP32 * (16 + columns) * variance + 10 * off * variance.sqrt() + 4 * off.square()
    relative = variance_off / (variance + eps)  # of rstd, and more
    beyond = (relative > 0.5) | (_squares_overflow(x) & x.isfinite().all(dim=1, keepdim=True))
    judged = ~beyond.squeeze(1)
    relative = relative + 8 * FP32
    n_off = rstd * off * (1 + relative) + n.abs() * relative
    projection, projection_off = mean(g * n), mean(g.abs() * n_off) + sums * mean((g * n).abs())
    terms = g.abs() + mean(g.abs()) + n.abs() * mean((g * n).abs())
    inner_off = sums * mean(g.abs()) + n_off * (projection.abs() + projection_off) + n.abs() * projection_off
    bound_dx = rstd * (1 + relative) * inner_off + (relative + 8 * FP32) * rstd * terms
    expected_y = n * w + bias.double()
    bound_y = w.abs() * n_off + 4 * FP32 * ((n * w).abs() + bias.double().abs())
    bound_dweight = (d.abs() * n_off).sum(dim=0) + FP32 * (8 + rows) * (d * n).abs().sum(dim=0)
    return first(
        stray,
        named("y", problem(y[judged], expected_y[judged], bound_y[judged])),
        named("dx", problem(dx[judged], (rstd * (g - mean(g) - n * projection))[judged], bound_dx[judged])),
        named("dweight", problem(dweight, (d * n).sum(dim=0), bound_dweight)) if judged.all() else None,
        named("dbias", problem(dbias, d.sum(dim=0), FP32 * (8 + rows) * d.abs().sum(dim=0))),
    )


def dropout_residual_norm(launch: Launch, inputs: Tensors, kept: torch.Tensor, scale: float, eps: float) -> str | None:
    """inputs: x, bias, residual, weight, shift, dy, dh.

    The references of y and the gradients are those of the stored h, which the kernel reads. No square may overflow.
    """
    (y, h, dx, dbias, dresidual, dweight, dshift), stray = launched(launch, *inputs)
    x, bias, residual, weight, shift, dy, dh = (each.double() for each in inputs)
    rows, columns = x.shape
    expected_h = residual + torch.where(kept, (x + bias) * scale, 0.0)
    bound_h = FP32 * (residual.abs() + torch.where(kept, 4 * (x.abs() + bias.abs()) * scale, 0.0))

    def mean(values: torch.Tensor) -> torch.Tensor:
        return values.mean(dim=1, keepdim=True)

    wide = h.double()
    centred = wide - mean(wide)
    variance = mean(centred * centred)
    rstd = torch.rsqrt(variance + eps)
    # Bounds on the errors of mean and variance of the stored h's row.
    off_centred = FP32 * (columns * mean(wide.abs()) + 2 * centred.abs()) + TINY
    off_variance = mean(off_centred * (2 * centred.abs() + off_centred)) + FP32 * (4 + columns) * variance + TINY
    highest = torch.rsqrt((variance - off_variance).clamp(min=0) + eps) * (1 + 4 * FP32)
    off_rstd = torch.maximum(highest - rstd, rstd - torch.rsqrt(variance + off_variance + eps) * (1 - 4 * FP32))
    n = centred * rstd
    off_n = off_centred * highest + centred.abs() * off_rstd + FP32 * n.abs()
    expected_y = n * weight + shift
    bound_y = off_n * weight.abs() + FP32 * (2 * (n * weight).abs() + shift.abs())

    g = dy * weight
    average, projection = mean(g), mean(g * n)
    off_average = FP32 * (2 + columns) * mean(g.abs())
    off_projection = mean(g.abs() * off_n) + FP32 * (4 + columns) * mean(g.abs() * (n.abs() + off_n))
    inner = g - average - n * projection
    off_inner = off_average + off_n * projection.abs() + (n.abs() + off_n) * off_projection
    off_inner = off_inner + 4 * FP32 * (g.abs() + average.abs() + (n * projection).abs())
    total = dh + rstd * inner
    bound = highest * off_inner + off_rstd * inner.abs() + 2 * FP32 * (dh.abs() + (rstd * inner).abs())
    expected_dx, bound_dx = (torch.where(kept, values * scale, 0.0) for values in (total, bound + FP32 * total.abs()))

    def summed(values: torch.Tensor, off: torch.Tensor | float = 0.0) -> Tensors:
        return values.sum(dim=0), (off + FP32 * (4 + rows) * values.abs()).sum(dim=0)

    return first(
        stray,
        named("h", problem(h, expected_h, bound_h)),
        named("y", problem(y, expected_y, bound_y)),
        named("dresidual", problem(dresidual, total, bound)),
        named("dx", problem(dx, expected_dx, bound_dx)),
        None if (dx[~kept] == 0).all() else "dx: not zero where x was dropped",
        named("dbias", problem(dbias, *summed(expected_dx, bound_dx))),
        named("dweight", problem(dweight, *summed(dy * n, dy.abs() * off_n))),
        named("dshift", problem(dshift, *summed(dy))),
    )


def _product_bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return FP32 * (4 + a.shape[1]) * (a.double().abs() @ b.double().abs())


def matmul(launch: Launch, a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None = None) -> str | None:
    operands = (a, b) if residual is None else (a, b, residual)
    (c,), stray = launched(launch, *operands)
    reference, bound = a.double() @ b.double(), _product_bound(a, b)
    if residual is not None:
        reference, bound = reference + residual.double(), bound + FP32 * residual.double().abs()
    return first(stray, named("c", problem(c, reference, bound)))


def matmul_fp8(
    launch: Launch, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor
) -> str | None:
    """Check a @ b^T with scales. Tensor cores sum up to 128 terms with at least 14 bits and drop the rest of each."""
    (c,), stray = launched(launch, a, b, a_scale, b_scale)
    scale = a_scale.double() * b_scale.double()
    reference, terms = (a.double() @ b.double().T) * scale, (a.double().abs() @ b.double().abs().T) * scale.abs()
    of_tensor_cores = 2.0**-13 * (1 + min(a.shape[1], 128)) if a.is_cuda else 0.0
    return first(stray, named("c", problem(c, reference, (FP32 * (4 + a.shape[1]) + of_tensor_cores) * terms)))


def _product_problem(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> str | None:
    return problem(c, a.double() @ b.double(), _product_bound(a, b))


def trained_matmul(launch: Launch, a: torch.Tensor, b: torch.Tensor, dc: torch.Tensor) -> str | None:
    (c, da, db), stray = launched(launch, a, b, dc)
    return first(
        stray,
        named("c", _product_problem(c, a, b)),
        named("da", _product_problem(da, dc, b.T)),
        named("db", _product_problem(db, a.T, dc)),
    )


def linear(launch: Launch, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor) -> str | None:
    """Check y and the gradients of x, weight and bias."""
    (y, dx, dweight, dbias), stray = launched(launch, x, weight, bias, dy)
    exact_y = x.double() @ weight.double() + bias.double()
    return first(
        stray,
        named("y", problem(y, exact_y, _product_bound(x, weight) + FP32 * bias.double().abs())),
        named("dx", _product_problem(dx, dy, weight.T)),
        named("dweight", _product_problem(dweight, x.T, dy)),
        named("dbias", _sums_over_rows_problem(dbias, dy)),
    )


def sums_over_rows(launch: Launch, x: torch.Tensor) -> str | None:
    """Check the sum over the first axis of any fp32 partial sums."""
    (partial,), stray = launched(launch, x)
    return first(stray, _sums_over_rows_problem(partial.double().sum(dim=0), x))


def _sums_over_rows_problem(sums: torch.Tensor, x: torch.Tensor) -> str | None:
    return problem(sums, x.double().sum(dim=0), FP32 * (2 + len(x)) * x.double().abs().sum(dim=0))


def product_bias_gelu(launch: Launch, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> str | None:
    """Check gelu(a @ b + bias) and GELU's input."""
    (y, pre), stray = launched(launch, a, b, bias)
    pre64 = a.double() @ b.double() + bias.double()
    bound_pre = _product_bound(a, b) + FP32 * bias.double().abs()
    exact = _gelu(pre64)
    # GELU's derivative is at most 1.13. Its own bound is taken at pre64; a hundredth of bound_pre covers the
    # difference.
    return first(
        stray,
        named("pre", problem(pre, pre64, bound_pre)),
        named("y", problem(y, exact.value, 1.14 * bound_pre + exact.value_bound.nan_to_num(0.0))),
    )


def dpre(launch: Launch, dy: torch.Tensor, pre: torch.Tensor) -> str | None:
    """Check dy gelu'(pre), and its sums over rows before it is rounded."""
    (gradient, dbias), stray = launched(launch, dy, pre)
    exact = _gelu(pre.double())
    terms, bound = dy.double() * exact.slope, dy.double().abs() * exact.slope_bound
    bound_dbias = bound.sum(dim=0) + FP32 * (2 + len(pre)) * (terms.abs() + bound).sum(dim=0)
    return first(
        stray,
        named("dpre", problem(gradient, terms, bound)),
        named("dbias", problem(dbias, terms.sum(dim=0), bound_dbias)),
    )


def rope(launch: Launch, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, dq_out: torch.Tensor,
         dk_out: torch.Tensor, theta: float) -> str | None:
    """Check q_out, k_out, dq and dk.

    Frequency and product round an angle; sin and cos are right to two units in the last place. For an infinity only
    their sign counts, and far positions leave that to the rounding of the angle to float32.
    """
    turned, stray = launched(launch, q, k, positions, dq_out, dk_out)
    half = q.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64, device=q.device) / half)
    angles = positions[:, None, :, None] * frequencies
    rounded = positions[:, None, :, None].float() * frequencies.float()

    def turn(x1: torch.Tensor, x2: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        cos, sin = torch.cos(angles), torch.sin(angles)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)

    found = [stray]
    for name, got, x, sign in zip(
        ("q_out", "k_out", "dq", "dk"), turned, (q, k, dq_out, dk_out), (1, 1, -1, -1), strict=True
    ):
        x1, x2 = x.double().split(half, dim=-1)
        native = turn(x1.float(), x2.float(), sign * rounded).to(x.dtype)
        bound = FP32 * (x1.abs() + x2.abs()) * (angles.abs() + 4) + 2 * TINY
        reference = turn(x1, x2, sign * angles)
        found.append(named(name, problem(got, reference, torch.cat([bound, bound], dim=-1), native)))
    return first(*found)


def attention(
    launch: Launch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool = True,
    window: int = 0, bias: torch.Tensor | None = None, packed: Sequence[int] = (),
) -> str | None:
    """Check out, dq, dk, dv and dbias for finite inputs and a bias of numbers or -inf, which `launch` takes before
    dout.

    packed: lengths of the sequences, if there are several.
    """
    given = (q, k, v) if bias is None else (q, k, v, bias)
    (out, dq, dk, dv, *dbias), stray = launched(launch, *given, dout)
    sequence, head_dim = q.shape[2:]
    scale, eps = head_dim**-0.5, torch.finfo(q.dtype).eps
    grain = eps * torch.finfo(q.dtype).tiny  # error of storing a probability, or ds, however small
    grain = max(grain, TINY)  # a GPU's exp2 may give 0 for what fp32 holds as a subnormal alone (PTX ISA, ex2)
    group = q.shape[1] // k.shape[1]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    seen = attention_mask(sequence, causal, window, q.device)
    if packed:
        own = torch.repeat_interleave(torch.tensor(packed, device=q.device))
        seen = seen & (own[:, None] == own)
    if bias is None:
        bias = torch.zeros(1, 1, 1, dtype=torch.float64, device=q.device)
    bias = bias.double()
    seen = seen & (bias > -torch.inf)
    bias = torch.where(bias > -torch.inf, bias, 0.0)
    p = torch.softmax((q @ k.mT * scale + bias).masked_fill(~seen, -torch.inf), dim=-1)
    p = torch.where(seen.any(dim=-1, keepdim=True), p, 0.0)  # where no key is visible
    reference = p @ v
    delta, dp = (dout * reference).sum(dim=-1, keepdim=True), dout @ v.mT
    ds = p * (dp - delta)
    # Relative error of a probability: by its score, the logarithm of the sum, storing it, and sums over it.
    largest = (q.abs() @ k.abs().mT * scale + bias.abs()).masked_fill(~seen, 0.0).amax(dim=-1, keepdim=True)
    relative = FP32 * (2 * (16 + head_dim) * largest + 32 + head_dim + group * sequence + len(q)) + 2 * eps
    relative = torch.where(relative < 1, relative, torch.inf)  # no first-order bound here
    weights = relative * p + grain * seen
    bound_out = weights @ v.abs()
    bound_delta = (dout.abs() * (bound_out + eps * reference.abs())).sum(dim=-1, keepdim=True)
    spread = dout.abs() @ v.abs().mT + (dout.abs() * (p @ v.abs())).sum(dim=-1, keepdim=True)
    bound_ds = p * (relative * spread + bound_delta) + (grain + TINY * spread) * seen

    def shared(x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the heads of q that share one of k and v."""
        return x.unflatten(1, (-1, group)).sum(dim=2)

    return first(
        stray,
        named("out", problem(out, reference, bound_out)),
        named("dv", problem(dv, shared(p.mT @ dout), shared(weights.mT @ dout.abs()))),
        named("dq", problem(dq, ds @ k * scale, bound_ds @ k.abs() * scale)),
        named("dk", problem(dk, shared(ds.mT @ q * scale), shared(bound_ds.mT @ q.abs() * scale))),
        *(named("dbias", problem(dbias[0], ds.sum(dim=0), bound_ds.sum(dim=0))) for _ in dbias),
    )


def attention_mask(sequence: int, causal: bool, window: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return whether each key is visible to each query: [queries, keys]."""
    position = torch.arange(sequence, device=device)
    distance = position[:, None] - position
    return (distance >= (0 if causal else -sequence)) & (distance < (window or sequence))


def decode_attention(
    launch: Launch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
) -> str | None:
    """Check finite inputs in the first `lengths` keys; later keys may be NaN. q may lack its axis of queries, [2].

    Bounds are those of `attention`, plus the weight of each chunk.
    """
    (out,), stray = launched(launch, q, k, v, lengths)
    if q.ndim == 3:
        q, out = q[:, :, None], out[:, :, None]
    (queries, head_dim), keys = q.shape[2:], k.shape[2]
    scale, eps = head_dim**-0.5, torch.finfo(q.dtype).eps
    grain = max(eps * torch.finfo(q.dtype).tiny, TINY)
    group = q.shape[1] // k.shape[1]
    counts = lengths[:, None] - torch.arange(queries - 1, -1, -1, device=q.device)
    seen = (torch.arange(keys, device=q.device) < counts[..., None])[:, None]
    q = q.double()
    exists = seen[:, :, -1:].mT
    k, v = (torch.where(exists, x.double(), 0.0).repeat_interleave(group, dim=1) for x in (k, v))
    p = torch.softmax((q @ k.mT * scale).masked_fill(~seen, -torch.inf), dim=-1)
    p = torch.where((counts > 0)[:, None, :, None], p, 0.0)
    largest = (q.abs() @ k.abs().mT * scale).amax(dim=-1, keepdim=True)
    relative = FP32 * (3 * (16 + head_dim) * largest + 48 + head_dim + keys) + 2 * eps
    relative = torch.where(relative < 1, relative, torch.inf)  # no first-order bound here
    bound = (relative * p + grain * seen) @ v.abs()
    empty = out.transpose(1, 2)[counts <= 0]
    return first(
        stray,
        named("out", problem(out, p @ v, bound)),
        None if (empty == 0).all() else "out: a query without keys is not zero",
    )


def within_plain_code(
    launch: Launch, plain: Callable[..., torch.Tensor], names: Sequence[str], inputs: Tensors, dy: torch.Tensor
) -> str | None:
    """Check outputs and gradients of a chain of kernels whose intermediates are stored.

    They may err at most 8 times as much as plain code in the same dtype, or 8 units in the last place of the largest
    value. This is coarse; the single kernels have bounds.
    """
    outputs, stray = launched(launch, *inputs, dy)
    low = trained(plain, *inputs, dy=dy)
    reference = trained(plain, *(x.double() for x in inputs), dy=dy.double())
    found = [stray]
    for name, got, near, exact in zip(names, outputs, low, reference, strict=True):
        largest = exact.abs().max() * torch.finfo(got.dtype).eps
        found.append(named(name, problem(got, exact, 8 * torch.maximum((near.double() - exact).abs().max(), largest))))
    return first(*found)
