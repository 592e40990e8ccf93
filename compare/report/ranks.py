"""One row for each GPU of the cases that span several: times, exposed communication, overlap, and bytes over the links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ..record.record_fields import RankFields
from ..sources.result import Result
from ..sources.row import Row, ratio
from .columns import IDENTITY, Column, exposed_us, longest_alone, of_row
from .table import grouped

LEGEND = (
    "time: device time of a median call on that GPU; the ranks begin a call together. alone: of the same program",
    "without exchanges. imbalance: the longest alone minus that of this GPU, so its wait for a GPU with more work.",
    "exposed: time minus the longest alone. communication, compute: time in which a kernel of that kind ran. overlap:",
    "time in which both ran. slowdown: compute over compute of the program alone. sent MB: bytes that the GPU sends,",
    "by the shapes of the exchanges. least MB: bytes that it must send. GB/s: the bytes sent, or else the least, over",
    "the time of communication.",
)


@dataclass(frozen=True)
class Rank:
    """The times and bytes of one GPU of a result. all_fields: of each GPU. rank: the number of this one."""

    row: Row
    all_fields: Sequence[RankFields]
    rank: int

    @property
    def fields(self) -> RankFields:
        return self.all_fields[self.rank]


def _imbalance_us(rank: Rank) -> float | None:
    longest, own = longest_alone(rank.all_fields), rank.fields.alone_device_time
    return None if longest is None or own is None else (longest - own) * 1e6


def _microseconds(name: str) -> Callable[[Rank], float | None]:
    def value(rank: Rank) -> float | None:
        seconds: float | None = getattr(rank.fields, name)
        return None if seconds is None else seconds * 1e6

    return value


COLUMNS = (
    *map(of_row, IDENTITY),
    Column("rank", "GPU", "number of the GPU", "rank", cell=lambda rank: str(rank.rank)),
    Column("device_time_us", "µs", "median device time of a call on this GPU", "time µs", _microseconds("device_time")),
    Column(
        "alone_us", "µs", "the same of the program whose exchanges are local stand-ins; empty where there is none",
        "alone µs", _microseconds("alone_device_time"),
    ),
    Column(
        "imbalance_us", "µs", "the longest alone_us of the GPUs minus this one's: wait for a GPU with more work",
        "imbalance µs", _imbalance_us,
    ),
    Column(
        "exposed_us", "µs", "device_time_us minus the longest alone_us of the GPUs: what communication costs",
        "exposed µs", lambda rank: exposed_us(rank.fields, rank.all_fields),
    ),
    Column(
        "communication_us", "µs", "time in which a communication kernel or a copy between GPUs ran", "communication µs",
        _microseconds("communication"),
    ),
    Column("compute_us", "µs", "time in which any other kernel ran", "compute µs", _microseconds("compute")),
    Column("overlap_us", "µs", "time in which both ran", "overlap µs", _microseconds("overlap")),
    Column(
        "overlap_share", "share", "overlap_us over communication_us", "overlapped",
        lambda rank: ratio(rank.fields.overlap, rank.fields.communication),
    ),
    Column(
        "compute_slowdown", "ratio", "compute_us over that of the program alone", "slowdown",
        lambda rank: ratio(rank.fields.compute, rank.fields.alone_compute),
    ),
    Column(
        "sent_bytes", "bytes", "bytes that this GPU sends in a call, by the shapes of the exchanges; empty where they "
        "are not known", "sent MB", lambda rank: rank.fields.sent_bytes,
    ),
    Column(
        "least_sent_bytes", "bytes", "fewest bytes that this GPU must send in a call, given the routing", "least MB",
        lambda rank: rank.fields.least_sent_bytes,
    ),
    Column(
        "link_gb_per_s", "GB/s", "sent_bytes, or least_sent_bytes where they are not known, over communication_us",
        "GB/s", lambda rank: link_gb_per_s(rank.fields),
    ),
)

SHOWN = tuple(column for column in COLUMNS if column.name == "implementation" or column not in COLUMNS[: len(IDENTITY)])


def _notes(line: Rank) -> list[str | None]:
    """Return why no program without exchanges was timed, once for the ranks of a record."""
    parallel = line.row.record.parallel if line.row.record and line.rank == 0 else None
    return [parallel.alone_unavailable and f"not timed alone: {parallel.alone_unavailable}"] if parallel else []


render = partial(grouped, columns=SHOWN, legend=LEGEND, notes=_notes)


def of(results: Iterable[Result]) -> list[Rank]:
    """Return each GPU of each record that has its times."""
    return [
        Rank(result.row, result.record.parallel.ranks, number)
        for result in results if result.record is not None and result.record.parallel is not None
        for number in range(len(result.record.parallel.ranks))
    ]


def link_gb_per_s(fields: RankFields) -> float | None:
    sent = fields.least_sent_bytes if fields.sent_bytes is None else fields.sent_bytes
    return sent / fields.communication / 1e9 if fields.communication else None
