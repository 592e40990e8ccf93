"""Views among Inductor's calls: they launch nothing, and a call reads what its views of a buffer reach."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from xlafuse.triton_side.inductor import compiler, dump
from xlafuse.triton_side.inductor.graph import VIEWS, CompiledGraph
from xlafuse.triton_side.inductor.output_code import elements_viewed


def rotated(x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2) * 2) * turn
    return torch.view_as_real(turned).flatten(-2) + 1, turned.imag


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompiledGraph]:
    with torch.no_grad(), compiler.capture() as captured:
        compiler.compile(rotated)(torch.ones(4, 8, 16), torch.ones(8, 8, dtype=torch.complex64))
    folder: Path = tmp_path_factory.mktemp("views")
    captured.write(folder)
    return {"capture": captured.program().graphs[0], "dump": dump.read(folder).graphs[0]}


@pytest.mark.parametrize("source", ["capture", "dump"])
def test_views_are_no_kernels_and_their_readers_read_the_viewed_buffer(graphs, source):
    graph = graphs[source]
    calls = [call.kernel for call in graph.calls]
    assert [kernel.name for kernel in calls if kernel.is_extern] == ["torch.ops.aten.mul.Tensor"]
    first, product, *last = calls
    turned = 4 * 8 * 8 * 8
    assert {buffer.name: buffer.bytes for buffer in product.inputs} == {
        first.outputs[0].name: turned, graph.inputs[1]: 8 * 8 * 8,
    }
    (made,) = product.outputs
    assert made.bytes == turned
    assert all(made.name in {buffer.name for buffer in kernel.inputs} for kernel in last)
    written = {buffer.name for kernel in calls for buffer in kernel.outputs}
    assert set(graph.outputs) <= written  # the imaginary part is a view of the product's result
    assert made.name in graph.outputs


def test_every_listed_view_returns_an_alias_of_its_operand():
    for name in sorted(VIEWS):
        packet = getattr(torch.ops.aten, name.removeprefix("aten."))
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            if "out" not in overload and str(schema.arguments[0].type) == "Tensor":  # not of Python's lists
                alias = schema.returns[0].alias_info
                assert alias is not None and not alias.is_write, schema


def sliced_product(x: Tensor) -> Tensor:
    return x[:, :64][:8] @ x[:, 64:128].t()[:, :16]


def test_a_product_of_slices_reads_the_slices(tmp_path):
    with torch.no_grad(), compiler.capture() as captured:
        compiler.compile(sliced_product)(torch.ones(256, 256))
    captured.write(tmp_path)
    (tmp_path / "kernels.json").write_text("[]")  # its bytes are the capture's
    for program in (captured.program(), dump.read(tmp_path)):
        ((call,),) = [graph.calls for graph in program.graphs]
        assert [buffer.bytes for buffer in call.kernel.inputs] == [(8 * 64 + 64 * 16) * 4]


@pytest.mark.parametrize(
    ("arguments", "elements"),
    [
        ("reinterpret_tensor(a, (64, 512), (4096, 1), 8), b, out=c", {"a": 64 * 512}),
        ("reinterpret_tensor(a, (4, 8), (8, 1), 0), reinterpret_tensor(a, (4, 8), (8, 1), 32)", {"a": 64}),
        ("reinterpret_tensor(a, (4, 8), (8, 1), 0), a", {}),
        ("reinterpret_tensor(a, (4, 8), (0, 1), 0)", {"a": 8}),  # broadcast
        ("reinterpret_tensor(a, (10, 8), (1, 1), 0)", {"a": 17}),  # overlapping windows
        ("reinterpret_tensor(a, (8, ), (1, ), 0)", {"a": 8}),
        ("reinterpret_tensor(a, (0, 8), (8, 1), 0)", {"a": 0}),
        ("reinterpret_tensor(a, (s0, 8), (8, 1), 0)", {}),
        ("reinterpret_tensor(a, (), (), 5)", {"a": 1}),
    ],
)
def test_elements_that_views_reach(arguments, elements):
    assert elements_viewed(f"extern_kernels.mm({arguments})") == elements
