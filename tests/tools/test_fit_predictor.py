"""The predictor is fitted to measured kernels, and validated with kernels of blocks that it did not see."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools import fit_predictor
from tools.fit_predictor import Call, Predicted, Samples, calls, distinct, folds, launches, summary
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph.analyse.call_time import span_us
from xlafuse.compare.graph.model import FusionGraph, Kernel, Launch

SAMPLES = PROJECT / "tests" / "data" / "predict" / "samples.npz"


@pytest.fixture(scope="module")
def samples() -> Samples:
    """Some hundred kernels of a run on an H200, at most 60 of a block."""
    with np.load(SAMPLES) as file:
        arrays = dict(file)
    matrix = arrays.pop("matrix").astype(np.float32)
    return Samples(matrix=matrix, compiled=matrix, **arrays)


def test_a_refit_has_intervals_that_hold_for_blocks_that_it_did_not_see(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightgbm")
    shapes = {name: shape | {"num_iterations": 40} for name, shape in fit_predictor.SHAPES.items()}
    monkeypatch.setattr(fit_predictor, "SHAPES", shapes)
    monkeypatch.setattr(fit_predictor, "INNER_FOLDS", 3)
    found = np.full((len(samples), 3), np.nan)
    for left_out in folds(samples.block, 3):
        found[left_out] = fit_predictor._left_out(samples, left_out)[0]
    score = summary(distinct(Predicted(samples, *found.T)))
    assert 0.6 < score["coverage"] < 0.95
    assert score["median"] < 0.25 and score["time_predicted"] > 0.5


def test_exported_trees_give_what_lightgbm_gives() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    random = np.random.default_rng(0)
    rows = random.normal(size=(400, 4)).astype(np.float32)
    rows[random.random(400) < 0.3, 0] = np.nan
    target = np.nan_to_num(rows[:, 0], nan=2.0) + rows[:, 1] * rows[:, 2]
    options = {"num_leaves": 15, "min_data_in_leaf": 5, "verbose": -1, "num_threads": 1}
    model = lightgbm.train(options, lightgbm.Dataset(rows, target), 10)
    others = random.normal(size=(50, 4)).astype(np.float32)
    others[::3] = np.nan
    np.testing.assert_allclose(fit_predictor.exported(model)(others), model.predict(others), rtol=1e-5, atol=1e-6)


def test_a_block_is_never_on_both_sides_of_a_split(samples: Samples) -> None:
    left_out = folds(samples.block, 4)
    assert np.sum(left_out, axis=0).tolist() == [1] * len(samples)
    for mask in left_out:
        assert not set(samples.block[mask]) & set(samples.block[~mask])


def few(samples: Samples, **fields: Any) -> Samples:
    """Return two kernels of one call, 100 and 300 us long."""
    chosen = samples[np.array([0, 1])]
    given = {"time_us": np.array([100.0, 300.0]), "launches": np.ones(2), "key": np.array([1, 2]),
             "call": np.array(["run call"] * 2), **fields}
    return replace(chosen, **given)


def test_a_kernel_without_a_prediction_counts_as_wrong_by_its_whole_time(samples: Samples) -> None:
    predicted = Predicted(few(samples), np.array([110.0, np.nan]), np.array([90.0, np.nan]), np.array([120.0, np.nan]))
    found = summary(distinct(predicted))
    assert found["median"] == pytest.approx(0.55) and found["by_time"] == pytest.approx((10 + 300) / 400)
    assert found["time_predicted"] == 0.25 and found["coverage"] == 1
    assert calls(predicted)["median"] == pytest.approx(1 - 110 / 400, abs=1e-3)


def test_equal_kernels_count_once_and_short_ones_do_not(samples: Samples) -> None:
    same = few(samples, key=np.array([1, 1]))
    times = np.array([100.0, 300.0])
    assert summary(distinct(Predicted(same, times, times, times)))["kernels"] == 1
    short = few(samples, launches=np.array([1.0, 100.0]))
    assert distinct(Predicted(short, times, times, times)).samples.time_us.tolist() == [100]


def test_a_compile_without_the_gpu_does_not_tell_the_kernel_of_a_library() -> None:
    launch = Launch(grid=(1, 1, 1), config={"num_warps": 4})
    product = Kernel("custom-call.1", "gemm", runtime_name="nvjet_sm90", launch=launch, facts={"with": {"[memset]": 1}})
    fusion = Kernel("loop_fusion.1", "elementwise", runtime_name="loop_fusion_1", launch=launch)
    own = Kernel("matmul_kernel", "custom", runtime_name="matmul_kernel", launch=launch)
    first, second = fit_predictor.as_compiled(FusionGraph("g", "xla", (product, fusion))).kernels or ()
    assert first.runtime_name is None and not first.facts and first.launch == Launch(config={"num_warps": 4})
    assert second.runtime_name == "loop_fusion_1" and second.launch.grid is None
    (third,) = fit_predictor.as_compiled(FusionGraph("g", "triton", (own,))).kernels or ()
    assert third.launch.grid == (1, 1, 1)


def test_a_packed_run_is_read_like_a_folder(tmp_path: Path) -> None:
    run = PROJECT / "tests" / "data" / "runs" / "h200-rmsnorm"
    with tarfile.open(tmp_path / "run.tar.xz", "w:xz") as packed:
        packed.add(run, "run")
    names = [[result.id for result in fit_predictor.results_of(path)] for path in (run, tmp_path / "run.tar.xz")]
    assert names[0] == names[1] and names[0]


def test_the_last_run_that_has_a_record_counts() -> None:
    run = PROJECT / "tests" / "data" / "runs" / "h200-rmsnorm"
    once, twice = (fit_predictor.read([run] * count, "h200") for count in (1, 2))
    assert len(once) and once.name.tolist() == twice.name.tolist()


def test_the_time_between_launches_is_the_one_that_fits_a_compilers_calls() -> None:
    def measured(gap: float, interval: float) -> list[Call]:
        found = []
        for count in range(2, 32):
            kernels = [Kernel("k", "elementwise", device_time_us=4.0)] * count
            found.append(Call(kernels, span_us(kernels, [4.0] * count, gap, interval)))
        return found

    found = launches({"xla": measured(0.5, 0.0), "inductor": measured(0.5, 60.0), "eager": measured(0.5, 60.0)[:3]})
    assert found["gap_us"] == pytest.approx(0.5) and set(found["interval_us"]) == {"xla", "inductor"}
    assert found["interval_us"]["xla"] == 0 and found["interval_us"]["inductor"] == pytest.approx(60, rel=0.2)
    told = found["calls"]["inductor"]
    assert told["launches"]["within_20"] == 1 and told["sum"]["within_20"] == 0
