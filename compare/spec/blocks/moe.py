"""A mixture of SwiGLU experts (Mixtral, arXiv 2401.04088): each token goes to the top_k experts of highest score.

    y = sum over the chosen e of w_e (silu(x w_gate[e]) * (x w_up[e])) w_down[e]

w is the softmax of the chosen logits x router^T, which equals the full softmax renormalised over the chosen experts.
Among equal logits the expert with the lowest index wins. No token is dropped, however many choose one expert. Routing
and weighted sums are in float32.

The load-balancing loss is Switch's (arXiv 2101.03961) for several choices: experts * sum over e of fraction_e mean_e.
Here fraction_e is the share of all choices that fall on e (not differentiated), and mean_e is the mean of e's
probabilities. The loss is 1 where both are even.

The choice of experts is not continuous: where two logits are nearly equal, float32 and the float64 reference may choose
differently, and all results of that token would differ. Inputs are drawn so that this cannot happen. The logits are
drawn first, with MARGIN between the last chosen and the first other one, and x is built to have them. Storing x and the
router in bfloat16 moves a logit by at most 0.01, and computing it in float32 by 1e-5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, cuda_graphs, library, pallas, pallas_examples, tokamax, triton
from ..implementation import Implementation
from ..tensor import Tensor
from ._portable import at_least_float32, in_dtype_of

MARGIN = 0.125  # where logits have a standard deviation of 1


def reference(xp, inputs, *, top_k):  # type: ignore[no-untyped-def]
    x = inputs["x"]
    logits = at_least_float32(xp, x) @ at_least_float32(xp, inputs["router"]).T
    exponentials = xp.exp(logits - xp.amax(logits, axis=-1, keepdims=True))
    probabilities = exponentials / xp.sum(exponentials, axis=-1, keepdims=True)
    tokens, experts = logits.shape
    left, chosen = logits, logits != logits
    for _ in range(top_k):
        best = xp.argmax(left, axis=-1)[:, None] == xp.arange(experts, device=x.device)
        left, chosen = xp.where(best, -xp.inf, left), chosen | best
    of_chosen = xp.where(chosen, exponentials, 0.0)
    weights = of_chosen / xp.sum(of_chosen, axis=-1, keepdims=True)
    y = xp.zeros_like(at_least_float32(xp, x))
    for expert in range(experts):
        (rows,) = xp.where(chosen[:, expert])
        own = x[rows]
        gate = own @ inputs["w_gate"][expert]
        activated = gate / (1 + xp.exp(-gate)) * (own @ inputs["w_up"][expert])
        y[rows] = y[rows] + weights[rows, expert][:, None] * (activated @ inputs["w_down"][expert])
    fraction = xp.sum(chosen, axis=0) / (tokens * top_k)
    balance_loss = experts * xp.sum(fraction * xp.mean(probabilities, axis=0))
    return {"y": in_dtype_of(x, y), "balance_loss": balance_loss}


def router_weight(sizes: Sizes) -> Any:
    """Return random orthonormal rows, the same for every seed, because drawing x needs them."""
    import numpy as np

    generator = np.random.default_rng([sizes["experts"], sizes["width"]])
    return np.linalg.qr(generator.standard_normal((sizes["width"], sizes["experts"])))[0].T


def draw_x(generator: Any, sizes: Sizes) -> Any:
    """Draw normal rows, with a component along the router's rows that gives the logits of `draw_logits`."""
    router = router_weight(sizes)
    x = generator.standard_normal((sizes["tokens"], sizes["width"]))
    return x + (draw_logits(generator, sizes) - x @ router.T) @ router


def draw_logits(generator: Any, sizes: Sizes) -> Any:
    """Draw logits with an uneven load: their mean falls by 1 from the first expert to the last, in random order.

    All but `used` experts lie below the used ones, so no token chooses them. Each of the first tokens prefers another
    used expert, so every used one gets a token.
    """
    import numpy as np

    tokens, experts, used, top_k = (sizes[name] for name in ("tokens", "experts", "used", "top_k"))
    logits = generator.standard_normal((tokens, experts)) - np.linspace(0, 1, experts)
    first = np.arange(min(tokens, used))
    logits[first, first] = logits.max(1)[first] + MARGIN
    logits[:, used:] = logits[:, :used].min(1, keepdims=True) - np.abs(logits[:, used:])
    order = np.argsort(-logits, axis=1)
    np.put_along_axis(logits, order[:, :top_k], np.take_along_axis(logits, order[:, :top_k], 1) + MARGIN, 1)
    return logits[:, generator.permutation(experts)]


def product_flops(sizes: Sizes) -> float:
    """Count three products of width x hidden for each choice of a token; the router is below 1% and left out."""
    return 3 * 2 * sizes["tokens"] * sizes["top_k"] * sizes["width"] * sizes["hidden"]


def working_bytes(sizes: Sizes) -> int:
    """Return the memory of XLA's grouped products in bf16.

    They hold every row for each expert, twice forward and twice backward: 30.3 GiB for 64 experts and 32,768 rows of
    2048.
    """
    rows = sizes["tokens"] * sizes["top_k"]
    return 2 * 4 * sizes["experts"] * rows * max(sizes["width"], sizes["hidden"])


def used_weights(sizes: Sizes) -> int:
    """Count the elements of one weight that belong to experts with a token."""
    return sizes["used"] * sizes["width"] * sizes["hidden"]


def sizes(tokens: int, width: int, hidden: int, experts: int, top_k: int, used: int | None = None) -> Sizes:
    """used: the number of experts that get tokens, all by default."""
    return {
        "tokens": tokens, "width": width, "hidden": hidden, "experts": experts, "top_k": top_k, "used": used or experts,
    }


def grouped_mm_unsupported(case: Case) -> str | None:
    """Refuse types other than bfloat16, where torch's grouped_mm loops over experts and waits for the GPU."""
    if case.dtype != "bfloat16":
        return f"torch's grouped_mm has a kernel for bfloat16 only, not {case.dtype}"
    if case.sizes["width"] % 8 or case.sizes["hidden"] % 8:
        return "torch's grouped_mm takes rows of a multiple of 16 bytes"
    return None


def pallas_unsupported(case: Case) -> str | None:
    width, hidden = case.sizes["width"], case.sizes["hidden"]
    if all(size % (64 if size > 64 else 8) == 0 for size in (width, hidden)):
        return None
    return f"hand-written Pallas copies tiles of whole 8 x 64 pieces, which width {width}, hidden {hidden} do not fill"


def tokamax_unsupported(case: Case) -> str | None:
    """Refuse sizes whose grouped products tokamax does not compile on an H200 (tokamax 0.0.17).

    Forward tiles have 64 columns and gradients have tiles of 64 rows. A size below 64 has a tile of its own.
    """
    width, hidden = case.sizes["width"], case.sizes["hidden"]
    rows = case.sizes["tokens"] * case.sizes["top_k"]
    if width % 8 or hidden % 8:
        return f"tokamax copies rows of a multiple of 16 bytes by TMA, not of width {width}, hidden {hidden}"
    if any(size > 64 and size % 64 for size in (width, hidden)):
        return f"tokamax copies tiles of 64 columns, which width {width}, hidden {hidden} do not divide into"
    if case.differentiates and (rows % 8 or (rows > 64 and rows % 64)):
        return f"tokamax's gradients copy whole tiles of 64 rows, or of fewer a multiple of 8, not {rows} rows"
    return None


UP, DOWN = ("experts", "width", "hidden"), ("experts", "hidden", "width")
GROUPED = replace(
    library("moe", "a stable sort, three torch.nn.functional.grouped_mm, a weighted sum"),
    unsupported=grouped_mm_unsupported,
)

def examples_unsupported(case: Case) -> str | None:
    width, hidden = case.sizes["width"], case.sizes["hidden"]
    if width % 128 == hidden % 128 == 0:
        return None
    return f"jax's Pallas example takes widths of whole tiles of 128, not width {width}, hidden {hidden}"


BLOCK = Block(
    name="moe",
    summary="mixture of SwiGLU experts: router, top-k, grouped products over ragged groups, weighted sum",
    inputs=(
        Tensor("x", ("tokens", "width"), draw=draw_x),
        Tensor("router", ("experts", "width"), draw=lambda generator, sizes: router_weight(sizes)),
        Tensor("w_gate", UP, fan_in="width", read=used_weights),
        Tensor("w_up", UP, fan_in="width", read=used_weights),
        Tensor("w_down", DOWN, fan_in="hidden", read=used_weights),
    ),
    outputs=(Tensor("y", ("tokens", "width")), Tensor("balance_loss", (), dtype="float32")),
    reference=reference,
    parameters=("top_k",),
    backward_needs=("x", "router", "w_gate", "w_up", "w_down"),
    flops=product_flops,
    backward_flops=lambda s: 2 * product_flops(s),
    work="flops",
    working_bytes=working_bytes,
    sizes=sizes,
    shapes=(
        # Mixtral's experts and choices, with half its width and a quarter of its hidden size: the float64 gradients of
        # its 1.4 billion weights would take 11 GB.
        Shape("mixtral-small", sizes(4096, 2048, 3584, 8, 2), quick=True),
        Shape("prime", sizes(251, 257, 131, 7, 3, used=6), ("float32",), edge=True),
        Shape("olmoe", sizes(4096, 2048, 1024, 64, 8)),
        Shape("one-empty", sizes(4096, 2048, 1024, 8, 2, used=7), ("bfloat16",), edge=True),
        Shape("all-on-one", sizes(4096, 2048, 1024, 8, 1, used=1), ("bfloat16",), edge=True),
        Shape("few-tokens", sizes(16, 2048, 3584, 8, 2)),
        Shape("odd", sizes(17, 37, 29, 5, 2, used=4), ("float32", "float16"), edge=True),
        # Several tiles of 128 rows and of 64 columns, which none of the groups fills.
        Shape("tiles", sizes(200, 128, 192, 5, 2, used=4), ("bfloat16", "float16"), edge=True),
        # bfloat16 and rows of a multiple of 16 bytes, as grouped_mm needs.
        Shape("one-expert", sizes(7, 16, 24, 3, 1, used=1), ("float32", "bfloat16"), edge=True),
        Shape("tiny-token", sizes(1, 16, 24, 3, 2, used=2), ("float32", "bfloat16"), directions=("train",), edge=True),
        # Forward only: with one expert the router's gradient is exactly zero, and a relative error has no scale.
        Shape("tiny-column", sizes(3, 1, 1, 1, 1), ("float32", "bfloat16"), directions=("fwd",), edge=True),
    ),
    implementations=(
        *compilers("moe"),
        Implementation(
            "xla-dense", "xlafuse.blocks.moe:apply_dense", "xla", "jax.jit of every expert on every token",
        ),
        GROUPED,
        replace(
            GROUPED, name="inductor-grouped", backend_name="inductor", summary="torch.compile of the library's calls"
        ),
        triton("moe"), pallas("moe", pallas_unsupported), tokamax("moe", "ragged_dot", tokamax_unsupported),
        pallas_examples("moe", "ragged_dot_mgpu", examples_unsupported),
        *cuda_graphs("moe", static=("router", "w_gate", "w_up", "w_down")),
    ),
)
