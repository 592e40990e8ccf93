"""Code for GPUs that nothing was recorded on: what each compiler emits, and what a launch may not ask for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import xlafuse, xlafuse_process

from xlafuse.compare import targets
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.run import session
from xlafuse.compare.sources import provenance
from xlafuse.compare.sources.opening import open_source

FROM_FACTS = [name for name in targets.names() if targets.load(name).facts]


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_one_block_for_the_l4(tmp_path: Path) -> None:
    selected = ["--direction", "fwd", "--case", "llama-8b", "-i", "triton"]
    done = xlafuse_process("run", "gelu", *selected, "--target", "l4", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nothing is timed" in done.stdout and "At memory bandwidth" not in done.stdout
    for result in open_source(tmp_path / "run").results:
        graph = result.load()
        assert graph.target == "l4" and graph.kernels and result.ceilings_of == "the scaled data sheet of l4"
    assert {record["status"] for record in records_of(tmp_path / "run")} == {"compiled"}


@pytest.mark.full
@pytest.mark.parametrize("name", FROM_FACTS)
def test_the_tour(name: str, tmp_path: Path) -> None:
    done = xlafuse_process("run", "--target", name, "--out", str(tmp_path / "run"), timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {record["status"] for record in records_of(tmp_path / "run")} == {"compiled"}


CODE = """\
import jax, jax.numpy as jnp
def mlp(x, w1, w2):
    return jax.nn.gelu(x @ w1) @ w2
"""


def test_one_function_for_several_targets(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(CODE)
    arguments = ["explain", f"{tmp_path}/layers.py:mlp", "--args", "bf16[512,1024], bf16[1024,4096], bf16[4096,1024]"]
    done = xlafuse_process(*arguments, "--target", "l4,a100-80gb")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.index("l4") < done.stdout.index("a100-80gb") < done.stdout.index("a100-80gb against l4")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--target", "l4,l4"], "a target is named twice"), (["--target", "l4,h20"], "did you mean h200"),
        (["--target", "l4,h200", "--xla-flag", "a=1"], "for one target, got 2"),
    ],
)
def test_lists_of_targets_that_are_refused(given: list[str], problem: str) -> None:
    done = xlafuse("explain", "math:sqrt", "--args", "f32[2]", *given)
    assert done.exit_code == 2
    assert problem in done.stderr


def test_a_launch_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from xlafuse.triton_side.calls import launches

    device = SimpleNamespace(**targets.load("l4").device_properties())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    launches._check_fits("small", 101376)
    with pytest.raises(launches.DoesNotFit, match=r"large asks for 101,377 bytes .* NVIDIA L4 has at most 101,376"):
        launches._check_fits("large", 101377)


def test_the_table_of_targets() -> None:
    shown = xlafuse("list", "targets").stdout
    assert "NVIDIA L4 " in shown and "scaled data sheet" in shown and "measured" in shown
    rows = {row["target"]: row for row in json.loads(xlafuse("list", "targets", "--json").stdout)["targets"]}
    assert [*rows] == targets.names() and all(row["sources"] for row in rows.values())
    assert (rows["l4"]["rates"], rows["h200"]["rates"], rows["tpu-v5e"]["rates"]) == (
        "scaled data sheet", "measured", "data sheet"
    )


@pytest.mark.parametrize(
    ("backend", "target", "detail", "reason"),
    [
        ("pallas", "a100-80gb", "ValueError: only Hopper", "its Pallas kernels are written for Hopper"),
        ("triton", "a100-80gb", "type fp8e4nv not supported in this architecture", "no products of this dtype"),
        ("eager", "a100-80gb", "only supported on CUDA devices with compute capability >= 8.9", "no products"),
        ("triton", "a100-80gb", "DoesNotFit: too large", None),
        ("pallas", "h200", "ValueError: a fault", None),
    ],
)
def test_kernels_that_the_gpu_cannot_have_are_no_faults(
    backend: str, target: str, detail: str, reason: str | None
) -> None:
    entry: Any = SimpleNamespace(status="failed", detail=detail)
    implementation: Any = SimpleNamespace(backend_name=backend)
    session.note_absence(entry, implementation, targets.load(target).device_properties())
    assert (entry.status, entry.detail) == ("failed", detail) if reason is None else entry.status == "skipped"
    assert reason is None or (reason in entry.detail and detail in entry.detail)


def test_a_kernel_that_is_not_autotuned_says_what_that_means() -> None:
    graph = FusionGraph("f", "xla", (), target="l4")
    assert provenance._reason(graph).startswith("; nothing was recorded on the l4")
