"""Who chose a kernel's configuration: nobody had to, a device by measuring, a device's record, or nobody
though a device would."""

from typing import Literal

from xlafuse.hlo.gpu_program import Kernel

Provenance = Literal["compiled", "device", "replayed", "not autotuned"]
Source = Literal["device", "replay", "nothing"]

_CHOSEN: dict[Source, Provenance] = {"device": "device", "replay": "replayed", "nothing": "not autotuned"}


def of(kernel: Kernel, source: Source) -> Provenance:
    """A kernel that XLA's autotuner handles carries its source's provenance; any other is "compiled", the
    same everywhere."""
    return _CHOSEN[source] if kernel.tunable else "compiled"
