"""XLA's side of the comparison: blocks as JAX graphs, their compilation, and what XLA made of them.

Importing this package imports neither jax nor anything else heavy: reading HLO text (`xlafuse.hlo.gpu_program`) needs
no framework. It is also the door to the user's API, which lives in `compare` and is imported when it is first asked
for:

    explain(fn, *args, ...)   the fusion graphs of a function of yours
    load(path)                a fusion graph from a file
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare.graph.model import FusionGraph
    from compare.sources.explained import Explained
    from compare.user.explain import ExplainError, explain, load

    __version__: str

__all__ = ["ExplainError", "Explained", "FusionGraph", "__version__", "explain", "load"]

_DOORS = {
    "ExplainError": "compare.user.explain",
    "Explained": "compare.sources.explained",
    "FusionGraph": "compare.graph.model",
    "explain": "compare.user.explain",
    "load": "compare.user.explain",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_DOORS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_DOORS})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("xlafuse")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"
