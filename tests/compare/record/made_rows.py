"""Invented records that took a time, the rows that reports show of them, and what the commands show of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from made_records import made_record

from xlafuse.compare.cli.main import cli
from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.record.record import Record
from xlafuse.compare.sources.row import Row
from xlafuse.compare.sources.run_source import results_of
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case

EVEN = (1.0, 1.0, 1.0, 1.0, 1.0)


def timed_record(
    case: Case, implementation: str = "xla", us: float = 100.0, *, busy: float | None = None,
    rounds: Sequence[float] = EVEN, measured: Mapping[str, Any] = {}, **fields: Any,
) -> Record:
    """Return an `ok` record of the block's work that took `us` in every phase.

    busy: the time of its kernels. rounds: a factor of the times of each round. measured: more fields of its
    measurement.
    """

    def samples(middle: float) -> list[list[float]]:
        return [[middle * 1e-6 * factor] * 5 for factor in rounds]

    phase = {"device_time": samples(us), "busy_time": samples(busy or us), "launches": 1, "records": []}
    work = {}
    if case.block in BLOCKS:
        block = BLOCKS[case.block]
        work = {"flops": block.phase_flops(case), "bytes_compulsory": block.bytes_compulsory(case)}
    measurement = {"timer": "cupti", "phases": dict.fromkeys(case.phases, phase), "wall_time": [2e-4], **measured}
    defaults = {"status": "ok", "compiler": "xla", "segment": "s1", "measurement": measurement, **work}
    return made_record(**{"case": case, "implementation": implementation, **defaults, **fields})


def rows_of(
    *records: Record, ceilings: Mapping[str, Ceilings] = {}, uncalibrated: Mapping[str, str] = {}
) -> list[Row]:
    return [result.row for result in results_of(records, ceilings, uncalibrated)]


def xlafuse(*words: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, words)))


def rows_shown(path: Path, view: str, *words: object) -> list[dict[str, Any]]:
    """Return the rows of the view's JSON."""
    result = xlafuse("inspect", path, "--view", view, "--json", *words)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["schema"], data["view"]) == ("xlafuse.rows/3", view)
    rows: list[dict[str, Any]] = data["rows"]
    return rows


def written(path: Path, out: Path, *words: object) -> str:
    """Return the text that `report` writes into the file."""
    result = xlafuse("report", path, "-o", out, *words)
    assert result.exit_code == 0, result.output
    return out.read_text()
