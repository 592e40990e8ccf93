"""The provenance of a kernel's configuration.

"compiled": the compiler alone decides. "device": autotuning on a GPU chose it. "replayed": it comes from recorded
autotuning results. "predicted choice": of two kinds of kernels, the one with the shorter predicted time. "not
autotuned": autotuning would choose it, and none of these was there.

XLA for TPUs does not autotune: its cost model chooses, so every kernel is "compiled".
"""

from typing import Literal

from xlafuse.hlo.gpu_program import Kernel

Provenance = Literal["compiled", "device", "replayed", "predicted choice", "not autotuned"]
Source = Literal["device", "replay", "prediction", "nothing", "cost model"]

_BY_SOURCE: dict[Source, Provenance] = {
    "device": "device", "replay": "replayed", "prediction": "predicted choice", "nothing": "not autotuned",
    "cost model": "compiled",
}


def of(kernel: Kernel, source: Source) -> Provenance:
    """Return the provenance of a kernel: that of `source` if XLA autotunes the kernel, else "compiled".

    Predictions choose the kernels of matrix products alone.
    """
    if not kernel.tunable:
        return "compiled"
    return _BY_SOURCE["nothing" if source == "prediction" and kernel.kind != "gemm" else source]
