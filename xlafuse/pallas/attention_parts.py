"""Configurations, the order of programs, and declared operations of attention's forward and backward kernels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlafuse.pallas.mosaic import operation

OWN_ROWS = 64  # of a warpgroup that computes: the rows of a `wgmma`
L2_BYTES = 32 << 20  # of the arrays that programs work on at a time
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """How programs divide their work.

    consumers: warpgroups that compute, with 64 rows of queries each. keys: of a tile, a power of 2.
    k_steps, v_steps: tiles in the rings. A tile of v is read later than one of k, so its place is free later.
    q_steps: tiles in the rings of q and dout, in the backward pass.
    """

    consumers: int
    keys: int
    k_steps: int
    v_steps: int
    q_steps: int


CONFIGS = {64: Config(3, 128, 4, 4, 4), 128: Config(2, 128, 2, 3, 2)}  # by head_dim

FORWARD = tuple(
    operation(op, stage) for op, stage in (
        ("dot", "scores"), ("div", "scores"), ("select", "mask"), ("reduce_max", "softmax/max"), ("sub", "softmax/exp"),
        ("exp", "softmax/exp"), ("reduce_sum", "softmax/sum"), ("div", "softmax/divide"), ("dot", "values"),
    )
)
# The weights are computed again from q, k and logsumexp2.
BACKWARD = (
    *(each for each in FORWARD[:-1] if not each["op"].startswith("reduce")),
    *(
        operation(op, stage, result, backward=True) for op, stage, result in (
            ("dot", "values", "dweights"), ("mul", "softmax/exp", "dscores"), ("dot", "values", "dv"),
            ("dot", "scores", "dk"), ("dot", "scores", "dq"),
        )
    ),
)


def of_case(operations: Sequence[dict[str, Any]], causal: bool) -> list[dict[str, Any]]:
    """Return the operations of a case; without causality only a last tile is masked."""
    return [each for each in operations if causal or each["stage"] != "mask"]


def place_of_program(program, heads, tiles, together):
    """Return (head, tile): `together` heads at a time, and in these one tile of each head after the other."""
    per_group = together * tiles
    group = lax.div(program, per_group)
    present = jnp.minimum(together, heads - group * together)
    rest = program - group * per_group
    return group * together + lax.rem(rest, present), lax.div(rest, present)


def heads_together(heads: int, at_least: int) -> int:
    """Return the least divisor of `heads` from `at_least` on, so that no group of heads is small; or all heads."""
    return next((count for count in range(max(1, at_least), heads) if heads % count == 0), heads)


def visible_pairs(q: jax.Array, causal: bool) -> int:
    """Return how many pairs of query and key count; a causal square counts half."""
    batch, heads, sequence, _ = q.shape
    return batch * heads * sequence * sequence // (2 if causal else 1)
