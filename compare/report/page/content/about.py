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
    found = {device for r in source.shown if r.time_us is not None and (device := r.row.checked("device"))}
    if found:
        return printable(", ".join(sorted(found)), 100)
    return printable(", ".join(sorted({target for r in source.shown if (target := r.row.target)})), 100)


def _segment(segment: Mapping[str, Any]) -> dict[str, Any]:
    environment = _mapping(segment.get("environment"))
    ceilings = _mapping(segment.get("ceilings"))
    return {
        "id": printable(str(segment.get("id", "?")), 40), "started": printable(str(segment.get("started", "")), 40),
        "groups": [
            ("host", _pairs(_mapping(environment.get("host")))),
            *((printable(str(role), 40), _pairs(_mapping(found)))
              for role, found in _mapping(environment.get("workers")).items()),
            ("ceilings measured on this GPU", list(_ceilings(ceilings))),
        ],
    }


def _ceilings(ceilings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for mix, rate in _numbers(ceilings.get("streams")):
        yield f"memory bandwidth, {mix} reads to writes", f"{number(rate / 1e12)} TB/s"
    for dtype, rate in _numbers(ceilings.get("products")):
        yield f"matrix product, {dtype}", f"{number(rate / 1e12)} TFLOP/s"
    for name, seconds in _numbers(ceilings.get("launch")):
        where = {"host_s": "time on the host", "device_s": "time on the device"}.get(name, name)
        yield f"empty kernel, {where}", f"{number(seconds * 1e6)} µs"


def _numbers(found: Any) -> Iterator[tuple[str, float]]:
    for name, value in _mapping(found).items():
        if isinstance(value, int | float):
            yield printable(str(name), 40), float(value)


def _pairs(found: Mapping[str, Any]) -> Pairs:
    return [
        (printable(str(name), 60), printable(str(value), _LONGEST)) for name, value in found.items()
        if value is not None and not isinstance(value, dict | list)
    ]


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}
