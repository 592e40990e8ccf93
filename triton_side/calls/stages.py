"""Names for the stages of a block, which the compiler carries into its kernels, and a recorder into its operations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.traceback import annotate
from torch.utils._pytree import tree_leaves

_NO_STAGE = contextlib.nullcontext()
_MARK = "stage "


@dataclass(frozen=True)
class _Open:
    name: str
    beside: Mapping[str, str]


_open: list[_Open] | None = None  # the stages around what runs, while something records


def stage(name: str, **beside: str) -> contextlib.AbstractContextManager[None]:
    """Mark the operations inside the `with` as stage `name` while torch.compile or torch.export traces them, or
    `recorded_stages` is active.

    Traced, the name reaches every FX node, forward and backward (`of_node` reads it), provided that the call which
    triggers the compile runs under `torch.fx.traceback.preserve_node_meta()`. A stage opened inside another one is
    inside it ("norm/scale"); traced, one inside another of its own name is that one. Outside both this does nothing:
    `annotate` alone takes 1.4 to 2.0 us of host time per use, as long as a small eager operation on a CPU; this takes
    0.3 us (torch 2.11 and 2.13).

    beside: stages that launches made here declare, and that the block has beside this one, under names of its own:
    within `stage("loss", product="head")` the stage "product" is "head", and all others are in "loss".
    """
    if torch.compiler.is_compiling():
        # A key a stage: what `annotate` is given joins what the annotations around it were given, in order.
        return annotate({_MARK + name: True})
    return _NO_STAGE if _open is None else _recorded(_Open(name, beside), _open)


def of_node(meta: Mapping[str, Any]) -> str | None:
    """The stages of an FX node with this `meta`, outermost first, joined by "/"; None where it has none."""
    names = (key.removeprefix(_MARK) for key in meta.get("custom") or {} if key.startswith(_MARK))
    return "/".join(names) or None


@contextlib.contextmanager
def _recorded(opened: _Open, around: list[_Open]) -> Iterator[None]:
    around.append(opened)
    try:
        yield
    finally:
        around.pop()


@contextlib.contextmanager
def recorded_stages() -> Iterator[None]:
    """Within the context `current` knows the open stages, in the backward pass of a torch.autograd.Function those in
    which it was applied. Of the process: what runs must run in one thread."""
    global _open
    if _open is not None:
        yield
        return
    _open = []
    apply = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = classmethod(functools.partial(_applied, apply.__func__))  # type: ignore
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        _open = None


def _applied(apply: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """`function.apply`, its backward pass to be run within the stages that are open now."""
    results = apply(function, *args, **kwargs)
    around = list(_open or ())
    nodes = {x.grad_fn for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.grad_fn is not None}
    for node in nodes if around else ():
        node.register_prehook(lambda gradients: None if _open is None else _open.extend(around))
        node.register_hook(lambda *gradients: None if _open is None else _leave(len(around)))
    return results


def _leave(count: int) -> None:
    assert _open is not None
    del _open[-count:]


def recording() -> bool:
    return _open is not None


def current(inner: str = "") -> str:
    """The open stages, outermost first, and the stage `inner` in them, joined by "/"; "" where there is none."""
    around = _open or []
    first, *rest = inner.split("/")
    if around and first in around[-1].beside:
        around, inner = around[:-1], "/".join((around[-1].beside[first], *rest))
    return "/".join(filter(None, (*(opened.name for opened in around), inner)))
