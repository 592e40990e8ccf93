"""Snapshots: their text and their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import example_graphs as examples
import pytest

from xlafuse.compare.pytest_plugin import snapshot
from xlafuse.compare.pytest_plugin.session_summary import SessionSummary
from xlafuse.compare.pytest_plugin.snapshot import Key


def key(
    test: str = "test_mlp", label: str = "", file: Path = Path("/t/test_layers.py"), version: str = "jax-0.10.2"
) -> Key:
    return Key(file, test, label, version, "h200")


def test_text():
    assert snapshot.text(key(), examples.two_choices().graphs) == (
        "fusion snapshot 1\n"
        "test: test_mlp\n"
        "made by: jax 0.10.2 for h200\n"
        "\n"
        "products by Triton GEMM:\n"
        "moves 67108864 bytes, compulsory 33554432\n"
        "forward:\n"
        "  gemm\n"
        "    layer/up: dot_general\n"
        "    reads input bf16[2048,4096] 16777216\n"
        "    writes intermediate bf16[2048,4096] 16777216\n"
        "  elementwise\n"
        "    layer/act: tanh\n"
        "    reads intermediate bf16[2048,4096] 16777216\n"
        "    writes output bf16[2048,4096] 16777216\n"
        "\n"
        "products by cuBLAS:\n"
        "moves 33554432 bytes, compulsory 33554432\n"
        "forward:\n"
        "  gemm\n"
        "    layer/up: dot_general\n"
        "    layer/act: tanh\n"
        "    reads input bf16[2048,4096] 16777216\n"
        "    writes output bf16[2048,4096] 16777216\n"
    )


def test_names_times_lines_and_paths_do_not_change_the_text():
    before = examples.apart()
    assert before.kernels is not None
    moved = tuple(
        replace(kernel, name=f"{kernel.name}.7", device_time_us=3.0, facts={"grid": 9}, provenance="not autotuned",
                source_ops=tuple(replace(op, line="/home/me/other.py:99") for op in kernel.source_ops))
        for kernel in before.kernels
    )
    texts = {snapshot.text(key(), {"": graph}) for graph in (before, replace(before, kernels=moved, name="other"))}
    assert len(texts) == 1


def test_another_fusion_changes_the_text():
    text = snapshot.text(key(), {"": examples.apart()})
    graph = examples.apart()
    assert graph.kernels is not None
    twice = replace(graph, kernels=(replace(graph.kernels[0], launches=2), graph.kernels[1]))
    wider = replace(graph, buffers=tuple(replace(b, dtype="f32") if b.name == "scores" else b for b in graph.buffers))
    assert len({text, *(snapshot.text(key(), {"": each}) for each in (twice, wider, examples.together()))}) == 4


def test_versions_have_no_device_suffix():
    graph = replace(examples.apart(), versions={"torch": "2.13.0+cu130", "triton": "3.7.1", "other": "1"})
    assert snapshot.versions_of(graph) == "torch-2.13.0+triton-3.7.1"
    assert replace(key(), versions="torch-2.13.0+triton-3.7.1").versions_text == "torch 2.13.0, triton 3.7.1 for h200"


@pytest.mark.parametrize(
    ("test", "label", "stem"),
    [
        ("test_mlp", "", "test_mlp"), ("TestLayer::test_mlp[bf16-0.5]", "", "TestLayer.test_mlp-bf16-0.5"),
        ("test_mlp", "second", "test_mlp+second"),
    ],
)
def test_file_names_of_plain_names(test: str, label: str, stem: str):
    assert key(test, label).path == Path(f"/t/fusion_snapshots/test_layers/{stem}@jax-0.10.2@h200.txt")


def test_hostile_names_get_files_of_their_own(tmp_path: Path):
    hostile = [
        "t[../../etc/passwd]", "t[a/b]", "t[a b]", "t[a\nb]", "t[<script>alert(1)</script>]", "t[@jax-0.1@h200.txt]",
        f"t[{'x' * 10_000}]", f"t[{'x' * 9_999}]", "t[ü]", "t[u]", "t[\ud800]", "t[]", "t[[0]]", "t[-]",
    ]
    keys = [key(test, label, tmp_path / "test_x.py") for test in hostile for label in ("", "a/b", "plain")]
    for each in keys:
        snapshot.write(each.path, snapshot.text(each, {"": examples.apart()}))
        assert each.path.parent == tmp_path / "fusion_snapshots" / "test_x"
        assert snapshot.test_of(each.path) == snapshot.shown_test(each.test)
        assert each.others() == ["jax 0.10.2 for h200"]
        assert len(each.path.read_text().splitlines()) <= 16
    assert len({each.path.name.lower() for each in keys}) == len(keys)


def test_other_versions_are_named(tmp_path: Path):
    file = tmp_path / "test_x.py"
    for version, label in (("jax-0.10.2", ""), ("jax-0.11.0", ""), ("jax-0.9.0", "other")):
        snapshot.write(key("t", label, file, version).path, "...")
    assert key("t", "", file, "jax-0.11.2").others() == ["jax 0.10.2 for h200", "jax 0.11.0 for h200"]


def test_a_difference_shows_its_context():
    shown = snapshot.difference("a\nb\nc\n", "a\nB\nc\n")
    assert shown.splitlines() == ["--- recorded", "+++ now", "@@ -1,3 +1,3 @@", " a", "-b", "+B", " c"]


def test_unused_snapshots(tmp_path: Path):
    file = tmp_path / "test_x.py"
    paths = {}
    for test in ("used", "passed", "failed", "gone"):
        paths[test] = key(test, "", file).path
        snapshot.write(paths[test], snapshot.text(key(test, "", file), {"": examples.apart()}))
    (paths["used"].parent / "notes@by@hand.txt").write_text("mine")
    summary = SessionSummary(collected={f"{file}::{test}" for test in ("used", "passed", "failed")})
    summary.passed = {f"{file}::used", f"{file}::passed"}
    summary.used = {f"{paths['used'].parent}/used"}
    assert summary.unused() == [paths["gone"], paths["passed"]]
    merged = SessionSummary(partial={str(file)})
    merged.add(summary.to_json())
    assert merged.unused() == [paths["passed"]]
