"""An implementation: one way to compute a block, named by a dotted string."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .case import PARTS, Case


def load(target: str) -> Callable[..., Any]:
    """The function that "package.module:function" names, its module imported."""
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


@dataclass(frozen=True)
class Implementation:
    """One way to compute a block.

    `target` is `package.module:function`: the contract `apply(inputs, **attributes) -> outputs` on dicts of arrays.
    `compiler` says what takes it: xla, xla-unfused, xla-remat, eager, inductor, inductor-max, flex, triton,
    triton-library, cuda; or xla-triton, for which a target of PyTorch's side is planned there and compiled by XLA.
    `unsupported` says why a case cannot be taken, or None. `directions` leaves out those in which it would only repeat
    another implementation. `baseline` ones show what it costs to fuse nothing, which a block's shapes of `quick` show
    well enough. `requires` are the packages that it needs beyond its framework, as pip takes them
    ("liger-kernel==0.8.5": any version is used, the row was written for this one), and what it needs of the framework
    itself ("torch>=2.12"). Only its worker knows whether they are there.
    """

    name: str
    target: str
    compiler: str
    summary: str
    needs_gpu: str | None = None
    unsupported: Callable[[Case], str | None] = field(default=lambda case: None)
    directions: tuple[str, ...] = tuple(PARTS)
    tunes: bool = False
    baseline: bool = False
    requires: tuple[str, ...] = ()

    def load(self) -> Callable[..., Any]:
        """Import the target function; imports its framework, so only a worker calls it."""
        return load(self.target)

    @property
    def framework(self) -> str:
        return "xla" if self.compiler.startswith("xla") else "torch"

    @property
    def compiled_on_host(self) -> bool:
        """Whether a compiler makes all of it: work for the host, and for the GPU its inputs and one call at most."""
        return self.compiler.startswith(("xla", "inductor")) or self.compiler == "flex"
