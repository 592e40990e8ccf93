"""One row for each GPU of the cases that span several: times, exposed communication, overlap, and bytes over the links.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..record.record import Record
from ..record.record_fields import RankFields
from .columns import IDENTITY, Column, Row, exposed_us, row_of
from .record_values import ratio
from .table import grouped

LEGEND = (
    "time: device time of a median call on that GPU; the ranks begin a call together.",
    "exposed: time minus that of the same program without exchanges (alone). communication, compute: time in which a",
    "kernel of that kind ran. overlap: time in which both ran. slowdown: compute over compute of the program alone.",
    "sent MB: bytes that the GPU sends, by the shapes of the exchanges. least MB: bytes that it must send. GB/s: the",
    "bytes sent, or else the least, over the time of communication.",
)


def _rank(name: str) -> Any:
    return lambda values: values[1][name]


def _microseconds(name: str) -> Any:
    return lambda values: None if values[1][name] is None else values[1][name] * 1e6


def _of_record(column: Column) -> Column:
    """Return a column of IDENTITY that takes a rank's values."""
    of_record = column.value
    assert of_record is not None
    return replace(column, value=lambda values: of_record(values[0]))


COLUMNS = (
    *map(_of_record, IDENTITY),
    Column("rank", "GPU", "number of the GPU", "rank", lambda values: values[2], lambda row: str(row["rank"])),
    Column("device_time_us", "µs", "median device time of a call on this GPU", "time µs", _microseconds("device_time")),
    Column(
        "alone_us", "µs", "the same of the program whose exchanges are local stand-ins; empty where there is none",
        "alone µs", _microseconds("alone_device_time"),
    ),
    Column(
        "exposed_us", "µs", "device_time_us minus alone_us: what communication costs", "exposed µs",
        lambda values: exposed_us(values[1]),
    ),
    Column(
        "communication_us", "µs", "time in which a communication kernel or a copy between GPUs ran", "communication µs",
        _microseconds("communication"),
    ),
    Column("compute_us", "µs", "time in which any other kernel ran", "compute µs", _microseconds("compute")),
    Column("overlap_us", "µs", "time in which both ran", "overlap µs", _microseconds("overlap")),
    Column(
        "overlap_share", "share", "overlap_us over communication_us", "overlapped",
        lambda values: ratio(values[1]["overlap"], values[1]["communication"]),
    ),
    Column(
        "compute_slowdown", "ratio", "compute_us over that of the program alone", "slowdown",
        lambda values: ratio(values[1]["compute"], values[1]["alone_compute"]),
    ),
    Column(
        "sent_bytes", "bytes", "bytes that this GPU sends in a call, by the shapes of the exchanges; empty where they "
        "are not known", "sent MB", _rank("sent_bytes"),
    ),
    Column(
        "least_sent_bytes", "bytes", "fewest bytes that this GPU must send in a call, given the routing", "least MB",
        _rank("least_sent_bytes"),
    ),
    Column(
        "link_gb_per_s", "GB/s", "sent_bytes, or least_sent_bytes where they are not known, over communication_us",
        "GB/s", lambda values: link_gb_per_s(values[1]),
    ),
)


SHOWN = tuple(column for column in COLUMNS if column.name == "implementation" or column not in COLUMNS[: len(IDENTITY)])


def of(records: Iterable[Record]) -> list[Row]:
    """Return a row for each GPU of each record that has its times."""
    return [
        row_of((_Identity(record), fields, rank), COLUMNS)
        for record in records if record.parallel is not None
        for rank, fields in enumerate(record.parallel["ranks"])
    ]


def render(rows: list[Row], *, markdown: bool = False) -> str:
    """Return a table of each case and direction."""
    return grouped(rows, lambda rows: SHOWN, LEGEND, markdown=markdown)


def link_gb_per_s(fields: RankFields) -> float | None:
    sent = fields["least_sent_bytes"] if fields["sent_bytes"] is None else fields["sent_bytes"]
    return sent / fields["communication"] / 1e9 if fields["communication"] else None


class _Identity:
    """A record, as the columns of IDENTITY take it."""

    def __init__(self, record: Record) -> None:
        self.record, self.case = record, record.case
