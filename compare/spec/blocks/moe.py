"""A mixture of SwiGLU experts (Mixtral, arXiv 2401.04088): each token goes to the top_k that a router scores highest.

    y = sum over the chosen e of w_e (silu(x w_gate[e]) * (x w_up[e])) w_down[e]

w is the softmax of the chosen logits x router^T, which is the full softmax's probabilities renormalised over those
chosen; of equal logits the expert with the lowest index is first. No token is dropped, however many want one expert.
Routing and weighted sums are in float32. The load-balancing loss is that of Switch (arXiv 2101.03961) for several
choices: experts * sum over e of fraction_e mean_e, fraction_e the share of all choices that fall on e (not
differentiated) and mean_e the mean of e's probabilities; 1 where both are even.

Which experts a token chooses is no continuous function: where two logits are equal but for rounding, float32 and the
float64 reference may choose differently, and every result of that token would be another. Inputs are drawn so that this
cannot happen: x is made to have logits that are drawn first, MARGIN apart between the last that is chosen and the first
that is not. Storing x and the router in bfloat16 moves a logit by 0.01 at most, computing it in float32 by 1e-5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, library, triton
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
    """Orthonormal rows, random but one for every seed: x must be drawn knowing them."""
    import numpy as np

    generator = np.random.default_rng([sizes["experts"], sizes["width"]])
    return np.linalg.qr(generator.standard_normal((sizes["width"], sizes["experts"])))[0].T


def draw_x(generator: Any, sizes: Sizes) -> Any:
    """Normal rows, but for their part along the router's, which gives them the logits of `draw_logits`."""
    router = router_weight(sizes)
    x = generator.standard_normal((sizes["tokens"], sizes["width"]))
    return x + (draw_logits(generator, sizes) - x @ router.T) @ router


def draw_logits(generator: Any, sizes: Sizes) -> Any:
    """The load is uneven: logits are normal about a level that falls by 1 from the first expert to the last. All but
    `used` experts are below those by construction, and nobody chooses them; of the first tokens each likes another of
    the used ones best, so that none is left out. Which expert has which level is random."""
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
    """Three products of width x hidden for each of a token's choices; the router's is below 1% of them and left out."""
    return 3 * 2 * sizes["tokens"] * sizes["top_k"] * sizes["width"] * sizes["hidden"]


def working_bytes(sizes: Sizes) -> int:
    """What XLA's grouped products have in bf16: every row beside each expert, twice, and twice again in the backward
    half (64 experts' 32,768 rows of 2048: 30.3 GiB)."""
    rows = sizes["tokens"] * sizes["top_k"]
    return 2 * 4 * sizes["experts"] * rows * max(sizes["width"], sizes["hidden"])


def used_weights(sizes: Sizes) -> int:
    """Elements of one weight that belong to experts with a token."""
    return sizes["used"] * sizes["width"] * sizes["hidden"]


def sizes(tokens: int, width: int, hidden: int, experts: int, top_k: int, used: int | None = None) -> Sizes:
    """`used`: how many experts get tokens; all, if not said."""
    return {
        "tokens": tokens, "width": width, "hidden": hidden, "experts": experts, "top_k": top_k, "used": used or experts,
    }


def grouped_mm_unsupported(case: Case) -> str | None:
    """In other types than bfloat16 torch's grouped_mm is a loop over experts that waits for the GPU before each."""
    if case.dtype != "bfloat16":
        return f"torch's grouped_mm has a kernel for bfloat16 alone, not {case.dtype}"
    if case.sizes["width"] % 8 or case.sizes["hidden"] % 8:
        return "torch's grouped_mm takes rows of a multiple of 16 bytes"
    return None


UP, DOWN = ("experts", "width", "hidden"), ("experts", "hidden", "width")
GROUPED = replace(
    library("moe", "a stable sort, three torch.nn.functional.grouped_mm, a weighted sum"),
    unsupported=grouped_mm_unsupported,
)

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
    shapes=(
        # Mixtral's experts and choices, at half its width and a quarter of its hidden size: float64 gradients of its
        # own 1.4 billion weights would take 11 GB.
        Shape("mixtral-small", sizes(4096, 2048, 3584, 8, 2), quick=True),
        Shape("prime", sizes(251, 257, 131, 7, 3, used=6), ("float32",), edge=True),
        Shape("olmoe", sizes(4096, 2048, 1024, 64, 8)),
        Shape("one-empty", sizes(4096, 2048, 1024, 8, 2, used=7), ("bfloat16",), edge=True),
        Shape("all-on-one", sizes(4096, 2048, 1024, 8, 1, used=1), ("bfloat16",), edge=True),
        Shape("few-tokens", sizes(16, 2048, 3584, 8, 2)),
        Shape("odd", sizes(17, 37, 29, 5, 2, used=4), ("float32", "float16"), edge=True),
        # Rows of 16 bytes and bfloat16, which grouped_mm asks for.
        Shape("one-expert", sizes(7, 16, 24, 3, 1, used=1), ("float32", "bfloat16"), edge=True),
        Shape("tiny-token", sizes(1, 16, 24, 3, 2, used=2), ("float32", "bfloat16"), directions=("train",), edge=True),
        # Of one expert the router's gradient is exactly zero: there is nothing to hold its error against.
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
        triton("moe"),
    ),
)
