"""Declare a hand-written kernel's operations, with the stages of the block that they belong to, and its FLOPs.

    @declare(again("dot", "scores"), gradient("dot", "values", "dv"), flops=lambda shapes: ...)
    @triton.jit
    def kernel(q_ptr, ...): ...

Stages have the names that the plain PyTorch block uses. A launch within `stage("norm")` puts the declared stages inside
that stage. For a kernel that serves several purposes, such as a matrix product, the caller declares the operations:

    with computing(forward("dot", "down"), forward("add", "residual"), c_ptr="y"):
        y = launch_matmul(...)
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from xlafuse.triton_side.calls import stages
from xlafuse.triton_side.calls.direct_launch import launched_directly

Shapes = Mapping[str, Any]  # a launch's arguments by parameter name: shapes of tensors, values of others
_Kernel = TypeVar("_Kernel")
_NO_CONTEXT = contextlib.nullcontext()


@dataclass(frozen=True)
class Computed:
    """One operation.

    result: distinguishes operations of the same name in a stage ("dq", "dk"). If two kernels declare the same op, stage
        and result, they compute one operation twice.
    backward: it belongs to the gradient. rematerialized: the backward pass repeats a forward operation.
    """

    op: str
    stage: str = ""
    result: str = ""
    backward: bool = False
    rematerialized: bool = False

    @property
    def site(self) -> str:
        """Equal for one operation computed in several kernels."""
        return f"{'gradient of ' if self.backward else ''}{self.stage}:{self.op}:{self.result}"


def forward(op: str, stage: str = "", result: str = "") -> Computed:
    return Computed(op, stage, result)


def gradient(op: str, stage: str = "", result: str = "") -> Computed:
    return Computed(op, stage, result, backward=True)


def again(op: str, stage: str = "", result: str = "") -> Computed:
    """Return a forward operation that the backward pass repeats instead of reading its result."""
    return Computed(op, stage, result, rematerialized=True)


@dataclass(frozen=True)
class Declaration:
    """A kernel's operations, in order, and its cost.

    flops: of one launch, from its tensors' shapes and a Triton kernel's other arguments; None if it depends on data.
    reads: for each tensor that is read only in part, by parameter name, the number of elements read. For a table that
        is the number of elements looked up.
    """

    operations: tuple[Computed, ...]
    flops: Callable[[Shapes], float | None]
    reads: Mapping[str, Callable[[Shapes], int]] = field(default_factory=dict)


def declare(
    *operations: Computed,
    flops: Callable[[Shapes], float | None],
    reads: Mapping[str, Callable[[Shapes], int]] | None = None,
) -> Callable[[_Kernel], _Kernel]:
    """Return a decorator for a @triton.jit function; it stands above `triton.jit`.

    It also makes the kernel's launches cheap for the host (xlafuse.triton_side.calls.direct_launch).
    """

    def attach(kernel: _Kernel) -> _Kernel:
        kernel.declaration = Declaration(operations, flops, reads or {})  # type: ignore[attr-defined]
        return launched_directly(kernel)

    return attach


_templates: dict[tuple[str, str], Declaration] = {}


def declare_template(source: str, name: str, *operations: Computed, flops: Callable[[Shapes], float]) -> None:
    """Declare the CUDA C++ kernel template `name` of the file `source`."""
    _templates[source, name] = Declaration(operations, flops)


def of_template(source: str, expression: str) -> Declaration | None:
    """Return the declaration of an instance such as "gelu_forward<float, 4, 2, 256>"."""
    return _templates.get((source, expression.partition("<")[0]))


def of_kernel(kernel: Any) -> Declaration | None:
    """Return the declaration of a @triton.jit function, if it has one."""
    return getattr(kernel, "declaration", None)


_callers_operations: tuple[Computed, ...] = ()
_names: Mapping[str, str] = {}


def computing(*operations: Computed, **names: str) -> contextlib.AbstractContextManager[None]:
    """Declare that launches within the context compute `operations`, instead of what their kernels declare.

    Without operations, the kernels' declarations hold. names: the caller's name of a tensor by the kernel's parameter.
    Nothing happens unless a recording is active.
    """
    return _computing(operations, names) if stages.recording() else _NO_CONTEXT


def preparing(op: str, **names: str) -> contextlib.AbstractContextManager[None]:
    """Declare that launches within the context prepare an operand of what the caller computes, by `op`.

    The operation belongs to the stage, and the phase, of the caller's first one. Without one, the kernels' declarations
    hold. names: as in `computing`.
    """
    first = _callers_operations[:1]
    return computing(*(replace(each, op=op, result=f"{each.result}/operand") for each in first), **names)


@contextlib.contextmanager
def _computing(operations: tuple[Computed, ...], names: Mapping[str, str]) -> Iterator[None]:
    global _callers_operations, _names
    outer = _callers_operations, _names
    _callers_operations, _names = operations, names
    try:
        yield
    finally:
        _callers_operations, _names = outer


def name_of(parameter: str) -> str:
    """Return the current caller's name of the tensor that the kernel takes as `parameter`, or as an item of it."""
    return _names.get(parameter, re.sub(r"_(ptr|descriptor)(?=\.|$)", "", parameter))


def current_stage() -> str:
    """Return the stage of a PyTorch operation that runs now.

    Within `computing` it is that operation's stage: a copy that prepares an operand of a product belongs to it.
    """
    return stages.current(_callers_operations[0].stage if _callers_operations else "")


def operations_of(declaration: Declaration | None) -> tuple[Computed, ...]:
    """Return the operations of a launch made now, with their stages inside the open ones."""
    declared = declaration.operations if declaration else ()
    operations = _callers_operations or declared
    return tuple(replace(operation, stage=stages.current(operation.stage)) for operation in operations)
