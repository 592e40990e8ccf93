"""A comparison of two runs as JSON; docs/diff.md lists the fields."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...graph.render import diff_view
from .runs import RecordChange, RunDiff
from .times import TimeChange

SCHEMA = "xlafuse.run-diff/1"
_COMPARED = ("status", "kernels", "bytes_declared", "provenance")


def to_json(diff: RunDiff) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    return {
        "schema": SCHEMA, "before": str(diff.before), "after": str(diff.after), "tolerance": diff.tolerance,
        "fail_on": list(diff.fail_on), "regressed": [change.id for change in diff.regressed],
        "environment": [asdict(each) for each in diff.environment],
        "records": [_change(change) for change in diff.changes],
        "warnings": diff.warnings,
    }


def _change(change: RecordChange) -> dict[str, Any]:
    only = {(True, False): "before", (False, True): "after"}.get((bool(change.before), bool(change.after)))
    fusion = None
    if change.graph is not None and change.before and change.after:
        assert change.before.graph and change.after.graph
        fusion = diff_view.to_json(change.graph, change.before.graph, change.after.graph)
    return {
        "id": change.id, "only_in": only, "differs": change.differs, "regressions": list(change.regressions),
        "other_card": change.other_card or None,
        **{name: dict(zip(("before", "after"), change.pair(name), strict=True)) for name in _COMPARED},
        "times": None if change.times is None else _times(change.times),
        "fusion": fusion, "notes": list(change.notes),
    }


def _times(times: TimeChange) -> dict[str, Any]:
    return {
        "before_us": times.before_us, "after_us": times.after_us, "word": times.word,
        "refused": times.refused or None, "notes": list(times.notes),
        "ratios": {timer: asdict(speedup) for timer, speedup in (times.speedups or {}).items()},
    }
