"""A compile's graphs are those that the reader makes of the files of the same compile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
from pathlib import Path
import shutil
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.triton_side.inductor import dump

def described(graph, texts_alone):
    found = {{
        "phase": graph.part, "inputs": graph.inputs, "outputs": graph.outputs, "unparsed": graph.unparsed,
        "buffers": {{name: [memory.shape, memory.dtype, memory.bytes] for name, memory in graph.memory.items()}},
    }}
    for index, call in enumerate(graph.calls):
        kernel = call.kernel
        found[f"{{index}} {{kernel.name}}"] = {{
            "kind": kernel.kind,
            "reads": {{buffer.name: buffer.bytes for buffer in kernel.inputs or ()}},
            "writes": {{buffer.name: buffer.bytes for buffer in kernel.outputs or ()}},
            "runtime_name": call.runtime_name, "workspace": call.workspace_bytes, "layouts": call.layouts,
            "operations": sorted(call.operations),
        }} | ({{}} if texts_alone else {{
            "sources": [dataclasses.asdict(source) for source in call.sources], "flops": call.flops, "grid": call.grid,
            "config": kernel.config, "provenance": kernel.provenance,
        }})
    return json.loads(json.dumps(found))

folder = Path({folder!r})
{compiled}
captured.write(folder / "own")
for graph in captured.graphs:  # as TORCH_COMPILE_DEBUG=1 writes it
    debug = folder / "debug" / "torchinductor" / f"model__0_{{graph.part}}_1.0"
    debug.mkdir(parents=True)
    (debug / "output_code.py").write_text(graph.code)
    (debug / "fx_graph_transformed.py").write_text(graph.fx)
    (debug / "ir_post_fusion.txt").write_text(graph.post_fusion)
    (debug / "inductor_provenance_tracking_node_mappings.json").write_text(
        json.dumps({{"cppCodeToPost": graph.handles}})
    )
found = {{}}
for kind in ("own", "debug"):
    pairs = zip(captured.program().graphs, dump.read(folder / kind).graphs, strict=True)
    found[kind] = [[described(graph, kind == "debug") for graph in pair] for pair in pairs]
print(json.dumps(found))
"""
BLOCK = """
block = BLOCKS[{block!r}]
case = next(case for case in block.cases("check") if case.direction == {direction!r} and case.precision != "tf32")
row = block.implementation("inductor")
inputs = {{t.name: (t.shape(case.sizes), t.dtype_in(case)) for t in block.inputs}}
captured = deviceless.compile_inductor(
    row.load(), inputs, block.attributes_of(case), train=case.differentiates, max_autotune=False
)
"""
FUNCTION = """
from xlafuse.triton_side.deviceless import user_functions
factory = user_functions.TensorFactory()
def tensor(*shape):
    return factory.tensor(user_functions.TensorSpec(shape, torch.empty(shape, device="meta").stride(), "float32"))
{function}
captured, _ = user_functions.compile_call(function, arguments, {{}}, factory, train=False)
"""
SOME = [("rmsnorm", "fwd"), ("softmax", "train"), ("embedding", "train"), ("swiglu_mlp", "train")]


FUNCTIONS = {
    "a foreach operation and its results": """
def function(parameters, gradients):
    torch._foreach_add_(parameters, gradients, alpha=-0.1)
    return [parameter * 2 for parameter in parameters]
arguments = tuple([tensor(64, 64) for _ in range(6)] for _ in range(2))
""",
    "a number that the host passes": """
def function(x, number):
    return x * (number * 2)
arguments = tensor(64, 64), torch.tensor(3.0)
""",
}


def compared(fake_gpu: Any, folder: Path, case: str, compiled: str) -> list[Any]:
    """Compare a compile with its files, and return its graphs."""
    found = fake_gpu.answer(PROGRAM.format(folder=str(folder), compiled=compiled))
    for kind, pairs in found.items():
        assert pairs
        for live, read in pairs:
            assert read == live, f"{case}, {kind}"
    return [live for live, _ in found["own"]]


@pytest.mark.parametrize(("block", "direction"), SOME)
def test_a_compile_is_read_as_its_files_are(fake_gpu: Any, tmp_path: Path, block: str, direction: str) -> None:
    compared(fake_gpu, tmp_path, block, BLOCK.format(block=block, direction=direction))


@pytest.mark.full
def test_every_block_is_read_as_its_files_are(fake_gpu: Any, tmp_path: Path) -> None:
    blocks = json.loads(json.dumps(fake_gpu.answer("""
from xlafuse.compare.spec.blocks import BLOCKS
found = []
for name, block in BLOCKS.items():
    directions = {case.direction for case in block.cases("check") if case.precision != "tf32" and case.ranks == 1}
    if any(row.name == "inductor" for row in block.implementations):
        found += [[name, direction] for direction in sorted(directions)]
print(json.dumps(found))
""")))
    for block, direction in blocks:
        if (block, direction) not in SOME:
            program = BLOCK.format(block=block, direction=direction)
            compared(fake_gpu, tmp_path / f"{block}-{direction}", f"{block} {direction}", program)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_read_as_its_files_are(fake_gpu: Any, tmp_path: Path, name: str) -> None:
    """Every kernel has its operations with their FLOPs, and reads all that it computes from."""
    (graph,) = compared(fake_gpu, tmp_path, name, FUNCTION.format(function=FUNCTIONS[name]))
    kernels = [kernel for kernel in graph.values() if isinstance(kernel, dict) and "flops" in kernel]
    read = {name for kernel in kernels for name in kernel["reads"]}
    assert kernels and all(kernel["sources"] and kernel["flops"] for kernel in kernels)
    assert read.issuperset(graph["inputs"])
