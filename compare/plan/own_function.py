"""A user's function as an implementation of a block: `xlafuse run attention --with mine.py:fn`.

The function is called with the block's inputs: by name where its parameters have the inputs' names, else in the block's
order. It gets those of the block's attributes that it has parameters for. It returns the block's output, a tuple of its
outputs in order, or a dict by name. A backward function is called with those inputs, outputs `y` and cotangents `d_y`
that it has parameters for, and returns the gradients of the differentiable inputs, in the same three forms.

A file is read without being executed, so that its framework is known before a worker imports it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ..base.frameworks import OWNERS
from ..base.usage import UsageError, one_of
from ..spec.block import Block
from ..spec.blocks import BLOCKS
from ..spec.implementation import Implementation, load

VARIABLE = "XLAFUSE_WITH"  # the functions of a run as JSON, for its workers
_BACKENDS = {"torch": "own-torch", "jax": "xla"}
_WITHOUT_BACKWARD = {
    "torch": ".workers.pytorch.own_function:by_autograd", "jax": ".workers.xla.own_function:by_autograd",
}
_WITH_BACKWARD = {
    "torch": ".workers.pytorch.own_function:differentiable", "jax": ".workers.xla.own_function:differentiable",
}

# Takes inputs (of a backward function also outputs y and cotangents d_y) and attributes, and returns arrays by name.
Function = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Place:
    """A function in a file: its absolute path, and the function's name."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.name}"


@dataclass(frozen=True)
class OwnFunction:
    """A user's function for a block. framework: "torch" or "jax". backward: its gradient, or None for the framework's.
    """

    block: str
    framework: str
    function: Place
    backward: Place | None = None

    def row(self) -> Implementation:
        """Return the implementation, named like the function."""
        return Implementation(
            self.function.name, str(self.function), _BACKENDS[self.framework], f"your function in {self.function}",
            loader=self.load,
        )

    def load(self) -> Callable[..., dict[str, Any]]:
        """Import the file and return the function in the form of an implementation. Only a worker calls this.

        Raises UsageError where the function does not take the block's inputs.
        """
        block, place, backward = BLOCKS[self.block], self.function, self.backward
        function, outputs = _imported(place), [t.name for t in block.outputs]
        forward = arguments_of(inspect.signature(function), place, block)

        def run(inputs: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
            return by_name(call(function, forward, inputs, attributes), outputs, place)

        made: Callable[..., dict[str, Any]]
        if backward is None:
            made = load(_WITHOUT_BACKWARD[self.framework])(run, str(place))
            return made
        gradient, wanted = _imported(backward), [t.name for t in block.inputs if t.differentiable]
        given = _backward_arguments(inspect.signature(gradient), backward, block)

        def differentiate(values: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
            return by_name(call(gradient, given, values, attributes), wanted, backward)

        made = load(_WITH_BACKWARD[self.framework])(run, differentiate, wanted, outputs)
        return made


@dataclass(frozen=True)
class Arguments:
    """How a function is called. positional: the names of its values in order. keywords: those given by name."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]


def own_function(block: Block, function: str, backward: str | None, folder: Path) -> OwnFunction:
    """Return the function that a user names as FILE:FUNCTION for a block. Relative files are in `folder`.

    Raises UsageError where the file or the function is missing, its framework is not clear, or its parameters do not
    fit.
    """
    place, tree = _found(function, folder)
    if place.name in [i.name for i in block.implementations]:
        raise UsageError(f"{block.name} has an implementation {place.name!r}; give {place} another name")
    signature = _signature(tree, place.name)
    if signature is not None:
        arguments_of(signature, place, block)
    gradient = None
    if backward is not None:
        gradient, other = _found(backward, folder)
        signature = _signature(other, gradient.name)
        if signature is not None:
            _backward_arguments(signature, gradient, block)
    return OwnFunction(block.name, _framework(tree, place), place, gradient)


def add(functions: Iterable[OwnFunction]) -> None:
    """Add the functions to the table of blocks, in this process and in the workers that it starts."""
    added = list(functions)
    for each in added:
        block = BLOCKS[each.block]
        others = tuple(i for i in block.implementations if i.name != each.function.name)
        BLOCKS[each.block] = replace(block, implementations=(*others, each.row()))
    if added:
        os.environ[VARIABLE] = msgspec.json.encode(added).decode()


def add_from_environment() -> None:
    """Add the functions of the run whose worker this process is."""
    add(msgspec.json.decode(os.environ.get(VARIABLE, "[]"), type=list[OwnFunction]))


def arguments_of(signature: inspect.Signature, place: Place, block: Block) -> Arguments:
    """Return how the function is called with the block's inputs and attributes. Raises UsageError."""
    inputs = [t.name for t in block.inputs]
    offered = [*inputs, *block.attributes, *block.parameters]
    parameters = list(signature.parameters.values())
    required = _required(signature)
    named = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    extra = tuple(name for name in offered if name not in inputs and (takes_all or name in named))
    if set(inputs) <= set(named) or (takes_all and len(named) == len(parameters)):
        if set(required) <= set(offered) & set(named):
            return Arguments((), (*inputs, *extra))
    else:
        free = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in extra]
        if len(free) >= len(inputs) and set(required) <= {p.name for p in free[: len(inputs)]} | set(extra):
            return Arguments(tuple(inputs), extra)
    attributes = f", and {', '.join(offered[len(inputs):])} by name" if len(offered) > len(inputs) else ""
    raise UsageError(
        f"{place} takes {signature}; {block.name} gives {', '.join(inputs)}, "
        f"by these names or in this order{attributes}"
    )


def _backward_arguments(signature: inspect.Signature, place: Place, block: Block) -> Arguments:
    offered = [
        *(t.name for t in block.inputs), *(t.name for t in block.outputs), *(f"d_{t.name}" for t in block.outputs),
        *block.attributes, *block.parameters,
    ]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    named = [p.name for p in signature.parameters.values() if p.kind is not p.POSITIONAL_ONLY]
    if not set(_required(signature)) <= set(offered) & set(named):
        raise UsageError(
            f"{place} takes {signature}; a backward function of {block.name} may take {', '.join(offered)}"
        )
    return Arguments((), tuple(name for name in offered if takes_all or name in named))


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


def by_name(returned: Any, names: list[str], place: Place) -> dict[str, Any]:
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


def _imported(place: Place) -> Callable[..., Any]:
    """Return the function, its file imported with its folder last on the path. Raises UsageError."""
    file = Path(place.file)
    sys.path.append(str(file.parent))
    module = importlib.import_module(file.stem)
    loaded = Path(getattr(module, "__file__", None) or "")
    if not loaded.is_file() or not loaded.samefile(file):
        raise UsageError(f"{place}: another module is called {file.stem!r} ({loaded}); rename the file")
    function: Callable[..., Any] = getattr(module, place.name)
    return function


def _found(text: str, folder: Path) -> tuple[Place, ast.Module]:
    file, colon, name = text.rpartition(":")
    path = (folder / file).resolve()
    if not colon or not name.isidentifier() or path.suffix != ".py":
        raise UsageError(f"a function is named as FILE.py:FUNCTION; got {text!r}")
    try:
        tree = ast.parse(path.read_text(), str(path))
    except OSError as problem:
        raise UsageError(f"{path}: cannot be read: {problem.strerror}") from None
    except (SyntaxError, ValueError) as problem:
        raise UsageError(f"{path}: is no Python file: {problem}") from None
    one_of("function", name, list(_top_level(tree)), where=f"in {path.name}")
    return Place(str(path), name), tree


def _top_level(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return the statements of a module that give a name to a function or a value."""
    found: dict[str, ast.stmt] = {}
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            found |= {target.id: statement for target in statement.targets if isinstance(target, ast.Name)}
    return found


def _signature(tree: ast.Module, name: str) -> inspect.Signature | None:
    """Return the signature of a plainly defined function, with None for each default; None for any other value."""
    statement = _top_level(tree)[name]
    if not isinstance(statement, ast.FunctionDef):
        return None
    given, kind = statement.args, inspect.Parameter
    by_place = [*given.posonlyargs, *given.args]
    required = len(by_place) - len(given.defaults)
    parameters = [
        kind(
            each.arg, kind.POSITIONAL_ONLY if i < len(given.posonlyargs) else kind.POSITIONAL_OR_KEYWORD,
            default=kind.empty if i < required else None,
        )
        for i, each in enumerate(by_place)
    ]
    if given.vararg:
        parameters.append(kind(given.vararg.arg, kind.VAR_POSITIONAL))
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None))
    if given.kwarg:
        parameters.append(kind(given.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _framework(tree: ast.Module, place: Place) -> str:
    """Return the framework behind the names that the function uses, else that of the file's imports."""
    owners: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                package = (alias.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
                if package in OWNERS:
                    owners[(alias.asname or alias.name).split(".")[0]] = OWNERS[package]
    defined, used, waiting = _top_level(tree), set(), [place.name]
    while waiting:
        name = waiting.pop()
        if name in used:
            continue
        used.add(name)
        if name in defined:
            waiting += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    frameworks = {owners[name] for name in used if name in owners} or set(owners.values())
    if len(frameworks) == 1:
        return frameworks.pop()
    found = "both JAX and PyTorch" if frameworks else "neither JAX nor PyTorch"
    raise UsageError(f"{place} uses {found}; a function of one of them becomes a row")


