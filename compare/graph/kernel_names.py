"""The kernels of a graph by the names that users have for them."""

from __future__ import annotations

import fnmatch

from . import formats
from .model import FusionGraph, Kernel

_LONGEST = 4000  # characters of a name; views shorten it with "…"


def kernels_named(graph: FusionGraph, wanted: str) -> list[int]:
    """Return kernels by number, else by the compiler's name, else by a profiler's, else by a pattern of any of these.

    A profiler's name may be of several kernels: XLA runs equal ones under one name, and a library chooses one for many
    calls. A "…", by which views shorten names, stands for any letters.
    """
    kernels = list(enumerate(graph.kernels or ()))
    pattern = wanted.replace("…", "*")
    return (
        [i for i, _ in kernels if wanted == str(i + 1)]
        or [i for i, kernel in kernels if wanted == kernel.name]
        or [i for i, kernel in kernels if wanted in _profilers_names(kernel)]
        or [
            i for i, kernel in kernels
            if any(fnmatch.fnmatchcase(name, pattern) for name in (kernel.name, *_profilers_names(kernel)))
        ]
    )


def known_names(graph: FusionGraph) -> list[str]:
    """Return each name that finds a kernel, the compilers' first."""
    kernels = graph.kernels or ()
    return list(dict.fromkeys((
        *(kernel.name for kernel in kernels), *(name for kernel in kernels for name in _profilers_names(kernel)),
    )))


def _profilers_names(kernel: Kernel) -> list[str]:
    ran_as = kernel.facts.get("ran_as", ())
    names = [kernel.runtime_name or "", *(map(str, ran_as) if isinstance(ran_as, list | tuple) else ())]
    return [shown for name in names if name for shown in (name, formats.runtime(name, _LONGEST))]
