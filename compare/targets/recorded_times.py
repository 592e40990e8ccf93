"""Times that a target's GPU took for the cases of a run, each with the fingerprint of the code that it ran.

A compile without that GPU shows such a time where it gives the same code (compare.graph.analyse.summary).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..base import atomic_write

NAME = "recorded_times.json.gz"


@dataclass(frozen=True)
class RecordedTime:
    """One record's device time, the number of its kernels, and their fingerprint."""

    device_time_us: float
    kernels: int
    fingerprint: str


def read(folder: Path) -> dict[str, RecordedTime]:
    """Return the recorded times by record id; empty for a target without any."""
    path = folder / NAME
    if not path.is_file():
        return {}
    return {name: RecordedTime(**values) for name, values in json.loads(gzip.decompress(path.read_bytes())).items()}


def write(folder: Path, times: Mapping[str, RecordedTime]) -> None:
    """Write the times, a line a record."""
    lines: Iterable[str] = (f"{json.dumps(name)}: {json.dumps(asdict(times[name]))}" for name in sorted(times))
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    atomic_write.write(folder / NAME, gzip.compress(text.encode(), mtime=0))
