"""How much of a kernel's work an operation is, to tell which part of a model a kernel of several belongs to."""

from __future__ import annotations

from ..graph.model import Kernel, SourceOp

_PRODUCT, _USUAL, _MOVES = 100.0, 1.0, 0.01
_PRODUCTS = ("dot_general", "conv_general_dilated", "mm", "bmm", "addmm", "baddbmm", "convolution", "ragged_dot")
_MOVEMENTS = frozenset(
    "broadcast broadcast_in_dim reshape transpose bitcast copy convert convert_element_type iota constant slice "
    "squeeze expand_dims concatenate pad split select_n parameter view permute expand clone _to_copy unsqueeze".split()
)


def weight(op: SourceOp, kernel: Kernel) -> float:
    """Return the share of an operation in its kernel's work, as a number to be compared within the kernel.

    A product outweighs all others in a kernel for products; an operation that moves or converts data counts little.
    """
    name = op.op.removeprefix("aten.").partition(".")[0].removesuffix("_")
    if name in _PRODUCTS:
        return _PRODUCT if kernel.kind in ("gemm", "attention", "library", "custom") else _USUAL
    return _MOVES if name in _MOVEMENTS else _USUAL
