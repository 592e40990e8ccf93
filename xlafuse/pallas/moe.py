"""A mixture of SwiGLU experts with Pallas kernels on Mosaic GPU: a router sends each token to its top_k experts.

    y[t] = sum over t's choices j of w[t, j] (act[s] w_down[e])    s: the choice's slot, e: its expert
    act[s] = silu(gate[s]) up[s]    gate[s] = x[t] w_gate[e]    up[s] = x[t] w_up[e]

Jiang et al., "Mixtral of Experts", arXiv:2401.04088; the load-balancing loss is that of Fedus et al., arXiv:2101.03961.
Slots are the choices sorted by expert, each expert padded with zeros to whole tiles of 128 rows (`grouped_matmul.py`).
No token is dropped.

The grouped products are our kernels: gate and up in one, with SwiGLU in its epilogue, and down. XLA compiles routing,
the copy of rows into slots, and the weighted sum.

    dout[s] = dy[t]    dact[s] = dout[s] w_down[e]^T, without the weight    dw[t, j] = act[s] . dact[s]
    dgate, dup: SwiGLU's gradients from w dact    drows[s] = dgate[s] w_gate[e]^T + dup[s] w_up[e]^T    (one kernel)
    dw_down[e] = (w act)^T dout    dw_gate[e] = rows^T dgate    dw_up[e] = rows^T dup    over the slots of e

dw needs no product of size width, so the experts' outputs are not kept (Guo et al., SonicMoE, arXiv:2512.14080). XLA
computes act again, with the elementwise gradients. Each token adds up its choices in their order, so results repeat bit
for bit.

Shapes: x, y [tokens, width]; router [experts, width]; w_gate, w_up [experts, width, hidden]; w_down [experts, hidden,
width]; rows, dout [slots, width]; gate, up, act [slots, hidden]. width and hidden are multiples of 64, or multiples of
8 below 64. dtypes: bfloat16, float16, one for all. Routing, activations and weighted sums are float32. With gradients,
the forward pass saves rows, gate and up.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xlafuse.pallas.grouped_matmul import Groups, groups_of, launch_products, launch_weight_gradient
from xlafuse.pallas.mosaic import check_dtypes, operation
from xlafuse.pallas.product_warpgroups import ROWS
from xlafuse.pallas.swiglu import sigmoid

GATE_UP = (
    operation("dot", "gate"), operation("dot", "up"),
    *(operation(op, "act", result) for op, result in (("logistic", "sigmoid"), ("mul", "silu"), ("mul", "activated"))),
)
DOWN = (operation("dot", "down"),)
DACT = (operation("dot", "down", "dact", backward=True),)
DROWS = tuple(
    operation(op, stage, "dx", backward=True) for op, stage in (("dot", "gate"), ("dot", "up"), ("add", "up"))
)
DW_GATE, DW_UP, DW_DOWN = (
    (operation("dot", stage, f"dw_{stage}", backward=True),) for stage in ("gate", "up", "down")
)


class Slots(NamedTuple):
    """The order of the choices, sorted by expert, with padding.

    of_choice: the slot of each choice [tokens, top_k]. choices: the choice in each slot [slots], of all choices in one
    axis; their number in padding.
    """

    of_choice: jax.Array
    choices: jax.Array
    groups: Groups


class Saved(NamedTuple):
    """The arrays that the forward pass keeps for the gradients."""

    rows: jax.Array
    gate: jax.Array
    up: jax.Array
    weights: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array
    slots: Slots


def route(x: jax.Array, router: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return (chosen [tokens, top_k], weights [tokens, top_k], balance_loss, counts [experts]), computed in float32."""
    experts = len(router)
    with jax.named_scope("router"):
        logits = jnp.einsum("tw,ew->te", x, router, preferred_element_type=jnp.float32)
    with jax.named_scope("topk"):
        chosen_logits, chosen = jax.lax.top_k(logits, top_k)  # of equal logits the lowest index first
        weights = jax.nn.softmax(chosen_logits, axis=-1)
    with jax.named_scope("balance"):
        counts = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(experts), axis=0, dtype=jnp.int32)
        fraction = counts / chosen.size
        probabilities = jax.nn.softmax(logits, axis=-1)
        return chosen, weights, experts * jnp.sum(fraction * jnp.mean(probabilities, axis=0)), counts


def slots_of(chosen: jax.Array, counts: jax.Array) -> Slots:
    """Return the slots of the choices: by expert, then by token."""
    experts, size = chosen.ravel(), chosen.size
    groups = groups_of(counts, size)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    last = jnp.cumsum(counts, dtype=jnp.int32)  # without padding
    padding_before = (groups.ends - pl.cdiv(counts, ROWS)) * ROWS - (last - counts)
    slots = jnp.arange(size, dtype=jnp.int32) + padding_before[experts[order]]
    of_choice = jnp.zeros(size, jnp.int32).at[order].set(slots, unique_indices=True)

    expert = groups.of_tile[:, None]
    place = jnp.arange(len(groups.of_tile) * ROWS, dtype=jnp.int32).reshape(-1, ROWS) - padding_before[expert]
    choices = jnp.where(place < last[expert], order.at[place].get(mode="clip"), size).ravel()
    return Slots(of_choice.reshape(chosen.shape), choices, groups)


def in_slots(array: jax.Array, index: jax.Array) -> jax.Array:
    """Return the elements that the slots index; zeros in padding, whose index is the array's length."""
    return array.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def of_choices(array: jax.Array, slots: Slots) -> jax.Array:
    """Return the slots' elements of an array for each choice [tokens, top_k, ...]."""
    return array.at[slots.of_choice].get(mode="promise_in_bounds", wrap_negative_indices=False)


def activation_gradients(
    dact: jax.Array, gate: jax.Array, up: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return dgate, dup, the weighted act, and the gradient of each slot's weight [slots]."""
    dtype = gate.dtype
    with jax.named_scope("act"):
        dact, gate, up = (array.astype(jnp.float32) for array in (dact, gate, up))
        s = sigmoid(gate)
        silu = gate * s
        act, weighted_dact = silu * up, weight * dact
        dgate = weighted_dact * up * s * (1 + gate * (1 - s))
        dup, weighted_act = weighted_dact * silu, weight * act
    with jax.named_scope("combine"):
        dweights = jnp.sum(act * dact, axis=1)
    return dgate.astype(dtype), dup.astype(dtype), weighted_act.astype(dtype), dweights


def forward(
    x: jax.Array, weights: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, slots: Slots,
    *saved: str,
) -> tuple[jax.Array, ...]:
    """Return y [tokens, width], the rows in the slots, and the products "gate" and "up" that are to be saved."""
    with jax.named_scope("dispatch"):
        rows = in_slots(x, lax.div(slots.choices, weights.shape[1]))
    *products, act = launch_products(
        [(rows, w_gate, w_up)], slots.groups, weights.size, epilogue=(*saved, "act"), computes=GATE_UP
    )
    (out,) = launch_products([(act, w_down)], slots.groups, weights.size, epilogue=("sum",), computes=DOWN)
    with jax.named_scope("combine"):
        y = jnp.sum(weights[:, :, None] * of_choices(out, slots).astype(jnp.float32), axis=1).astype(x.dtype)
    return y, rows, *products


@jax.custom_vjp
def run_experts(
    x: jax.Array, weights: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, slots: Slots
) -> jax.Array:
    """Return y [tokens, width] for x [tokens, width] and the weights of the choices [tokens, top_k]."""
    return forward(x, weights, w_gate, w_up, w_down, slots)[0]


def run_experts_forward(
    x: jax.Array, weights: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, slots: Slots
) -> tuple[jax.Array, Saved]:
    y, rows, gate, up = forward(x, weights, w_gate, w_up, w_down, slots, "gate", "up")
    return y, Saved(rows, gate, up, weights, w_gate, w_up, w_down, slots)


def run_experts_backward(saved: Saved, dy: jax.Array) -> tuple[jax.Array | None, ...]:
    slots, groups, (tokens, top_k) = saved.slots, saved.slots.groups, saved.weights.shape
    size = tokens * top_k
    with jax.named_scope("combine"):
        dout = in_slots(dy, lax.div(slots.choices, top_k))
        weight = in_slots(saved.weights.ravel(), slots.choices)[:, None]
    (dact,) = launch_products(
        [(dout, saved.w_down)], groups, size, epilogue=("sum",), computes=DACT, b_transposed=True
    )
    dgate, dup, weighted_act, dweights = activation_gradients(dact, saved.gate, saved.up, weight)
    (drows,) = launch_products(
        [(dgate, saved.w_gate), (dup, saved.w_up)], groups, size, epilogue=("sum",), computes=DROWS, b_transposed=True
    )
    with jax.named_scope("dispatch"):
        dx = jnp.sum(of_choices(drows, slots).astype(jnp.float32), axis=1).astype(dy.dtype)
    return (
        dx, of_choices(dweights, slots),
        launch_weight_gradient(saved.rows, dgate, groups, size, computes=DW_GATE),
        launch_weight_gradient(saved.rows, dup, groups, size, computes=DW_UP),
        launch_weight_gradient(weighted_act, dout, groups, size, computes=DW_DOWN),
        None,
    )


run_experts.defvjp(run_experts_forward, run_experts_backward)


def check_inputs(x: jax.Array, router: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> None:
    """Raise ValueError or TypeError unless the arrays fit, of sizes that the kernels take."""
    check_dtypes(x, router, w_gate, w_up, w_down)
    width, experts, hidden = x.shape[1], len(router), w_gate.shape[-1]
    up, down = (experts, width, hidden), (experts, hidden, width)
    if router.shape != (experts, width) or (w_gate.shape, w_up.shape, w_down.shape) != (up, up, down):
        given = ", ".join(str(list(array.shape)) for array in (x, router, w_gate, w_up, w_down))
        raise ValueError(
            "x [tokens, width], router [experts, width], w_gate, w_up [experts, width, hidden] and w_down [experts, "
            f"hidden, width] must fit, got {given}"
        )
    if any(size % 8 or (size > 64 and size % 64) for size in (width, hidden)):
        raise ValueError(
            "width and hidden must be multiples of 64, or of 8 below 64; "
            f"got width {width}, hidden {hidden}: pad the arrays with zeros"
        )


def moe(
    x: jax.Array, router: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, *, top_k: int
) -> tuple[jax.Array, jax.Array]:
    """Return (y [tokens, width] in x's dtype, balance_loss [] in float32).

    Raises TypeError for other dtypes than bfloat16 and float16, and ValueError for other sizes than the header's.
    """
    check_inputs(x, router, w_gate, w_up, w_down)
    chosen, weights, balance_loss, counts = route(x, router, top_k)
    with jax.named_scope("dispatch"):
        slots = slots_of(chosen, counts)
    return run_experts(x, weights, w_gate, w_up, w_down, slots), balance_loss


def apply(inputs: dict[str, jax.Array], *, top_k: int) -> dict[str, jax.Array]:
    """Run the block `moe`: x [tokens, width], router, w_gate, w_up, w_down -> y, balance_loss."""
    y, balance_loss = moe(**inputs, top_k=top_k)
    return {"y": y, "balance_loss": balance_loss}
