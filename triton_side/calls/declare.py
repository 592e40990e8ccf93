"""What a hand-written kernel computes, said next to the kernel: the operations of the block's stages, and FLOPs.

    @declare(again("dot", "scores"), gradient("dot", "values", "dv"), flops=lambda shapes: ...)
    @triton.jit
    def kernel(q_ptr, ...): ...

Stages carry the names that the plain blocks give theirs. A launch within `stage("norm")` puts the declared stages
inside that one. A kernel that serves several purposes (a matrix product) leaves its operations to the call:

    with computing(forward("dot", "down"), forward("add", "residual"), c_ptr="y"):
        y = launch_matmul(...)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from triton_side.calls import stages

Shapes = Mapping[str, Any]  # of a launch, by parameter name: the shapes of its tensors, the values of other arguments
_Kernel = TypeVar("_Kernel")
_NO_CONTEXT = contextlib.nullcontext()


@dataclass(frozen=True)
class Computed:
    """One operation. result: tells it from operations of the same name in its stage ("dq", "dk"); two kernels whose
    declarations agree in all three compute one operation twice. backward: of the gradient. rematerialized: a forward
    operation repeated in the backward pass."""

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
    """A forward operation that the backward pass repeats rather than reads its result."""
    return Computed(op, stage, result, rematerialized=True)


@dataclass(frozen=True)
class Declaration:
    """operations: in order. flops: of one launch, from the shapes of its tensors and, of a Triton kernel, its other
    arguments; None where data decide. reads: of a tensor of which only a part is read, by parameter name, how many
    elements: of a table, as many as are looked up."""

    operations: tuple[Computed, ...]
    flops: Callable[[Shapes], float | None]
    reads: Mapping[str, Callable[[Shapes], int]] = field(default_factory=dict)


def declare(
    *operations: Computed,
    flops: Callable[[Shapes], float | None],
    reads: Mapping[str, Callable[[Shapes], int]] | None = None,
) -> Callable[[_Kernel], _Kernel]:
    """Decorator for a @triton.jit function, above `triton.jit`."""

    def attach(kernel: _Kernel) -> _Kernel:
        kernel.declaration = Declaration(operations, flops, reads or {})  # type: ignore[attr-defined]
        return kernel

    return attach


_templates: dict[tuple[str, str], Declaration] = {}


def declare_template(source: str, name: str, *operations: Computed, flops: Callable[[Shapes], float]) -> None:
    """Declare the CUDA C++ kernel template `name` of the file `source`."""
    _templates[source, name] = Declaration(operations, flops)


def of_template(source: str, expression: str) -> Declaration | None:
    """The declaration of an instance such as "gelu_forward<float, 4, 2, 256>"."""
    return _templates.get((source, expression.partition("<")[0]))


def of_kernel(kernel: Any) -> Declaration | None:
    """The declaration of a @triton.jit function, if it has one."""
    return getattr(kernel, "declaration", None)


_called_for: tuple[Computed, ...] = ()
_names: Mapping[str, str] = {}


def computing(*operations: Computed, **names: str) -> contextlib.AbstractContextManager[None]:
    """Launches within the context compute `operations`, where any are given, whatever their kernels declare; `names`
    say what the caller calls the tensors that kernels take as some parameter. Nothing unless recording."""
    return _computing(operations, names) if stages.recording() else _NO_CONTEXT


@contextlib.contextmanager
def _computing(operations: tuple[Computed, ...], names: Mapping[str, str]) -> Iterator[None]:
    global _called_for, _names
    outer = _called_for, _names
    _called_for, _names = operations, names
    try:
        yield
    finally:
        _called_for, _names = outer


def name_of(parameter: str) -> str:
    """What the caller of a launch made here and now calls the tensor that the kernel takes as `parameter`."""
    return _names.get(parameter, parameter.removesuffix("_ptr"))


def current_stage() -> str:
    """The stage of what runs here and now besides launches: a copy that brings an operand of a product into shape
    belongs to the product."""
    return stages.current(_called_for[0].stage if _called_for else "")


def operations_of(declaration: Declaration | None) -> tuple[Computed, ...]:
    """What a launch made here and now computes, its stages inside those that are open."""
    declared = declaration.operations if declaration else ()
    return tuple(
        replace(operation, stage=stages.current(operation.stage))
        for operation in (_called_for or declared)
    )
