"""Rows: each value is right, or None where it is not known."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from made_records import append_malformed, made_record, measurement_of, without_kernel_times
from made_rows import rows_of, timed_record

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.plan import paired_rounds
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import STATUSES, Record
from xlafuse.compare.record.record_fields import (
    DeviceRecord,
    KernelsOfPhase,
    PeakMemory,
    TimelineFields,
    TimesOfPhase,
)
from xlafuse.compare.report import table
from xlafuse.compare.report.columns import as_data
from xlafuse.compare.report.graph_views import Shown
from xlafuse.compare.report.views import outline
from xlafuse.compare.sources.run_source import ceilings_of, open_run, results_of, segments_that_disagree
from xlafuse.compare.sources.source import only
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case

CEILINGS = {
    "streams": {"1:1": 4.0e12, "2:1": 4.2e12, "1:0": 4.4e12, "0:1": 3.0e12, "3:1": 4.3e12},
    "products": {"bfloat16": 8e14, "float16": 7e14, "float32-tf32": 4e14, "float32-ieee": 5e13, "float8_e4m3fn": 1e15},
}
RUN = {"segments": [{"id": "s1", "ceilings": CEILINGS}, {"id": "s2", "ceilings": None}]}
SEGMENTS = ceilings_of(RUN)


def case_of(block: str, name: str, direction: str = "fwd", dtype: str | None = None, precision: str = "ieee") -> Case:
    return next(
        c for c in BLOCKS[block].cases("full")
        if c.name == name and c.direction == direction and dtype in (None, c.dtype) and c.precision == precision
    )


def timed(seconds: list[list[float]], launches: int = 1) -> TimesOfPhase:
    records = [DeviceRecord(f"k{i}", i * 1e-6, (i + 1) * 1e-6) for i in range(launches)]
    return TimesOfPhase(device_time=seconds, busy_time=seconds, launches=launches, records=records, poisoned=True)


def measured(case: Case, implementation: str = "xla", microseconds: float = 100.0, **fields: Any) -> Record:
    """An `ok` record with the given device time in every phase, in two rounds."""
    more = {"wall_time": [2e-4, 1e-4, 3e-4], "peak_memory": dict.fromkeys(case.phases, {"bytes": 1000})}
    return timed_record(case, implementation, microseconds, rounds=(1.0, 1.0), measured=more, **fields)


def values(records: list[Record], uncalibrated: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the values of each record by column."""
    return as_data(rows_of(*records, ceilings=SEGMENTS, uncalibrated=uncalibrated or {}))


def row_of(record: Record) -> dict[str, Any]:
    return values([record])[0]


def test_time_is_the_median_of_all_samples_of_all_rounds() -> None:
    case = case_of("softmax", "gpt2-scores")
    subject = measured(case)
    subject.times["forward"] = timed([[5e-3, 1e-6, 2e-6, 9e-6], [3e-6, 4e-6]])  # 5 ms: a first call
    row = row_of(subject)
    assert row["device_time_us"] == row["forward_us"] == pytest.approx(3.0)
    assert row["device_time_us_spread"] == pytest.approx(1.0)  # quartiles of 1 2 3 4 9 are 2 and 4
    assert row["backward_us"] is None
    assert row["wall_time_us"] == pytest.approx(200.0)
    assert row["timer"] == "cupti"


def test_train_time_is_the_sum_of_its_phases_and_the_spread_is_that_of_whole_calls() -> None:
    case = case_of("softmax", "gpt2-scores", "train")
    subject = measured(case)
    measurement_of(subject).phases = {
        "forward": timed([[9e-6, 1e-6, 2e-6, 3e-6, 4e-6]], launches=2),
        "backward": timed([[1e-3, 4e-6, 3e-6, 2e-6, 1e-6]], launches=3),
    }
    row = row_of(subject)
    assert (row["forward_us"], row["backward_us"]) == (pytest.approx(2.5), pytest.approx(2.5))
    assert row["device_time_us"] == pytest.approx(5.0)
    assert row["device_time_us_spread"] == pytest.approx(0.0)  # each call took 5
    assert (row["kernels"], row["kernel_source"]) == (5, "measured launches")


def test_cuda_events_give_no_launches_and_no_gaps() -> None:
    kernels = {"forward": {"launches": 7, "bytes_declared": 10, "provenance": {}}}
    subject = measured(case_of("softmax", "gpt2-scores"), "eager", kernels=kernels)
    assert row_of(subject)["kernel_source"] == "measured launches"
    measurement_of(subject).timer = "cuda-events"
    without_kernel_times(subject)
    row = row_of(subject)
    assert row["device_time_us"] == pytest.approx(100.0)
    assert (row["kernels"], row["kernel_source"]) == (7, "compiler")
    assert (row["busy_time_us"], row["launch_gap"]) == (None, None)
    subject.kernels = {}
    assert row_of(subject)["kernels"] is None


def test_a_missing_phase_leaves_no_sum() -> None:
    subject = measured(case_of("softmax", "gpt2-scores", "train"))
    del subject.times["backward"]
    measurement_of(subject).peak_memory = {"forward": PeakMemory(1000)}
    row = row_of(subject)
    assert row["forward_us"] is not None
    for name in ("device_time_us", "device_time_us_spread", "busy_time_us", "rate", "peak_memory_bytes", "kernels"):
        assert row[name] is None, name


def test_an_unmeasured_peak_has_a_reason_and_the_planned_peak() -> None:
    case = case_of("softmax", "gpt2-scores", "train")
    subject = measured(case, trace={"file": "traces/x.json.gz"})
    row = row_of(subject)
    assert (row["peak_memory_bytes"], row["peak_memory_reason"], row["trace"]) == (1000, None, "traces/x.json.gz")
    assert row["peak_memory_planned_bytes"] is None

    def backward(planned: int | None) -> None:
        peaks = {"forward": PeakMemory(1000, 900), "backward": PeakMemory(None, planned, "no room")}
        measurement_of(subject).peak_memory = peaks

    backward(planned=900)
    subject.trace = TimelineFields(unavailable="the worker died")
    row = row_of(subject)
    assert (row["peak_memory_bytes"], row["peak_memory_reason"]) == (None, "no room")
    assert row["peak_memory_planned_bytes"] == 1000 and row["trace"] is None  # of the phase that was measured
    backward(planned=2_500_000)
    assert "2.50 p" in table.render([*rows_of(subject)])
    backward(planned=None)  # PyTorch's
    assert row_of(subject)["peak_memory_planned_bytes"] is None


def test_too_few_samples_have_no_spread() -> None:
    subject = measured(case_of("softmax", "gpt2-scores"))
    subject.times["forward"] = timed([[1e-6, 2e-6, 3e-6]])
    assert row_of(subject)["device_time_us_spread"] is None


@pytest.mark.parametrize("status", [s for s in STATUSES if s != "ok"])
def test_only_ok_has_times(status: str) -> None:
    row = row_of(measured(case_of("softmax", "gpt2-scores"), status=status, detail="why"))
    numbers = (
        "device_time_us", "wall_time_us", "busy_time_us", "rate", "share_of_ceiling", "peak_memory_bytes", "timer",
    )
    assert {row[name] for name in numbers} == {None}
    assert (row["status"], row["detail"]) == (status, "why")


def test_without_a_device_clock_only_wall_time_is_known() -> None:
    subject = measured(case_of("softmax", "gpt2-scores"))
    measurement_of(subject).phases = measurement_of(subject).timer = None
    row = row_of(subject)
    assert (row["device_time_us"], row["timer"], row["kernels"]) == (None, None, None)
    assert row["wall_time_us"] == pytest.approx(200.0)


def test_a_skipped_record_is_a_row_of_nulls() -> None:
    case = case_of("attention", "llama-8b", "train")
    row = row_of(made_record(case=case, implementation="flex", compiler="eager", status="skipped", detail="no GPU"))
    assert row["bytes_compulsory"] is row["kernels"] is row["max_error"] is row["provenance"] is None


@pytest.mark.parametrize(
    ("block", "name", "direction", "mixes"),
    [
        ("vector_add", "64Mi", "fwd", {"2:1": 1.0}),
        ("gelu", "llama-8b", "fwd", {"1:1": 1.0}),
        ("gelu", "llama-8b", "train", {"1:1": 0.4, "2:1": 0.6}),  # reads x, dy, x and writes y, dx: 3:2
        ("rmsnorm", "llama-8b", "fwd", {"1:1": 1.0}),
    ],
)
def test_bandwidth_is_compared_with_a_stream_of_the_same_mix(
    block: str, name: str, direction: str, mixes: dict[str, float]
) -> None:
    case = case_of(block, name, direction)
    row = row_of(measured(case))
    rate = sum(BLOCKS[block].bytes_compulsory(case).values()) / (len(case.phases) * 100e-6)
    ceiling = sum(share * CEILINGS["streams"][mix] for mix, share in mixes.items())
    assert (row["rate"], row["rate_unit"]) == (pytest.approx(rate / 1e9), "GB/s")
    assert row["share_of_ceiling"] == pytest.approx(rate / ceiling, rel=1e-4)  # rmsnorm also reads a weight


@pytest.mark.parametrize(
    ("block", "name", "dtype", "precision", "product"),
    [
        ("attention", "gpt2", "bfloat16", "ieee", "bfloat16"),
        ("attention", "gpt2-fp16", "float16", "ieee", "float16"),
        ("attention", "gpt2-fp32", "float32", "tf32", "float32-tf32"),
        ("matmul_fp8", "square-8k", "bfloat16", "ieee", "float8_e4m3fn"),
    ],
)
def test_flops_are_compared_with_a_product_of_the_same_kind(
    block: str, name: str, dtype: str, precision: str, product: str
) -> None:
    case = case_of(block, name, dtype=dtype, precision=precision)
    row = row_of(measured(case))
    rate = BLOCKS[block].flops(case.sizes) / 100e-6
    assert (row["rate"], row["rate_unit"]) == (pytest.approx(rate / 1e12), "TFLOP/s")
    assert row["share_of_ceiling"] == pytest.approx(rate / CEILINGS["products"][product])


def test_float32_products_are_compared_with_the_fastest_of_their_accuracy() -> None:
    """Three TF32 products take the place of an IEEE product."""
    case = case_of("attention", "gpt2-fp32", dtype="float32")
    rate = BLOCKS["attention"].flops(case.sizes) / 100e-6
    assert row_of(measured(case))["share_of_ceiling"] == pytest.approx(3 * rate / CEILINGS["products"]["float32-tf32"])


@pytest.mark.parametrize("segment", ["s2", "s3", None])
def test_a_ceiling_of_another_segment_does_not_count(segment: str | None) -> None:
    row = row_of(measured(case_of("gelu", "llama-8b"), segment=segment))
    assert row["rate"] is not None
    assert row["share_of_ceiling"] is None


def test_ratios_stay_within_a_segment_and_a_timer() -> None:
    case = case_of("gelu", "llama-8b")
    records = [
        measured(case, "xla", 100), measured(case, "triton", 50), measured(case, "cuda", 50, segment="s2"),
        measured(case, "eager", 200), measured(case, "inductor", 10, status="failed", detail="why"),
    ]
    measurement_of(records[3]).timer = "events"
    found = values(records)
    assert [r["time_vs_xla"] for r in found] == [1.0, pytest.approx(0.5), None, None, None]


def test_workers_with_different_clocks_are_not_compared() -> None:
    case = case_of("gelu", "llama-8b")
    records = [measured(case, "xla"), measured(case, "xla-remat", 50), measured(case, "triton", 50, compiler="triton")]
    run = {"segments": [{"id": "s1", "clocks": {"torch": 1.0e-3, "xla": 1.02e-3}}]}
    assert segments_that_disagree(run) == {"s1": "the workers' clocks differ by 2.0%"}
    agreeing = {"segments": [{"id": "s1", "clocks": {"torch": 1.0e-3, "xla": 1.001e-3}}]}
    assert segments_that_disagree(agreeing) == {}
    found = values(records, {"s1": "they disagree"})
    assert [r["time_vs_xla"] for r in found] == [1.0, pytest.approx(0.5), None]


def test_a_verdict_comes_from_rounds() -> None:
    case = case_of("softmax", "gpt2-scores", "train")
    records = [measured(case, "xla"), measured(case, "triton", 50)]
    for subject in records:
        for times in subject.times.values():
            times.device_time = times.device_time * 2 + [[1.0] * 5]  # one round of five went astray in both
    assert paired_rounds.rounds_of(records[1]).times["cold"] == pytest.approx([1e-4] * 4 + [2.0])
    found = values(records)
    assert found[0]["verdict_vs_xla"] is None
    assert found[1]["verdict_vs_xla_word"] == "faster"
    assert found[1]["verdict_vs_xla_low"] == pytest.approx(0.5)
    assert found[1]["verdict_vs_xla_high"] == pytest.approx(0.5 ** (1 / 5))  # four of five rounds drawn astray
    for subject in records:  # two rounds decide nothing
        for times in subject.times.values():
            times.device_time = times.device_time[:2]
    found = values(records)
    assert found[1]["time_vs_xla"] == pytest.approx(0.5) and found[1]["verdict_vs_xla"] is None


def test_the_error_shown_is_the_one_nearest_to_its_tolerance() -> None:
    errors = [
        {"name": "y", "error": 0.5, "tolerance": 1.0}, {"name": "d_x", "error": 0.09, "tolerance": 0.1},
        {"name": "d_weight", "error": 0.6, "tolerance": 2.0},
    ]
    row = row_of(measured(case_of("gelu", "llama-8b"), errors=errors))
    assert (row["max_error"], row["tolerance"]) == (0.09, 0.1)
    for worse in (math.inf, math.nan):
        more = [*errors, errors[0] | {"error": worse}]
        row = row_of(measured(case_of("gelu", "llama-8b"), errors=more))
        assert not math.isfinite(row["max_error"])


def test_listed_kernels_count_where_nothing_was_launched() -> None:
    kernels = {"forward": {"launches": 4, "bytes_declared": 9, "provenance": {"replayed": 2}}}
    subject = made_record(case_of("gelu", "llama-8b"), "xla", "xla", "compiled", kernels=kernels)
    row = row_of(subject)
    assert (row["kernels"], row["kernel_source"], row["provenance"]) == (4, "compiler", "replayed")
    subject.kernels["forward"] = KernelsOfPhase(None, 9, {"replayed": 2, "": 1, "not autotuned": 1})
    row = row_of(subject)
    assert (row["kernels"], row["provenance"]) == (None, "replayed 2, unknown 1, not autotuned 1")


def test_products_of_both_phases_are_listed_by_library() -> None:
    phases = ({"cuBLAS": ["qkv", "out"], "triton": ["down"]}, {"cuBLAS": ["down", "out"]})
    kernels: dict[str, dict[str, Any]] = {
        phase: {"launches": 4, "bytes_declared": 9, "provenance": {}, "products": found}
        for phase, found in zip(("forward", "backward"), phases, strict=True)
    }
    subject = made_record(case_of("gelu", "llama-8b"), "triton", "triton", "compiled", kernels=kernels)
    assert row_of(subject)["products"] == "cuBLAS qkv, out, down; triton down"
    assert row_of(measured(case_of("gelu", "llama-8b")))["products"] is None


def write(folder: Path, *records: Record) -> Path:
    run_folder.create(folder, RUN)
    for each in records:
        run_folder.append(folder, each)
    return folder


def test_malformed_lines_cost_only_their_own_records(tmp_path: Path) -> None:
    case = case_of("gelu", "llama-8b")
    folder = write(tmp_path / "run", measured(case, "xla"))
    strange: dict[str, dict[str, Any]] = {
        "a": {"compile_s": "soon"}, "b": {"measurement": [1]}, "c": {"errors": [{}]},
        "d": {"kernels": {"forward": "none"}}, "e": {"detail": ["x"]},
    }
    for name, fields in strange.items():
        append_malformed(folder, measured(case, name), **fields)
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"schema": 2, "status"\n[]\n')
    run_folder.append(folder, measured(case, "triton"))
    found = open_run(folder)
    assert [result.name for result in found.results] == ["xla", "triton"]
    assert len(found.warnings) == 7
    assert any("records.jsonl:7" in warning for warning in found.warnings)
    for name in "abcde":
        assert any(f"gelu/llama-8b/bf16/fwd/{name}: " in warning for warning in found.warnings)


@pytest.mark.parametrize(
    "segments",
    ["s1", ["s1"], *([{"id": "s1", "ceilings": {"streams": s}}] for s in ({"1-1": 1}, {"0:0": 1}, {"1:1": "fast"}))],
)
def test_malformed_ceilings_cost_only_the_share(tmp_path: Path, segments: Any) -> None:
    folder = write(tmp_path / "run", measured(case_of("gelu", "llama-8b")))
    (folder / "run.json").write_text(json.dumps({"segments": segments}))
    found = open_run(folder)
    (row,) = (result.row for result in found.results)
    assert row.share_of_ceiling is None and row.rate is not None
    assert len(found.warnings) == 1 and "run.json" in found.warnings[0]


def test_json_is_strict(tmp_path: Path) -> None:
    errors = [{"name": "y", "error": math.inf, "tolerance": 0.1}]
    subject = measured(case_of("gelu", "llama-8b"), status="wrong", detail="y: error inf", errors=errors)
    source = open_run(write(tmp_path / "run", subject))
    text = outline("times", source, Shown()).json()

    def refuse(constant: str) -> None:
        raise AssertionError(f"not JSON: {constant}")

    (row,) = json.loads(text, parse_constant=refuse)["rows"]
    assert row["max_error"] is None
    assert {"block", "case", "direction", "dtype", "implementation", "status", "detail", "checked_device", "kernels",
            "device_time_us", "wall_time_us", "compile_s", "max_error", "tolerance", "bytes_compulsory"} <= set(row)


def test_an_unknown_block_is_refused() -> None:
    found = results_of([measured(case_of("gelu", "llama-8b"))], SEGMENTS, {})
    assert only(found, {"block": []}) == only(found, {"block": ["gelu"]}) == found
    with pytest.raises(UsageError, match="no block 'gelo' among these records; did you mean gelu"):
        only(found, {"block": ["gelo"]})
    with pytest.raises(UsageError, match="no block 'geglu' among these records; blocks: gelu$"):
        only(found, {"block": ["geglu"]})  # a block that there is, but not here
