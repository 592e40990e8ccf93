"""A run folder's README.md: how the run was made, what it holds, and how to look at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.program import in_words
from ..base.text import printable
from ..spec.case import Case
from .record import BAD, STATUSES, Record, record_id
from .run_files import ARCHIVES, archived
from .run_folder import read_records, read_run

_COMMAND = 200  # characters of one command; run.json has it whole
_MOST = 20  # records that a list names
_NOT_VERSIONS = ("device", "pretends", "memory_bytes", "free_bytes", "multiprocessors", "l2_bytes", "timer")


def text(folder: Path) -> str:
    """Return the README of a run. Raises RunFolderError for an unreadable run, OSError for a damaged archive."""
    run, (records, _) = read_run(folder), read_records(folder)
    missing = _missing(run, records)
    return "\n".join([
        f"# {printable(folder.resolve().name)}", "", *_summary(run, records, sum(map(len, missing.values()))), "",
        *_listed("Files", _files(folder, records)),
        *_listed("Cases measured anew", _again(run)),
        *_listed("Missing records", [f"{case}: {', '.join(names)}" for case, names in missing.items()]),
        *_listed("Records with errors", _errors(records)),
        *_listed("Machine", _machines(run, records)),
        "## Commands", "", *_commands(run), "",
        "## Look at it", "",
        "    xlafuse inspect . --view times                        # times, errors, kernels; --help lists more views",
        "    xlafuse inspect . --block NAME                        # a block's kernels; side by side: --view stages",
        "    xlafuse report . -o report.html                       # a page: findings, charts, fusion graphs, sources",
        "    xlafuse export . --to xprof --module ID -o DIR        # a record's compiler artifacts",
        "    xlafuse export . --to perfetto --block NAME -o FILE   # a call on host and GPU", "",
    ])


def _summary(run: Mapping[str, Any], records: Sequence[Record], missing: int) -> Iterator[str]:
    cases = {record.case.id for record in records}
    blocks = {record.case.block for record in records}
    where = f"compiled for {run['target']}" if run.get("target") else "run on a GPU"
    made = f"begun {str(run.get('created', '?'))[:10]} with xlafuse {run.get('xlafuse', '?')}"
    made += f", {printable(in_words(run))}" if run.get("sources") else ""
    sizes = f"{_count(len(cases), 'case')} of {_count(len(blocks), 'block')}"
    yield f"Suite `{run.get('suite')}`: {sizes}, {where}, {made}."
    counts = Counter(record.status for record in records)
    listed = ", ".join(f"{counts[status]} `{status}`" for status in STATUSES if counts[status]) or "none"
    timing = run.get("plan", {}).get("timing", {})
    if timing.get("main_only"):
        modes = ", ".join(map(str, timing.get("modes", ())))
        yield f"Main cases are also timed in the modes {modes}, and have timelines and, where it was counted, traffic."
    planned = f" of {len(records) + missing} planned" if missing else ""
    yield f"Records: {len(records)}{planned}; {listed}."


def _again(run: Mapping[str, Any]) -> list[str]:
    return [
        f"{printable(entry['case'])}: {printable(entry['reason'])} ({str(entry.get('at', '?'))[:10]}, "
        f"{printable(in_words(entry))})"
        for entry in run.get("again", ())
    ]


def _files(folder: Path, records: Iterable[Record]) -> list[str]:
    """Return the numbers of kept files, and of those that records name and that are not there."""
    records = list(records)
    found = []
    for kind, what, named in (
        ("graphs", "fusion graphs", sum(record.graph is not None for record in records)),
        ("traces", "timelines", sum(bool(record.trace and record.trace.file) for record in records)),
        ("dumps", "compiler artifacts", sum(record.dumps is not None for record in records)),
    ):
        kept = len(archived(folder, kind))
        if kept:
            found.append(f"`{ARCHIVES[kind]}`: {what} of {_count(kept, 'record')}")
        if named > kept:
            found.append(f"not kept: {what} of {_count(named - kept, 'record')}")
    if traffic := sum(record.traffic is not None for record in records):
        found.append(f"traffic was counted for {_count(traffic, 'record')}")
    return found


def _missing(run: Mapping[str, Any], records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the implementations of planned records that were not written, by case."""
    there = {record.id for record in records}
    found: dict[str, list[str]] = {}
    for entry in run.get("plan", {}).get("work", []):
        case = Case.from_json(entry["case"])
        for name in entry["implementations"]:
            if record_id(case, name) not in there:
                found.setdefault(case.id, []).append(name)
    return found


def _errors(records: Iterable[Record]) -> list[str]:
    return [
        f"{record.id}: {record.status}: {printable(record.detail or '', 160)}"
        for record in records if record.status in BAD
    ]


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    rest = [f"- and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return [f"## {title}", "", *(f"- {line}" for line in lines[:_MOST]), *rest, ""]


def _machines(run: Mapping[str, Any], records: Iterable[Record]) -> list[str]:
    """Return a line for the segments (stretches on one machine, each with its own ceilings) of equal versions."""
    counts = Counter(record.segment for record in records)
    found: dict[str, list[Mapping[str, Any]]] = {}
    for segment in run.get("segments", []):
        environment = segment.get("environment", {})
        found.setdefault(f"{_machine(environment)}; {_versions(environment)}", []).append(segment)
    lines = []
    for facts, segments in found.items():
        ids = ", ".join(str(segment["id"]) for segment in segments)
        count = sum(counts[segment["id"]] for segment in segments)
        lines.append(f"{facts} ({_count(count, 'record')} of segment{'s' * (len(segments) > 1)} {ids})")
    return lines


def _machine(environment: Mapping[str, Any]) -> str:
    host = environment.get("host", {})
    devices = {worker["device"] for worker in environment.get("workers", {}).values() if worker.get("device")}
    driver = next((word for word in str(host.get("nvidia_driver") or "").split() if word[0].isdigit()), None)
    facts = [*sorted(devices - {"cpu"}), f"{host.get('cores', '?')} CPU cores", driver and f"driver {driver}"]
    return printable(", ".join(filter(None, facts)))


def _versions(environment: Mapping[str, Any]) -> str:
    found: dict[str, set[str]] = {}
    for worker in environment.get("workers", {}).values():
        for name, value in worker.items():
            if value is not None and name not in _NOT_VERSIONS:
                found.setdefault(name, set()).add(str(value))
    return printable(", ".join(f"{name} {'/'.join(sorted(values))}" for name, values in found.items()), 600)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _commands(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the run's command, or those of the runs that were merged. A resumed run keeps its first command."""
    for command in str(run.get("command", "xlafuse run")).split(" ; "):
        cut = command if len(command) <= _COMMAND else f"{command[:_COMMAND]} ..."
        yield f"    {printable(cut, _COMMAND + 10)}"
