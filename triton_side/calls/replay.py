"""The launches of Triton kernels in a call, each to be repeated alone.

    launches = launches_of(call)
    launches[0]()               # the first kernel again, on the same tensors

Only kernels that `direct_launch` launches are seen: all hand-written ones, with a series of Triton in versions.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from xlafuse.triton_side.calls.direct_launch import DESCRIPTORS, DirectKernel

GetItem = Callable[[Any, Any], Callable[..., Any]]
_getitem: GetItem = DirectKernel.__getitem__


@dataclass(frozen=True, eq=False)
class Replay:
    """A launch, which keeps its tensors alive. Calling it launches the kernel again."""

    kernel: DirectKernel
    grid: Any
    args: tuple[Any, ...]
    constants: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.kernel[self.grid](*self.args, **self.constants)

    @property
    def description(self) -> str:
        """Equal for launches of one kernel that differ only in the tensors' addresses and contents."""
        constants = (f"{name}={_described(value)}" for name, value in sorted(self.constants.items()))
        return f"{_described(self.kernel)}{self.grid} {_described(self.args)} {', '.join(constants)}"


@contextlib.contextmanager
def launched_by(getitem: GetItem) -> Iterator[None]:
    """Make `kernel[grid]` call `getitem`(kernel, grid) for the kernels that can be launched directly."""
    DirectKernel.__getitem__ = getitem  # type: ignore[method-assign]
    try:
        yield
    finally:
        DirectKernel.__getitem__ = _getitem  # type: ignore[method-assign]


def launches_of(call: Callable[[], Any], *, launch: bool = True) -> list[Replay]:
    """Return the launches in one call, in order. Without `launch`, none of them happens during the call."""
    launches: list[Replay] = []

    def noted(kernel: DirectKernel, grid: Any) -> Callable[..., Any]:
        def run(*args: Any, **constants: Any) -> Any:
            launches.append(Replay(kernel, grid, args, constants))
            return _getitem(kernel, grid)(*args, **constants) if launch else None

        return run

    with launched_by(noted):
        call()
    return launches


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}"
    if isinstance(value, DESCRIPTORS):
        return f"{_described(value.base)}{value.shape}{value.strides}{value.block_shape}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, JITFunction):
        return f"{value.fn.__module__}.{value.fn.__qualname__}"
    return repr(value)
