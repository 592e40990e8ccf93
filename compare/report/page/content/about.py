"""The environment page: the run's command, machine, versions and ceilings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ....base.text import number, printable
from ....plan.timing_modes import MAIN
from ....sources.source import Source

Pairs = list[tuple[str, str]]
_LONGEST = 300


def values(source: Source) -> dict[str, Any]:
    """Return values for templates/front.html; malformed fields of run.json are left out."""
    data, rows = source.run or {}, [result.row for result in source.shown]
    statuses = Counter(row.status for row in rows)
    segments = data.get("segments")
    return {
        "facts": _pairs({k: data.get(k) for k in ("command", "created", "suite", "target", "xlafuse")}),
        "segments": [_segment(each) for each in segments if isinstance(each, Mapping)]
        if isinstance(segments, list) else [],
        "statuses": [(printable(name, 20), count) for name, count in statuses.most_common()],
        "timers": sorted({row.timer for row in rows if row.timer}),
        "rounds": sorted({len(r.rounds.times[MAIN]) for r in source.shown if MAIN in r.rounds.times}),
        "not_ok": [
            {"id": printable(r.id, 200), "status": printable(r.row.status, 20),
             "detail": printable(r.row.detail or "", 1000)}
            for r in source.shown if r.row.status not in ("ok", "compiled")
        ],
        "device": device(source),
    }


def device(source: Source) -> str:
    """Return the names of the devices that were measured, or else of the compile target."""
    measured = {r.row.checked("device") for r in source.shown if r.time_us is not None} - {None, ""}
    targets = {result.row.target for result in source.shown} - {None, ""}
    return printable(", ".join(sorted(map(str, measured or targets))), 100)


def _segment(segment: Mapping[str, Any]) -> dict[str, Any]:
    environment, ceilings = _mapping(segment.get("environment")), _mapping(segment.get("ceilings"))
    workers = _mapping(environment.get("workers"))
    return {
        "id": printable(str(segment.get("id", "?")), 40), "started": printable(str(segment.get("started", "")), 40),
        "groups": [
            ("host", _pairs(environment.get("host"))),
            *((printable(str(role), 40), _pairs(worker)) for role, worker in workers.items()),
            ("ceilings measured on this GPU", list(_ceilings(ceilings))),
        ],
    }


def _ceilings(ceilings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    places = {"host_s": "time on the host", "device_s": "time on the device"}
    for kind, scale, unit, words in (
        ("streams", 1e-12, "TB/s", "memory bandwidth, {} reads to writes"),
        ("products", 1e-12, "TFLOP/s", "matrix product, {}"), ("launch", 1e6, "µs", "empty kernel, {}"),
    ):
        for name, value in _mapping(ceilings.get(kind)).items():
            if isinstance(value, int | float):
                yield words.format(places.get(name, printable(str(name), 40))), f"{number(value * scale)} {unit}"


def _pairs(values: Any) -> Pairs:
    return [
        (printable(str(name), 60), printable(str(value), _LONGEST)) for name, value in _mapping(values).items()
        if value is not None and not isinstance(value, dict | list)
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
