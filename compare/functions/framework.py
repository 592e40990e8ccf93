"""The name and the framework of a user's function, and the refusal of what cannot be called as it is."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..base.frameworks import OWNERS, Framework

# StableHLO has 'module @jit_f attributes', HLO has 'HloModule jit_f, is_scheduled'
_MODULE = re.compile(r"(?:module @|HloModule )(?:jit_)?([\w.-]+)")


class UnclearCall(Exception):
    """A function that cannot be called as it is. The message says why, and what to give."""


class UnclearFramework(UnclearCall):
    """A function of which nothing tells JAX from PyTorch, or too much."""


def frameworks_of_code(function: Any) -> set[Framework]:
    """Return the frameworks of a function's type, or else those of the names in its code."""
    function = uncompiled(function)
    return _owners([function, getattr(function, "__self__", None)]) or _used_frameworks(function)


def name_of(fn: Any) -> str:
    """Return the function's name; of a method Module.method, of a module its class, of a lowered function its own."""
    fn = uncompiled(fn)
    if is_stage(fn, "Lowered") or is_stage(fn, "Compiled"):
        named = _MODULE.search(fn.as_text() or "")
        return named[1] if named else type(fn).__name__.lower()
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    if isinstance(fn, types.MethodType) and not isinstance(fn.__self__, type):
        return f"{type(fn.__self__).__name__}.{fn.__name__}"
    return str(getattr(fn, "__name__", None) or type(fn).__name__)


def uncompiled(fn: Any) -> Any:
    """Return the function behind a torch.compile wrapper, or `fn` itself."""
    return getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None) or fn


def is_stage(fn: Any, kind: str) -> bool:
    """Return whether `fn` is a `jax.stages.Lowered` or `Compiled`, whichever `kind` names."""
    stages: Any = sys.modules.get("jax.stages")
    return stages is not None and isinstance(fn, getattr(stages, kind))


def refuse_factory(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a class, and a function without parameters that is given arguments: they make what the user means.

    Raises UnclearCall.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # a function of C
        return
    needed = any(
        parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in signature.parameters.values()
    )
    if isinstance(function, type):
        write = f"write a function without parameters that returns one, such as {name}(...), and give its call"
        raise UnclearCall(
            f"{name} is a class; for an instance of it, {write if needed else _call_of(function)}"
        )
    if not signature.parameters and (args or kwargs):
        raise UnclearCall(
            f"{name} has no parameters, and arguments are given; if they are for what it returns, {_call_of(function)}"
        )


def _call_of(factory: Any) -> str:
    """Return how a user gives the result of a function, on the command line and in Python."""
    name = factory.__qualname__
    try:
        file = os.path.relpath(inspect.getfile(factory))
    except (TypeError, OSError, ValueError):  # of no file
        return f"give {name}()"
    return f"give {name}(), on the command line '{file}:{name}()'"


def framework_of(
    name: str, function: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = types.MappingProxyType({})
) -> Framework:
    """Return the framework of the function's type, else of its arguments', of the names that its code uses, or of what
    its module imports.

    Raises UnclearFramework where none of these tells.
    """
    function = uncompiled(function)
    while isinstance(function, functools.partial):
        function = uncompiled(function.func)
    found = _owners([function, getattr(function, "__self__", None)]) or _owners(_leaves((args, kwargs)))
    if len(found) > 1:
        raise UnclearFramework(f"{name} has both JAX and PyTorch arrays as arguments")
    for frameworks in (found, _used_frameworks(function), _imported_frameworks(function)):
        if len(frameworks) == 1:
            return frameworks.pop()
    raise UnclearFramework(f"neither {name}, the names that it uses nor its arguments tell JAX from PyTorch")


def _owners(values: Iterable[Any]) -> set[Framework]:
    found: set[Framework] = set()
    for value in values:
        for cls in type(value).__mro__:
            owner = OWNERS.get((cls.__module__ or "").split(".")[0])
            if owner is not None:
                found.add(owner)
    return found


def _used_frameworks(function: Any) -> set[Framework]:
    """Return the frameworks behind the names in a function's code: globals, closed-over values, imports inside it.

    An object counts as its `__call__`. Functions of its module that it calls or closes over count too.
    """
    found: set[Framework] = set()
    waiting, seen = [function], set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, (types.FunctionType, types.MethodType, type)):
            function = type(function).__call__ if callable(function) else None  # an object that is called
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            found |= {OWNERS[top] for top in _imported(code) if top in OWNERS}
            for used in _named_values(function, code):
                owner = OWNERS.get(_package(used))
                if owner is not None:
                    found.add(owner)
                elif isinstance(used, (Mapping, list, tuple)) or hasattr(used, "__dataclass_fields__"):
                    found |= _owners(_leaves(used))
                elif getattr(used, "__module__", None) == function.__module__:
                    waiting.append(used)
                else:
                    found |= _owners([used])
    return found


def _imported_frameworks(function: Any) -> set[Framework]:
    """Return the frameworks whose modules and objects are global names of the function's module."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    tops = {_package(value) for value in vars(module).values()} if module else set()
    return {OWNERS[top] for top in tops if top in OWNERS}


def _package(value: Any) -> str:
    """Return the top-level package of a module, or of an object's definition."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return str(module).split(".")[0]


def _named_values(function: types.FunctionType, code: types.CodeType) -> list[Any]:
    """Return the values of a code's global names, and those that the function closes over."""
    values = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell: the name is bound later
            values.append(cell.cell_contents)
    return values


def _imported(code: types.CodeType) -> set[str]:
    """Return the top-level packages that a code imports."""
    return {str(each.argval).split(".")[0] for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"}


def _leaves(value: Any, depth: int = 0) -> Iterable[Any]:
    if depth > 50:
        return
    if isinstance(value, Mapping):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        value = [getattr(value, field) for field in value.__dataclass_fields__]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, depth + 1)
    else:
        yield value
