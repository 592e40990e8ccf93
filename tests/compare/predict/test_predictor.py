"""Predicted times of kernels: their intervals, their reasons, and the kinds that have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from xlafuse.compare import targets
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Launch, SourceOp
from xlafuse.compare.predict import predictor as predicting
from xlafuse.compare.predict.features import KINDS, NAMES, Device
from xlafuse.compare.predict.predictor import (
    Calibration,
    Prediction,
    Predictor,
    Unknown,
    predicted,
    shipped,
    why,
)

SHAPE, BYTES = (8192, 8192), 2 * 8192 * 8192
X = Access("x", BYTES, shape=SHAPE, strides=(8192, 1))
Y = Access("y", BYTES, shape=SHAPE, strides=(8192, 1))
BUFFERS = tuple(Buffer(name, SHAPE, "bf16", BYTES, "input" if name == "x" else "output") for name in "xy")
LAUNCH = Launch(grid=(65536, 1, 1), block=(128, 1, 1), registers=32, shared_bytes=0, local_bytes=0)
GELU = Kernel("loop_gelu_fusion", "elementwise", source_ops=(SourceOp("mul"), SourceOp("tanh")), inputs=(X,),
              outputs=(Y,), flops=6.0 * 8192 * 8192, launch=LAUNCH)
H200 = Device.named("h200")


def graph_of(*kernels: Kernel, target: str = "h200") -> FusionGraph:
    return FusionGraph("g", "xla", kernels, BUFFERS, target=target)


def test_a_stream_is_predicted_near_its_roofline() -> None:
    (found,) = predicted(graph_of(GELU), H200)
    assert isinstance(found, Prediction)
    assert 0.8 * found.base_us < found.time_us < 1.5 * found.base_us
    assert found.low_us < found.time_us < found.high_us


def test_a_kernel_in_a_loop_takes_as_long_as_all_its_launches() -> None:
    (one,) = predicted(graph_of(GELU), H200)
    assert isinstance(one, Prediction)
    (looped,) = predicted(graph_of(replace(GELU, launches=3)), H200)
    assert isinstance(looped, Prediction) and looped.time_us > 2 * one.time_us


def test_memory_bounds_an_attention_of_one_query() -> None:
    matrix = np.zeros((2, len(NAMES)), np.float32)
    matrix[:, NAMES.index("size work")] = KINDS.index("attention")
    matrix[:, NAMES.index("size compute over memory")] = -3, 3
    assert predicting.models_of(matrix).tolist() == ["streams", "attention"]


def test_another_gpu_has_times_by_its_own_rates() -> None:
    times = [predicted(graph_of(GELU), Device.named(target))[0] for target in ("h200", "h100")]
    slower = [each.time_us for each in times if isinstance(each, Prediction)]
    assert 1.1 < slower[1] / slower[0] < 1.8  # of 4.26 and 3.06 TB/s


def test_a_kernel_without_bytes_is_unknown_and_keeps_its_place() -> None:
    found = predicted(graph_of(replace(GELU, inputs=None), GELU, replace(GELU, launches=None)), H200)
    assert [type(each) for each in found] == [Unknown, Prediction, Unknown]
    assert isinstance(found[0], Unknown) and "bytes" in found[0].reason


def test_a_kind_with_a_large_validated_error_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"elementwise": Calibration(100, 0.41, -1.0, 1.0), "elementwise by xla": Calibration(50, 0.55, -1.0, 1.0)}
    made = replace(shipped(), classes=classes)
    monkeypatch.setattr(predicting, "shipped", lambda: made)
    (found,) = predicted(graph_of(GELU), H200)
    assert found == Unknown("elementwise by xla: validated error 55%")


def test_a_kind_that_nothing_measured_is_unknown() -> None:
    (found,) = replace(shipped(), classes={}).predict(np.zeros((1, len(NAMES)), np.float32), np.ones(1))
    assert isinstance(found, Unknown) and "too few" in found.reason


def test_the_reasons_name_access_and_waves() -> None:
    transposed = replace(
        GELU, kind="copy", source_ops=(SourceOp("transpose"),), flops=0.0,
        inputs=(replace_strides(X, (1, 8192)),),
    )
    said = why(graph_of(transposed), 0, H200)
    assert said[0].startswith("roofline time and launch: ") and "times that" in said[0]
    facts = predicting._facts(dict(zip(NAMES, row_of(transposed), strict=True)), "access")
    assert facts == ["transposed: 50% of the stream"]
    assert predicting._facts(dict(zip(NAMES, row_of(GELU), strict=True)), "launch")[0] == "31.0 waves"


def replace_strides(access: Access, strides: tuple[int, ...]) -> Access:
    return Access(access.buffer, access.bytes, shape=access.shape, strides=strides)


def row_of(kernel: Kernel) -> list[float]:
    from xlafuse.compare.predict.features import Row, rows

    (row,) = rows(graph_of(kernel), H200)
    assert isinstance(row, Row)
    return row.values


def test_a_kernel_without_numbers_has_its_reason_in_words() -> None:
    assert why(graph_of(replace(GELU, launches=None)), 0, H200) == ["the number of its launches is unknown"]


@pytest.mark.parametrize(
    ("target", "has"), [("h200", True), ("NVIDIA H100 80GB HBM3", True), ("", False), ("tpu-v5e", False)]
)
def test_only_validated_gpus_have_predictions(target: str, has: bool) -> None:
    device = predicting.device_of(graph_of(GELU, target=target), H200.ceilings)
    assert (device is not None) == has and (device is None or device.processors == 132)


def test_a_file_round_trips_and_one_of_other_features_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped().write(tmp_path / "again.npz")
    again = Predictor.read(tmp_path / "again.npz")
    rows = np.random.default_rng(0).normal(size=(20, len(NAMES))).astype(np.float32)
    rows[:, :2] = 0
    assert again.log_efficiency(rows).tolist() == shipped().log_efficiency(rows).tolist()
    assert again.classes.keys() == shipped().classes.keys()
    monkeypatch.setattr(predicting, "NAMES", ("another",))
    with pytest.raises(ValueError, match="fit_predictor"):
        Predictor.read(tmp_path / "again.npz")


def test_the_shipped_file_is_small() -> None:
    assert (targets.FOLDER / predicting.FITTED_ON / predicting.FILE).stat().st_size < 300e3
