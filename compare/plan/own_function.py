"""A user's function as an implementation of a block: `xlafuse run attention --with mine.py:fn`.

The function is called with the block's inputs: by name where its parameters have the inputs' names, else in the block's
order. It gets those of the block's attributes that it has parameters for. It returns the block's output, a tuple of its
outputs in order, or a dict by name. A backward function is called with those inputs, outputs `y` and cotangents `d_y`
that it has parameters for, and returns the gradients of the differentiable inputs, in the same three forms.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.usage import UsageError
from ..functions import names
from ..functions.framework import UnclearCall, UnclearFramework, framework_of, is_stage, refuse_factory, uncompiled
from ..functions.parcel import path_for
from ..spec.block import Block
from ..spec.blocks import BLOCKS
from ..spec.implementation import OwnFunction, content_hash, short_name

# Takes inputs (of a backward function also outputs y and cotangents d_y) and attributes, and returns arrays by name.
Function = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Arguments:
    """How a function is called. positional: the names of its values in order. keywords: those given by name."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]


def own_function(block: Block, function: str, backward: str | None, folder: Path) -> OwnFunction:
    """Return the function that a user names for a block. Relative files are in `folder`.

    Imports it in this process. Raises UsageError where that fails, where its framework is not clear, or where its
    parameters do not fit.
    """
    given, gradient = (name and _absolute(name, folder) for name in (function, backward))
    assert given
    live = _resolved(given)
    if gradient is not None:
        _backward_arguments(_signature(_resolved(gradient)), short_name(gradient), block)
    try:
        refuse_factory(function, live, (None,), {})
        own = OwnFunction(
            block.name, framework_of(function, live), given, gradient, compiled=uncompiled(live) is not live,
            path=path_for(elsewhere=True), sources=_sources(given, gradient),
        )
    except UnclearFramework as problem:
        raise UsageError(f"{problem}: use a name of jax or of torch in it, or import one of them alone") from None
    except UnclearCall as problem:
        raise UsageError(str(problem)) from None
    if own.name in [i.name for i in block.implementations]:
        raise UsageError(f"{block.name} has an implementation {own.name!r}; give {function} another name")
    arguments_of(_signature(live), short_name(given), block)
    return own


def _resolved(name: str) -> Any:
    found = names.resolve(name)
    if not callable(found) or is_stage(found, "Compiled"):
        raise UsageError(f"{short_name(name)} is a {type(found).__name__}; give a function of the block's inputs")
    return found


def _sources(*functions: str | None) -> tuple[tuple[str, str], ...]:
    """Return the files of functions that are imported, as far as they have one, with the hashes of their content."""
    places = [function.partition(":")[0] for function in functions if function]
    files = [place if place.endswith(".py") else getattr(sys.modules[place], "__file__", None) for place in places]
    return tuple((file, content_hash(file)) for file in files if file)


def _absolute(name: str, folder: Path) -> str:
    where, colon, what = name.partition(":")
    return f"{(folder / where).resolve()}{colon}{what}" if where.endswith(".py") else name


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature; of a module of PyTorch, that of its `forward`; `*arguments` for a function of C."""
    function, torch = uncompiled(function), sys.modules.get("torch")
    try:
        return inspect.signature(function.forward if torch and isinstance(function, torch.nn.Module) else function)
    except ValueError:
        return inspect.signature(lambda *arguments: None)


def loaded(own: OwnFunction) -> tuple[Function, Function | None]:
    """Import a user's function and its gradient, in the worker, as functions of arrays by name.

    Raises UsageError where the function does not take the block's inputs.
    """
    sys.path += [entry for entry in own.path if entry not in sys.path]
    block = BLOCKS[own.block]
    function = names.resolve(own.function)
    forward = arguments_of(_signature(function), short_name(own.function), block)

    def run(inputs: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
        returned = call(function, forward, inputs, attributes)
        return by_name(returned, [t.name for t in block.outputs], short_name(own.function))

    if own.backward is None:
        return run, None
    gradient, place = names.resolve(own.backward), short_name(own.backward)
    given = _backward_arguments(_signature(gradient), place, block)

    def differentiate(values: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
        return by_name(call(gradient, given, values, attributes), differentiable(block), place)

    return run, differentiate


def differentiable(block: Block) -> list[str]:
    """Return the names of the inputs that a backward function gives gradients of."""
    return [t.name for t in block.inputs if t.differentiable]


def arguments_of(signature: inspect.Signature, place: str, block: Block) -> Arguments:
    """Return how the function is called with the block's inputs and attributes. Raises UsageError."""
    inputs = [t.name for t in block.inputs]
    offered = [*inputs, *block.attributes, *block.parameters]
    parameters = list(signature.parameters.values())
    required = _required(signature)
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes_many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    extra = tuple(name for name in offered if name not in inputs and (takes_all or name in named))
    if set(inputs) <= set(named) or (takes_all and len(named) == len(parameters)):
        if set(required) <= set(offered) & set(named):
            return Arguments((), (*inputs, *extra))
    else:
        free = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in extra]
        taken = {p.name for p in free[: len(inputs)]}
        if (takes_many or len(taken) == len(inputs)) and set(required) <= taken | set(extra):
            return Arguments(tuple(inputs), extra)
    attributes = f", and {', '.join(offered[len(inputs):])} by name" if len(offered) > len(inputs) else ""
    raise UsageError(
        f"{place} takes {signature}; {block.name} gives {', '.join(inputs)}, "
        f"by these names or in this order{attributes}"
    )


def _backward_arguments(signature: inspect.Signature, place: str, block: Block) -> Arguments:
    offered = [
        *(t.name for t in block.inputs), *(t.name for t in block.outputs), *(f"d_{t.name}" for t in block.outputs),
        *block.attributes, *block.parameters,
    ]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    named = [p.name for p in signature.parameters.values() if p.kind is not p.POSITIONAL_ONLY]
    given = tuple(name for name in offered if takes_all or name in named)
    if not given or not set(_required(signature)) <= set(given) & set(named):
        raise UsageError(
            f"{place} takes {signature}; a backward function of {block.name} may take {', '.join(offered)}"
        )
    return Arguments((), given)


def _required(signature: inspect.Signature) -> list[str]:
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in several]


def call(
    function: Callable[..., Any], arguments: Arguments, values: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Any:
    """Call the function with values and attributes by name, as far as it takes them."""
    given = {**values, **attributes}
    keywords = {name: given[name] for name in arguments.keywords if name in given}
    return function(*(given[name] for name in arguments.positional), **keywords)


def by_name(returned: Any, names: list[str], place: str) -> dict[str, Any]:
    """Return what a function returned, an array, several in order, or a dict, as arrays by name.

    Raises UsageError where their number or names differ.
    """
    if isinstance(returned, Mapping):
        found = dict(returned)
    else:
        several = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        found = dict(zip(names, several, strict=False)) if len(several) == len(names) else {}
    if set(found) != set(names):
        kind = type(returned).__name__
        count = f" of {len(returned)}" if isinstance(returned, (tuple, list, Mapping)) else ""
        raise UsageError(
            f"{place} must return {', '.join(names)}, in this order or by name; it returned a {kind}{count}"
        )
    return {name: found[name] for name in names}
