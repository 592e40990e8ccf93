"""The provenance of a kernel's configuration.

"compiled": the compiler alone decides. "device": autotuning on a GPU chose it. "replayed": it comes from recorded
autotuning results. "not autotuned": autotuning would choose it, and neither a GPU nor a record was there.

XLA for TPUs does not autotune: its cost model chooses, so every kernel is "compiled".
"""

from typing import Literal

from xlafuse.hlo.gpu_program import Kernel

Provenance = Literal["compiled", "device", "replayed", "not autotuned"]
Source = Literal["device", "replay", "nothing", "cost model"]

_BY_SOURCE: dict[Source, Provenance] = {
    "device": "device", "replay": "replayed", "nothing": "not autotuned", "cost model": "compiled",
}


def of(kernel: Kernel, source: Source) -> Provenance:
    """Return the provenance of a kernel: that of `source` if XLA autotunes the kernel, else "compiled"."""
    return _BY_SOURCE[source] if kernel.tunable else "compiled"
