"""One name for each operation across frameworks, the operations that only move data, and those behind a buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from .model import FusionGraph, Kernel

_PREFIXES = ("aten.", "prims.", "prim.", "stablehlo.", "mhlo.", "chlo.", "hlo.")

_NAMES = {
    name: token
    for token, names in {
        "dot": "dot_general mm bmm matmul addmm baddbmm addbmm linear einsum ragged_dot ragged_dot_general scaled_dot "
        "grouped_mm",
        "convolution": "conv conv_general_dilated conv1d conv2d conv3d",
        "attention": "scaled_dot_product_attention flash_attention efficient_attention flex_attention "
                     "scaled_dot_product_flash_attention scaled_dot_product_efficient_attention "
                     "scaled_dot_product_cudnn_attention dot_product_attention",
        "add": "add_any bias",
        "sub": "subtract rsub",
        "mul": "multiply",
        "div": "divide true_divide",
        "neg": "negate negative",
        "exp": "exponential",
        "log": "ln",
        "pow": "power integer_pow",
        "sigmoid": "logistic",
        "max": "maximum",
        "min": "minimum",
        "where": "select_n",
        "lt": "less",
        "le": "less_equal",
        "gt": "greater",
        "ge": "greater_equal",
        "sum": "reduce_sum",
        "mean": "reduce_mean",
        "amax": "reduce_max",
        "amin": "reduce_min",
        "argmax": "arg_max",
        "softmax": "safe_softmax",
        "convert": "convert_element_type to_copy to type_as astype",
        "broadcast": "broadcast_in_dim expand broadcast_to",
        "reshape": "view unsafe_view bitcast flatten squeeze unsqueeze unsafe_reshape expand_dims",
        "transpose": "permute t swapaxes",
        "slice": "dynamic_slice narrow split chunk dynamic-slice",
        "concatenate": "cat concat",
        "copy": "clone contiguous copy-start copy-done alias detach",
        "gather": "index embedding index_select take",
        "pad": "constant_pad_nd",
        "iota": "arange",
        "full": "zeros ones full_like zeros_like ones_like scalar_tensor empty constant",
        "scatter": "scatter_add scatter-add index_put index_put_impl index_add embedding_dense_backward",
        "update": "dynamic_update_slice dynamic-update-slice",
    }.items()
    for name in (token, *names.split())
}

# aux: cuBLAS's word for also keeping the product's result that its epilogue reads.
MOVEMENT = frozenset(
    "aux convert broadcast reshape transpose slice concatenate copy gather pad iota full update reverse".split()
)
PRODUCTS = frozenset(("dot", "convolution"))
ANCHORS = PRODUCTS | {"attention"}
REDUCTIONS = frozenset("sum mean amax amin argmax argmin prod reduce reduce_window cumsum reduce_and reduce_or".split())


@cache
def token(op: str) -> str:
    """Return the common name of an operation: "aten.mul.Tensor", "mul", "multiply" -> "mul".

    An unknown name loses only its framework's prefix and suffix.
    """
    name = op
    for prefix in _PREFIXES:
        if op.startswith(prefix):
            name = op.removeprefix(prefix).partition(".")[0]
            if prefix == "aten." and name == "select":  # a view of one index; HLO's select is a choice
                return "slice"
            break
    name = name.strip("_")
    return "where" if name == "select" else _NAMES.get(name, name)


def tokens(kernel: Kernel) -> list[str]:
    """Return the common names of a kernel's operations, in order.

    XLA names a product after the transpose of its result. So a transpose counts as a product in a product's kernel that
    transposes nothing.
    """
    found = [token(op.op) for op in kernel.source_ops]
    if kernel.kind != "gemm":
        return found
    if "opcode" in kernel.facts and "transpose" not in kernel.facts.get("opcodes", ()):  # compiled by XLA
        return ["dot" if name == "transpose" else name for name in found]
    if "transpose" in found and not ANCHORS.intersection(found):  # earlier transposes prepare operands
        found[-1 - found[::-1].index("transpose")] = "dot"
    return found


_SOFTMAX = frozenset(("amax", "sub", "exp", "sum", "div"))
MASKING = frozenset("lt le gt ge eq ne and or not logical_and logical_or logical_not bitwise_not where".split())


def summarized(names: Iterable[str]) -> list[str]:
    """Return common names for a sentence, each once, without those that only move data.

    A softmax is one word, also for the comparisons that mask its scores. Elsewhere "where" stands for comparisons.
    """
    found = dict.fromkeys(name for name in names if name not in MOVEMENT)
    if found.keys() >= _SOFTMAX:
        words = ("softmax" if name in _SOFTMAX else name for name in found if name not in MASKING)
        return list(dict.fromkeys(words))
    masked = MASKING - {"where"} if "where" in found else frozenset()
    return [name for name in found if name not in masked]


def is_product(kernel: Kernel) -> bool:
    """Return whether the kernel computes a matrix product, also a library's or a hand-written one."""
    if kernel.kind in ("library", "custom"):
        return any(token(op.op) in PRODUCTS for op in kernel.source_ops)
    return kernel.kind == "gemm"


# Names that say nothing of the kind of work, or of a kind that is none of the others.
_KEPT = frozenset("sort top_k scatter mpmd_map pallas_call".split())


def kind_by_operations(kernel: Kernel) -> str:
    """Return the kind of a kernel. For kind "custom" (hand-written kernels, XLA's custom calls) its operations decide.

    Several products with an exponential or a softmax are an attention. Sorts, scatters and kernels that name no
    operation stay "custom".
    """
    if kernel.kind != "custom" or not kernel.source_ops:
        return kernel.kind
    found = tokens(kernel)
    several = sum(name in PRODUCTS for name in found) > 1
    if "attention" in found or (several and not {"exp", "softmax"}.isdisjoint(found)):
        return "attention"
    if is_product(kernel):
        return "gemm"
    if not (REDUCTIONS | {"softmax"}).isdisjoint(found):
        return "reduction"
    if not _KEPT.isdisjoint(found):
        return kernel.kind
    return "copy" if MOVEMENT.issuperset(found) else "elementwise"


# Library calls without products, whose FLOPs no formula has.
_NO_PRODUCTS = MOVEMENT | REDUCTIONS | frozenset(
    "sort argsort topk top_k scatter nonzero unique inductor_seeds randint rand randn seed cumprod".split()
)


def hides_flops(kernel: Kernel) -> bool:
    """Return whether the kernel's FLOPs are unknown and may be those of products.

    A library call may be a whole factorization. One whose kernel a device has named is a single kernel.
    """
    if kernel.flops is not None or not may_multiply(kernel):
        return False
    if kernel.kind != "library" or is_product(kernel):
        return True
    return kernel.runtime_name is None and not (kernel.source_ops and _NO_PRODUCTS.issuperset(tokens(kernel)))


def may_multiply(kernel: Kernel) -> bool:
    """Return whether the kernel computes a product or an attention, or may do so without saying it."""
    return is_product(kernel) or kernel.kind in ("attention", "library", "custom")


@dataclass(frozen=True)
class Cause:
    """The place of the operation whose result the buffer is.

    line: "file:line"; "" where it is unknown or ambiguous.
    stages: the operation's stage. A kernel that writes several buffers does not say which operation wrote which; then
        these are all stages of the kernel.
    """

    line: str = ""
    stages: tuple[str, ...] = ()


def cause(graph: FusionGraph, buffer: str) -> Cause:
    """Return the place of the last computing operation in the kernel that writes the buffer last.

    A kernel without a computing operation gives its last data movement. Both fields are empty for an input, and where
    the kernel's operations have no place.
    """
    writers = graph.producers.get(buffer, ())
    if graph.kernels is None or not writers:
        return Cause()
    kernel = graph.kernels[writers[-1]]
    if len({access.buffer for access in kernel.outputs or ()}) > 1:
        return Cause(kernel.lines[0] if len(kernel.lines) == 1 else "", kernel.stages)
    placed = [op for op in kernel.source_ops if op.stage or op.line]
    computing = [op for op in placed if token(op.op) not in MOVEMENT]
    op = next(reversed(computing or placed), None)
    return Cause() if op is None else Cause(op.users_line, (op.stage,) if op.stage else ())


def cause_text(graph: FusionGraph, buffer: str) -> str:
    """Return the operation's line, else its stages ("by norm, act"); "" where neither is known."""
    found = cause(graph, buffer)
    return found.line or (f"by {', '.join(found.stages)}" if found.stages else "")
