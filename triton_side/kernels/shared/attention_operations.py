"""The operations of attention that its kernels declare, and the FLOPs of their products."""

from collections.abc import Callable

from xlafuse.triton_side.calls.declare import Computed, Shapes, again, forward, gradient
from xlafuse.triton_side.kernels.shared.attention_tiles import visible_pairs

FORWARD = (
    forward("dot", "scores"), forward("div", "scores"), forward("add", "bias"), forward("select", "mask"),
    forward("reduce_max", "softmax/max"), forward("sub", "softmax/exp"), forward("exp", "softmax/exp"),
    forward("reduce_sum", "softmax/sum"), forward("div", "softmax/divide"), forward("dot", "values"),
)
DELTA = (gradient("mul", "softmax/divide", "delta"), gradient("reduce_sum", "softmax/sum", "delta"))
# The dk, dv kernel and the dq kernel both recompute the weights from q, k and logsumexp2, and then ds.
SHARED = (
    again("dot", "scores"), again("div", "scores"), again("add", "bias"), again("select", "mask"),
    again("sub", "softmax/exp"), again("exp", "softmax/exp"), again("div", "softmax/divide"),
    gradient("dot", "values", "dweights"), gradient("mul", "softmax/exp", "dscores"),
)
DK_DV = (*SHARED, gradient("dot", "values", "dv"), gradient("dot", "scores", "dk"))
DQ = (*SHARED, gradient("dot", "scores", "dq"))
BATCH_SUM = gradient("reduce_sum", "bias", "dbias")
DBIAS = (*SHARED, BATCH_SUM)
BACKWARD = (*DK_DV, gradient("dot", "scores", "dq"))  # in one kernel


def operations_by_case(*operations: Computed) -> dict[tuple[bool, bool], tuple[Computed, ...]]:
    """Return the block's operations by (causal, biased); without causality only a last tile is masked."""

    def present(*absent: str) -> tuple[Computed, ...]:
        return tuple(operation for operation in operations if operation.stage not in absent)

    return {
        (True, True): present(), (True, False): present("bias"), (False, True): present("mask"),
        (False, False): present("mask", "bias"),
    }


FORWARD_BY_CASE, BACKWARD_BY_CASE = operations_by_case(*FORWARD), operations_by_case(*BACKWARD)
DK_DV_BY_CASE, DQ_BY_CASE = operations_by_case(*DK_DV), operations_by_case(*DQ)
DQ_DBIAS_BY_CASE, DBIAS_BY_CASE = operations_by_case(*DQ, BATCH_SUM), operations_by_case(*DBIAS)


def products_flops(count: int) -> Callable[[Shapes], float | None]:
    """Return a function for the FLOPs of `count` products of sequence x sequence x head_dim in every head.

    Only visible pairs count. The function returns None for packed sequences, whose lengths are data.
    """

    def flops(shapes: Shapes) -> float | None:
        batch, heads, sequence, head_dim = shapes["q_ptr"] if "q_ptr" in shapes else shapes["q_descriptor"]
        pairs = visible_pairs(sequence, shapes["CAUSAL"], shapes["WINDOW"])
        return None if shapes["PACKED"] else count * 2 * batch * heads * pairs * head_dim

    return flops
