"""Where a run was made: its command, machine, versions and ceilings, as words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ....base.text import number, printable
from ....plan.timing_modes import MAIN
from .reading import Run

Pairs = list[tuple[str, str]]
_LONGEST = 300


def values(run: Run) -> dict[str, Any]:
    """For templates/front.html; a field of run.json that is not as written by this version is left out."""
    data, rows = run.run, [member.row for member in run.members]
    statuses = Counter(row["status"] for row in rows)
    segments = data.get("segments")
    return {
        "facts": _pairs({k: data.get(k) for k in ("command", "created", "suite", "target", "xlafuse")}),
        "segments": [_segment(each) for each in segments if isinstance(each, Mapping)]
        if isinstance(segments, list) else [],
        "statuses": [(printable(name, 20), count) for name, count in statuses.most_common()],
        "timers": sorted({row["timer"] for row in rows if row["timer"]}),
        "rounds": sorted({len(m.rounds.times[MAIN]) for m in run.members if MAIN in m.rounds.times}),
        "not_ok": [
            {"id": printable(m.found.name, 200), "status": printable(m.row["status"], 20),
             "detail": printable(m.row["detail"] or "", 1000)}
            for m in run.members if m.row["status"] not in ("ok", "compiled")
        ],
        "device": device(run),
    }


def device(run: Run) -> str:
    """What the times are of: the devices of the records, else the target."""
    found = {str(m.row["checked"].get("device", "")) for m in run.members if m.time_us is not None and m.row["checked"]}
    if found:
        return printable(", ".join(sorted(found)), 100)
    return printable(", ".join(sorted({m.row["target"] for m in run.members if m.row["target"]})), 100)


def _segment(segment: Mapping[str, Any]) -> dict[str, Any]:
    environment = _mapping(segment.get("environment"))
    ceilings = _mapping(segment.get("ceilings"))
    return {
        "id": printable(str(segment.get("id", "?")), 40), "started": printable(str(segment.get("started", "")), 40),
        "groups": [
            ("host", _pairs(_mapping(environment.get("host")))),
            *((printable(str(role), 40), _pairs(_mapping(found)))
              for role, found in _mapping(environment.get("workers")).items()),
            ("what this GPU reaches", list(_ceilings(ceilings))),
        ],
    }


def _ceilings(ceilings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for mix, rate in _numbers(ceilings.get("streams")):
        yield f"stream, reads:writes {mix}", f"{number(rate / 1e12)} TB/s"
    for dtype, rate in _numbers(ceilings.get("products")):
        yield f"product, {dtype}", f"{number(rate / 1e12)} TFLOP/s"
    for name, seconds in _numbers(ceilings.get("launch")):
        where = {"host_s": "on the host", "device_s": "on the device"}.get(name, name)
        yield f"smallest kernel, {where}", f"{number(seconds * 1e6)} µs"


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
