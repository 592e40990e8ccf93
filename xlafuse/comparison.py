"""The modules of the package `compare`, imported by name when a user first needs one.

A user may have a module `compare`, so the package's name is `xlafuse.compare`. A checkout has it as `compare`, too. A
process that imported it under that name, such as one of the project's tests, goes on with it and gets no second copy.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

_NAME, _IN_CHECKOUT = "xlafuse.compare", "compare"


def module(name: str) -> ModuleType:
    """Return the package's module of that name, relative to the package."""
    return import_module(f"{_package()}.{name}")


def _package() -> str:
    other = sys.modules.get(_IN_CHECKOUT)
    if other is None:
        return _NAME
    return _IN_CHECKOUT if _folders(other) == _folders(import_module(_NAME)) else _NAME


def _folders(package: ModuleType) -> list[Path]:
    return [Path(folder).resolve() for folder in getattr(package, "__path__", ())]
