"""Functions that a user names: package.module:name or file.py:name, called where () follows."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..base.host import gpu_present
from ..base.paths import PROJECT
from ..base.usage import UsageError, one_of
from .arguments import parse_arguments
from .parcel import of_packages

MOST_NAMED = 12
PROJECT_FOLDERS = tuple(f"{PROJECT / name}/" for name in ("compare", "xlafuse", "triton_side"))
_LIBRARY = sysconfig.get_path("stdlib")
# Frames that are not the user's: below one of these folders, or in the interpreter's library.
FRAMEWORKS = re.compile(
    r"/site-packages/(?:jax|jaxlib|flax|torch|triton|cloudpickle|numpy)/|/lib/python3\.\d+/(?!site-)|^<"
)
_BINDERS = {"globals", "locals", "vars", "exec", "setattr", "__getattr__", "__dict__"}


def is_users(module: ModuleType) -> bool:
    """Return whether a module belongs to no installed package, nor to this project or Python."""
    folders = getattr(module, "__path__", ())
    files = [getattr(module, "__file__", None), *(folders if isinstance(folders, Iterable) else ())]
    return any(
        Path(file).is_absolute() and not of_packages(file) and not file.startswith(PROJECT_FOLDERS)
        and not Path(file).is_relative_to(_LIBRARY) for file in files if file  # torch.classes makes up a file
    )


def check_name(name: str) -> None:
    """Refuse a name that does not occur in its file, before a slow import. Raises UsageError.

    A file that can bind names without writing them (globals(), import *) is left to `resolve`.
    """
    where, _, what = name.partition(":")
    file = Path(where)
    if not where.endswith(".py") or not what or not file.is_file():
        return
    text = file.read_text(errors="replace")
    first, words = what.removesuffix("()").partition(".")[0], set(re.findall(r"\w+", text))
    if first in words or words & _BINDERS or "__" in first or re.search(r"import\s+\*", text):
        return
    public = re.findall(r"^(?:async\s+def|def|class)\s+([^\W_]\w*)", text, re.MULTILINE)
    one_of("name", first, public, most=MOST_NAMED)


def resolve(name: str) -> Any:
    """Return the object named "package.module:name" or "file.py:name", called if () follows. Raises UsageError."""
    where, _, what = name.partition(":")
    calling = what.endswith("()")
    what = what.removesuffix("()")
    if not where or not what:
        raise UsageError(f"{name!r} names no function; write package.module:name or path/to/file.py:name")
    found = _module(where)
    for part in what.split("."):
        if not hasattr(found, part):
            kind = "name" if found is sys.modules.get(getattr(found, "__name__", "")) else "attribute"
            public = [each for each in vars(found) if not each.startswith("_")] if hasattr(found, "__dict__") else []
            near = [each for each in public if callable(getattr(found, each, None))]
            one_of(kind, part, near, most=MOST_NAMED)
            raise UsageError(f"{where} has no {part!r}")
        found = getattr(found, part)
    return _called(name, found) if calling else found


def arguments_from(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the function of that name and return (args, kwargs). Raises UsageError."""
    made = _called(name, resolve(name.removesuffix("()")))
    if isinstance(made, dict):
        return (), _keywords(name, made)
    if isinstance(made, tuple):
        if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
            return tuple(made[0]), _keywords(name, made[1])
        return made, {}
    return (made,), {}


def arguments_of(inputs: str | None, shapes: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) that the function named `inputs` makes, or that have these shapes. Raises UsageError."""
    return arguments_from(inputs) if inputs is not None else parse_arguments(shapes or "")


def call_of(function: str, inputs: str | None, shapes: str | None) -> tuple[Any, Any, Any]:
    """Return (function, args, kwargs) of a call by its names. Raises UsageError."""
    return resolve(function), *arguments_of(inputs, shapes)


def _module(where: str) -> Any:
    """Import a module by name, or a file as Python does with its folder first on the path."""
    if where.endswith(".py") or "/" in where:
        file = Path(where).absolute()
        if not file.is_file():
            raise UsageError(f"{where}: no such file")
        if "." in file.stem:
            raise UsageError(f"{where}: Python imports no file with another dot in its name; rename it")
        sys.path.insert(0, str(file.parent))
        module = _guarded(f"importing {where}", lambda: importlib.import_module(file.stem))
        loaded = Path(getattr(module, "__file__", None) or "")
        if not loaded.is_file() or not loaded.samefile(file):
            raise UsageError(f"{where}: another module is called {file.stem!r} ({loaded}); rename the file")
        return module
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        missing = importlib.util.find_spec(where) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        raise UsageError(f"there is no module {where!r} on the path; a file is named with .py: {where}.py:name")
    return _guarded(f"importing {where}", lambda: importlib.import_module(where))


def _called(name: str, function: Any) -> Any:
    if not callable(function):
        raise UsageError(f"{name} is a {type(function).__name__}, which cannot be called")
    return _guarded(f"calling {name.removesuffix('()')}()", function)


def _guarded(what: str, run: Callable[[], Any]) -> Any:
    """Run the user's code. An exception becomes a UsageError of one line with the code's place."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # ours may be JSON
            return run()
    except (Exception, SystemExit) as problem:
        frames = own_frames(problem)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise UsageError(f"{what} failed: {type(problem).__name__}: {' '.join(str(problem).split())}{where}") from None


def own_frames(problem: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code, outermost first."""
    return [
        frame for frame in traceback.extract_tb(problem.__traceback__)
        if not frame.filename.startswith(PROJECT_FOLDERS) and not FRAMEWORKS.search(frame.filename)
    ]


def _keywords(name: str, made: dict[Any, Any]) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in made):
        raise UsageError(f"{name} returned a dict whose keys are not all names; for a single argument, return (dict,)")
    return made


def quiet_jax(devices: int = 1) -> None:
    """Keep JAX from reserving GPU memory here and from warning about a missing GPU: only shapes are needed.

    devices: how many CPUs JAX shows, so that a module can make its mesh of them.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if devices > 1:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    if not gpu_present():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        logging.getLogger("jax_plugins").setLevel(logging.ERROR)  # its CUDA plugin warns that a library is missing
