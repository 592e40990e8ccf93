"""`xlafuse diff` of two profiles: a capture of an H200, and the same with changed kernels."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli.main import cli

CAPTURE = PROJECT / "tests" / "data" / "profiles" / "torch"
GELU = "triton_poi_fused__unsafe_view_gelu_5"
SOFTMAX = "triton_red_fused__log_softmax__to_copy_prepare_softmax_online_13"
FILL = "void at::native::vectorized_elementwise_kernel"


def diff(*words: object) -> Any:
    return CliRunner().invoke(cli, ["diff", *map(str, words)], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes the capture with changed kernels: new names, and factors of times by name."""
    trace = json.loads(gzip.decompress((CAPTURE / "profile" / "torch.json.gz").read_bytes()))

    def write(name: str, renamed: dict[str, str], factors: dict[str, float]) -> Path:
        folder = tmp_path_factory.mktemp(name) / "capture"
        shutil.copytree(CAPTURE, folder)
        events = []
        for event in trace["traceEvents"]:
            if event.get("cat") == "kernel":
                factor = next((value for start, value in factors.items() if event["name"].startswith(start)), 1)
                shown = next((to for start, to in renamed.items() if event["name"].startswith(start)), event["name"])
                event = {**event, "name": shown, "dur": event["dur"] * factor}
            events.append(event)
        packed = gzip.compress(json.dumps({**trace, "traceEvents": events}).encode(), 1)
        (folder / "profile" / "torch.json.gz").write_bytes(packed)
        return folder

    return write


def test_equal_captures_have_no_change() -> None:
    done = diff(CAPTURE, CAPTURE)
    assert done.exit_code == 0, done.output
    assert "no change beyond the steps' spread and the tolerance" in done.output
    assert not any(f"kernels {word}" in done.output for word in ("slower", "faster", "new", "gone"))


def test_kernels_are_slower_faster_new_and_gone(changed: Callable[..., Path]) -> None:
    after = changed("after", {FILL: "other_fill"}, {GELU: 2.0, SOFTMAX: 0.5, "nvjet": 1.01})
    found = json.loads(diff(CAPTURE, after, "--json").output)
    assert found["schema"] == "xlafuse.profile-diff/1"
    by_word: dict[str, set[str]] = {}
    for each in found["kernels"]:
        by_word.setdefault(each["change"], set()).add(each["name"].partition("<")[0])
    assert by_word["slower"] == {GELU} and by_word["faster"] == {SOFTMAX}
    assert any(name.startswith("nvjet") for name in by_word["same"])  # 1% is within the tolerance
    (fill,) = (each for each in found["kernels"] if each["name"] == "other_fill")
    assert fill["was"].startswith(FILL)  # the same operation of PyTorch launched it
    (gelu,) = (each for each in found["kernels"] if each["name"] == GELU)
    assert gelu["lost_us"] == pytest.approx(gelu["before_us"]["median"], rel=1e-3)
    assert gelu["launches"] == [8, 8]
    assert found["busy"]["change"] == "same"


def test_slower_kernels_of_a_step_fail(changed: Callable[..., Path]) -> None:
    after = changed("slow", {}, {"triton": 1.5})
    done = diff(CAPTURE, after)
    assert done.exit_code == 1
    assert "kernels in a step: 8786 µs" in done.output and "kernels slower" in done.output
    assert diff(after, CAPTURE).exit_code == 0
    assert diff(CAPTURE, after, "--tolerance", "90%").exit_code == 0
    trace = after / "profile" / "torch.json.gz"
    smaller = gzip.decompress(trace.read_bytes()).replace(b"NVIDIA H200", b"NVIDIA L4")
    trace.write_bytes(gzip.compress(smaller, 1))
    done = diff(CAPTURE, after)
    assert done.exit_code == 0 and "another card: NVIDIA H200 → NVIDIA L4" in done.output


def test_a_kernel_of_one_capture_is_new_or_gone(changed: Callable[..., Path]) -> None:
    after = changed("without", {"void at::native::(anonymous namespace)::multi_tensor_apply": "adam"}, {})
    found = json.loads(diff(CAPTURE, after, "--json").output)
    assert {each["name"].partition("<")[0] for each in found["kernels"] if each["change"] == "new"} == {"adam"}
    gone = [each for each in found["kernels"] if each["change"] == "gone"]
    assert gone and all("multi_tensor_apply" in each["name"] and each["after_us"] is None for each in gone)


def test_a_profile_is_compared_with_profiles_only() -> None:
    done = diff(CAPTURE, PROJECT / "tests" / "data" / "xla" / "mlp_fwd.hlo.txt")
    assert done.exit_code == 2 and "a profile can only be compared with another" in done.output


@pytest.mark.parametrize("ending", [".html", ".md", ".json"])
def test_changes_are_written_to_a_file(changed: Callable[..., Path], tmp_path: Path, ending: str) -> None:
    after, out = changed("file", {GELU: f"<script>{GELU}"}, {GELU: 2.0}), tmp_path / f"changes{ending}"
    assert diff(CAPTURE, after, "-o", out).exit_code == 0
    text = out.read_text()
    assert GELU in text
    if ending == ".json":
        assert any(kernel["name"] == f"<script>{GELU}" for kernel in json.loads(text)["kernels"])
    if ending == ".html":
        assert "<script" not in text and f"&lt;script&gt;{GELU}" in text
