"""A small call of each optional peer: what fails here would fail in every record of a long run."""

from __future__ import annotations

from collections.abc import Iterable

from ..base import host
from ..base.text import printable
from ..base.usage import UsageError
from ..plan.plan import Plan
from ..record.record import Record
from ..record.run_folder import read_records
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation
from .run import execute, scratch_folder


def small_plan(peers: Iterable[tuple[str, Implementation]]) -> Plan:
    """Return a plan with the smallest check case of each peer that needs packages of its own, one for each name.

    peers: with the name of a block. A peer that takes no check case of its blocks is left out.
    """
    smallest: dict[str, tuple[Case, Implementation]] = {}
    for name, peer in peers:
        block = BLOCKS[name]
        takes = [c for c in block.cases("check") if c.direction in peer.directions and not peer.unsupported(c)]
        if takes and peer.requires and peer.name not in smallest:
            smallest[peer.name] = min(takes, key=lambda case: sum(t.bytes(case) for t in block.inputs)), peer
    return Plan("check", tuple((case, (peer,)) for case, peer in smallest.values()))


def every_peer() -> Plan:
    """Return the small plan of all peers on one GPU."""
    return small_plan((b.name, i) for b in BLOCKS.values() if not b.spans_gpus for i in b.implementations)


def check(plan: Plan) -> list[Record]:
    """Run a small plan on this machine's GPU, and return its records. Raises UsageError without a GPU."""
    if not host.gpu_present():
        raise UsageError("--peers calls kernels on an NVIDIA GPU, and none is here; xlafuse doctor lists packages")
    with scratch_folder() as scratch:
        folder = scratch / "run"
        if execute(plan, folder=folder, target=None, resume=False) == 130:
            raise KeyboardInterrupt
        return read_records(folder)[0]


def in_words(record: Record) -> str:
    """Return a peer's status, and why it has no result: a missing package with the command that installs it."""
    why = f": {printable(record.detail, 300)}" if record.detail else ""
    return f"{record.implementation} ({record.case.id}): {record.status}{why}"
