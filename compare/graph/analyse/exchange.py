"""The exchange between GPUs that a collective of XLA makes, from its kernel in a graph."""

from __future__ import annotations

from dataclasses import dataclass

from xlafuse.hlo.link_traffic import bytes_sent, collective_of

from ..model import Kernel


@dataclass(frozen=True)
class Exchange:
    """One launch of a collective.

    gpus: how many exchange with each other. sent_bytes: by one of them. overlaps: XLA runs other kernels meanwhile.
    """

    opcode: str
    gpus: int
    sent_bytes: float
    overlaps: bool = False


def exchange_of(kernel: Kernel) -> Exchange | None:
    """Return what a kernel exchanges; None for another kernel, or where its bytes or GPUs are not known."""
    facts = kernel.facts
    opcode, gpus = collective_of(map(str, (facts.get("opcode"), *facts.get("opcodes", ())))), facts.get("gpus")
    if kernel.kind != "collective" or kernel.bytes_read is None or opcode is None:
        return None
    if not isinstance(gpus, int) or not gpus:
        return None
    return Exchange(opcode, gpus, bytes_sent(opcode, kernel.bytes_read, gpus), bool(facts.get("overlaps")))
