"""One object for each compiler: which workers compile, run and check its implementations. Data, no framework."""

from .backend import Backend
from .kernels import CUDA, OWN_TORCH, TRITON, TRITON_CUDAGRAPHS, TRITON_LIBRARY
from .parallel import (
    EAGER_RANKS,
    INDUCTOR_ASYNC,
    INDUCTOR_RANKS,
    INDUCTOR_ROUTED,
    TRITON_RANKS,
    TRITON_RANKS_CUDAGRAPHS,
    XLA_IN_ORDER,
    XLA_RAGGED,
    XLA_RANKS,
    XLA_SHARDED,
    XLA_WINDOWED,
)
from .pytorch import EAGER, FLEX, INDUCTOR, INDUCTOR_CUDAGRAPHS, INDUCTOR_MAX, OWN_INDUCTOR
from .xla import PALLAS, XLA, XLA_LIBRARY, XLA_PALLAS, XLA_REMAT, XLA_TF32X3, XLA_TRITON, XLA_UNFUSED

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        XLA, XLA_REMAT, XLA_TF32X3, XLA_UNFUSED, XLA_TRITON, EAGER, INDUCTOR, INDUCTOR_MAX, INDUCTOR_CUDAGRAPHS, FLEX,
        TRITON, TRITON_CUDAGRAPHS, TRITON_LIBRARY, OWN_TORCH, OWN_INDUCTOR, CUDA, PALLAS, XLA_PALLAS,
        XLA_LIBRARY, XLA_RANKS, XLA_IN_ORDER, XLA_RAGGED, XLA_SHARDED, XLA_WINDOWED, EAGER_RANKS, INDUCTOR_RANKS,
        INDUCTOR_ASYNC, INDUCTOR_ROUTED, TRITON_RANKS, TRITON_RANKS_CUDAGRAPHS,
    )
}


def worker_of(name: str) -> str:
    """Return the worker role of a backend's name, also for a record of a release that had other backends."""
    if name in BACKENDS:
        return BACKENDS[name].worker
    return "xla" if name.startswith("xla") else "torch"
