"""A run at a glance: a row a block, for inference and for training, with measured or recorded times."""

from __future__ import annotations

from typing import Any

import pytest
from made_records import made_record, without_kernel_times
from made_rows import rows_of, timed_record

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.predict import predictor
from xlafuse.compare.record.record import Record
from xlafuse.compare.report import at_a_glance, matrix
from xlafuse.compare.report.strongest_findings import every_finding
from xlafuse.compare.sources.row import Row
from xlafuse.compare.sources.run_source import open_run
from xlafuse.compare.sources.source import Source
from xlafuse.compare.spec.blocks import BLOCKS


@pytest.fixture(scope="module")
def committed_tour() -> Source:
    return open_run(PROJECT / "tests" / "data" / "runs" / "tour")


def made(block: str, direction: str, implementation: str, **fields: Any) -> Record:
    case = next(case for case in BLOCKS[block].cases("tour") if case.direction == direction)
    compulsory = BLOCKS[block].bytes_compulsory(case)
    kernels = {
        phase: {"launches": 3, "bytes_declared": 2 * compulsory[phase], "provenance": {}} for phase in case.phases
    }
    fields = {"status": "compiled", "target": "h200", "bytes_compulsory": compulsory, "kernels": kernels} | fields
    return made_record(case, implementation, implementation, **fields)


def shown(*records: Record) -> tuple[str, list[Row]]:
    found = rows_of(*records)
    return at_a_glance.render(found, "H200"), found


def line(text: str, start: str, which: int = 0) -> list[str]:
    return [each for each in text.splitlines() if each.startswith(start)][which].split()


def test_a_compiled_block_shows_recorded_times_of_the_same_kernels() -> None:
    text, found = shown(
        made("gelu", "fwd", "xla", recorded={"device_time_us": 87.0}),
        made("gelu", "fwd", "triton", recorded={"unavailable": "other kernels"}),
        made("gelu", "train", "triton", recorded={"device_time_us": 131.0}),
        made("rope", "fwd", "xla", status="failed", recorded=None),
    )
    assert at_a_glance.fits(found)
    assert line(text, "gelu") == ["gelu", "3", "2.0x", "87.0", "3", "2.0x", at_a_glance.NO_TIME]
    assert line(text, "gelu", 1) == ["gelu", "6", "2.0x", "131"]
    assert line(text, "rope") == ["rope", "failed"]
    assert "recorded on an H200" in text and "2 of 3" in text and "-: no time (1 no graph with kernels)" in text


def test_the_tour_has_a_recorded_or_a_marked_predicted_time_or_a_reason_in_each_cell(committed_tour: Source) -> None:
    rows = [result.row for result in committed_tour.results]
    text = at_a_glance.render(rows, "H200")
    untimed = [row for row in rows if row.recorded_time_us is None]
    predicted = [row for row in untimed if row.predicted is not None and row.predicted.us is not None]
    assert len(predicted) >= 9 and text.count("~") == len(predicted) + 2  # two in the legend
    left = len(untimed) - len(predicted)
    assert (f"{at_a_glance.NO_TIME}: no time ({left} " in text) == bool(left)
    both = [(row.predicted, row.recorded_time_us) for row in rows if row.recorded_time_us is not None]
    assert all(time is not None and time.us != recorded for time, recorded in both)


def test_a_cell_without_any_time_says_which_kernels_are_not_predicted(
    committed_tour: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor, "VALIDATED_ON", ())
    rows = [result.row for result in open_run(committed_tour.path).results]
    text = at_a_glance.render(rows, "H200")
    assert "~:" not in text and "no time (10 nothing is fitted for h200)" in text


def test_the_matrix_of_a_compiled_run_has_kernels_with_recorded_or_marked_times(committed_tour: Source) -> None:
    rows = [result.row for result in committed_tour.results if result.row.block == "softmax"]
    assert [text for text in ("1 · 53.1", "1 · ~", "2 · ~") if text not in matrix.render(rows)] == []
    assert "·" not in matrix.render(shown(made("gelu", "fwd", "xla"))[1])


def test_a_gpu_without_recorded_or_predicted_times_says_why(
    committed_tour: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor, "VALIDATED_ON", ())
    text = at_a_glance.render([result.row for result in open_run(committed_tour.path).results], None)
    assert "~" not in text and "-: nothing is timed (45 nothing is fitted for h200)" in text


def test_a_timed_block_shows_its_own_times() -> None:
    def timed(implementation: str, us: float) -> Record:
        compiled = made("gelu", "fwd", implementation)
        return timed_record(compiled.case, implementation, us, kernels=compiled.kernels)

    text, _ = shown(timed("xla", 90.0), timed("triton", 50.0))
    assert line(text, "gelu")[1:] == ["1", "2.0x", "90.0", "1", "2.0x", "50.0*"]
    assert "recorded" not in text


def test_a_time_without_known_kernels_is_shown() -> None:
    """CUDA events time eager PyTorch and see no kernel."""
    eager = timed_record(made("gelu", "fwd", "eager").case, "eager", 70.0, measured={"timer": "cuda-events"})
    without_kernel_times(eager)
    text, _ = shown(eager)
    assert line(text, "gelu")[1:] == ["?", "?", "70.0"]


def test_several_cases_of_a_block_or_many_implementations_do_not_fit() -> None:
    names = ("xla", "inductor", "triton", "cuda", "library")
    assert not at_a_glance.fits(rows_of(*(made("gelu", "fwd", name) for name in names)))
    assert not at_a_glance.fits(rows_of(made("gelu", "fwd", "xla"), made("gelu", "fwd", "xla")))


def test_the_worth_of_a_finding_from_predicted_times_is_marked(committed_tour: Source) -> None:
    found = every_finding(committed_tour)
    assert any(finding.predicted for finding in found)
    assert all(("~" in finding.worth) == finding.predicted for finding in found)
    assert all("~" in finding.headline for finding in found if finding.predicted)
