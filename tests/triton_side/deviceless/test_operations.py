"""Operations and kinds of Inductor's kernels: what the generated code computes, live and read back from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xlafuse.triton_side.inductor import dump

PROGRAM = """
def scaled(i):
    scale = torch.rsqrt(i["x"].float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return {{"y": (i["x"].float() * scale).view(-1, 8).abs().amax(-1)}}

def convolved(i):
    return {{"y": torch.tanh(torch.conv2d(torch.sin(i["x"]), i["w"]))}}

def added(i):
    return {{name: (i[name] * 2).index_add(0, i["at"], i["r"] * 3) for name in ("x", "z")}}

def filled(i):
    return {{"y": torch.zeros(64, 4, device="cuda").index_add(0, i["at"], torch.sin(i["r"]))}}

def cached(i):
    i["x"].index_copy_(0, i["at"], i["r"])
    return {{"y": i["x"].sum()}}

ids = ((16,), "int64")
rows = ((16, 4), "float32")
table = ((64, 4), "float32")
cases = {{
    "scaled": (scaled, {{"x": ((64, 32), "bfloat16")}}),
    "convolved": (convolved, {{"x": ((2, 16, 8, 8), "float16"), "w": ((16, 16, 3, 3), "float16")}}),
    "added": (added, {{"x": table, "z": table, "at": ids, "r": rows}}),
    "filled": (filled, {{"at": ids, "r": rows}}),
    "cached": (cached, {{"x": ((65536, 64), "float32"), "at": ids, "r": ((16, 64), "float32")}}),
}}
found = {{}}
for name, (function, specs) in cases.items():
    torch.compiler.reset()
    captured = deviceless.compile_inductor(function, specs, {{}}, train=False, max_autotune=False)
    captured.write({folder!r} + "/" + name)
    (graph,) = captured.program().graphs
    found[name] = [[call.kernel.kind, [node.op for node in call.sources], call.flops] for call in graph.calls]
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=["capture", "dump"])
def computed(request: pytest.FixtureRequest, compiled: tuple[Path, Any]) -> dict[str, list[Any]]:
    folder, live = compiled
    if request.param == "capture":
        return live
    read = {name: dump.read(folder / name).graphs for name in live}
    return {
        name: [[call.kernel.kind, [node.op for node in call.sources], call.flops] for call in graph.calls]
        for name, (graph,) in read.items()
    }


@pytest.fixture(scope="module")
def compiled(fake_gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("operations")
    return folder, fake_gpu.answer(PROGRAM.format(folder=str(folder)))


def test_a_kernel_after_a_reduction_computes_nothing_before_it(computed: dict[str, list[Any]]) -> None:
    """Both read the same array, so reading it shows nothing."""
    first, second = computed["scaled"]
    assert "aten.pow" in first[1] and "aten.pow" not in second[1]
    assert {"aten.mean", "aten.rsqrt", "aten.amax"} <= set(second[1])  # it divides the sum


def test_a_kernel_that_lays_out_a_weight_is_a_copy_without_the_activation(computed: dict[str, list[Any]]) -> None:
    by_operation = [(kind, ops) for kind, ops, _ in computed["convolved"]]
    assert ("elementwise", ["aten.sin"]) in by_operation and ("elementwise", ["aten.tanh"]) in by_operation
    assert ("copy", ["aten.clone"]) in by_operation
    assert sum("aten.sin" in ops for _, ops in by_operation) == 1
    assert [flops for kind, _, flops in computed["convolved"] if kind == "copy"] == [0]


def test_of_two_kernels_of_a_scatter_the_one_with_atomics_is_the_scatter(computed: dict[str, list[Any]]) -> None:
    *copies, scatter = computed["added"]
    assert all(each[:2] == ["elementwise", ["aten.mul"]] for each in copies) and len(copies) == 2
    assert scatter[0] == "scatter" and sorted(set(scatter[1])) == ["aten.index_put", "aten.mul"]
    fill, scatter = computed["filled"]
    assert fill[:2] == ["elementwise", ["aten.full"]]
    assert scatter[:2] == ["scatter", ["aten.sin", "aten.index_put"]]


def test_a_kernel_behind_an_update_in_place_computes_its_own_operations(computed: dict[str, list[Any]]) -> None:
    """Its comment gives the updated argument another name than the code."""
    update, reading, adding = computed["cached"]
    assert update[:2] == ["scatter", ["aten.index_put"]]
    assert reading[:2] == adding[:2] == ["reduction", ["aten.sum"]]


def test_kernels_json_has_what_each_kernel_computes(compiled: tuple[Path, Any]) -> None:
    folder, live = compiled
    listed = json.loads((folder / "convolved/kernels.json").read_text())
    assert [kernel["ops"] for kernel in listed] == [ops for _, ops, _ in live["convolved"]]
