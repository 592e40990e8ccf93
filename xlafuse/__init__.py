"""The JAX and XLA part of the comparison: blocks as JAX graphs, their compilation, and readers of XLA's output.

Importing this package imports no framework; reading HLO text (`xlafuse.hlo.gpu_program`) needs none either. The user's
API is available here too. It lives in `xlafuse.compare` and is imported at its first use:

    explain(fn, *args, ...)   return the fusion graphs of your function
    load(path)                return a fusion graph from a file
    capture(folder)           profile a block of your program: `with xlafuse.capture("folder"):`
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compare.graph.model import FusionGraph
    from .compare.sources.explained import Explained
    from .compare.user.capture import capture
    from .compare.user.explain import ExplainError, explain, load

    __version__: str

__all__ = ["ExplainError", "Explained", "FusionGraph", "__version__", "capture", "explain", "load"]

_LAZY_IMPORTS = {
    "ExplainError": "user.explain",
    "Explained": "sources.explained",
    "FusionGraph": "graph.model",
    "capture": "user.capture",
    "explain": "user.explain",
    "load": "user.explain",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".compare.{_LAZY_IMPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_IMPORTS})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("xlafuse")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"
