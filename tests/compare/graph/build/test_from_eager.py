"""The graph of eager PyTorch: operations without a device, and with the kernels of each operation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from recording import operation, record, recorded, tensor

from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.totals import totals
from xlafuse.compare.graph.build.from_eager import from_eager
from xlafuse.compare.graph.model import Access

X, W, H, Y = tensor(0, (4, 8)), tensor(1, (8, 8)), tensor(2, (4, 8)), tensor(3, (4, 8))
CALL = recorded(
    {
        "forward": [
            operation("aten.mm.default", "gemm", [X, W], [H], stage="gate", line="model.py:5", flops=512.0),
            operation("aten.add.Tensor", "elementwise", [X, H], [Y], stage="residual", line="model.py:6", flops=32.0),
        ]
    },
    {"x": X, "w": W}, {"y": Y},
)


def test_without_a_device_there_are_only_operations_and_buffers() -> None:
    graph = from_eager(CALL, name="mlp", target="h200")
    assert graph.kernels is None and graph.compiler == "eager"
    assert [(op.op, op.stage, op.line) for op in graph.operations] == [
        ("aten.mm", "gate", "model.py:5"), ("aten.add", "residual", "model.py:6")
    ]
    assert {b.name: b.role for b in graph.buffers} == {"x": "input", "w": "input", "y": "output", "mm": "intermediate"}
    assert store.from_json(json.loads(json.dumps(store.to_json(graph)))) == graph


def test_each_operation_is_one_kernel_with_its_helpers() -> None:
    ran = [[record("[memset]", bytes=64), record("nvjet", 3.0), record("splitKreduce", 2.0)], [record("add_kernel")]]
    graph = from_eager(CALL, name="mlp", kernels={"forward": ran})
    assert graph.kernels is not None
    product, add = graph.kernels
    assert (product.kind, product.runtime_name, product.launches) == ("gemm", "nvjet", 1)
    # The library's own memsets are workspace.
    assert product.facts == {"with": {"[memset]": 1, "splitKreduce": 1}} and product.workspace_bytes == 64
    assert product.inputs == (Access("x", 64), Access("w", 128)) and product.outputs == (Access("mm", 64),)
    assert product.device_time_us == pytest.approx(6.0) and product.flops == 512
    assert (add.bytes_read, add.bytes_written, add.flops, add.runtime_name) == (128, 64, 32.0, "add_kernel")
    assert [kernel.source_ops for kernel in graph.kernels] == [(op,) for op in graph.operations]
    assert graph.producers["mm"] == (0,) and graph.consumers["mm"] == (1,)
    assert totals(graph).declared.exact == 192 + 64 + 192


@pytest.mark.parametrize(("count", "launches", "facts"), [(2, 2, {}), (3, 1, {"with": {"add_kernel": 2}})])
def test_an_operation_split_into_launches_moves_its_bytes_once(
    count: int, launches: int, facts: dict[str, Any]
) -> None:
    ran = [[record("nvjet", 3.0)], [record("add_kernel", 2.0)] * count]
    graph = from_eager(CALL, name="mlp", kernels={"forward": ran})
    assert graph.kernels is not None
    add = graph.kernels[1]
    assert (add.launches, add.facts, add.device_time_us) == (launches, facts, pytest.approx(2.0 * count))
    assert ((add.bytes_read or 0) * launches, (add.flops or 0) * launches) == (128, 32)


def test_a_memset_that_is_the_whole_operation_writes_its_output() -> None:
    call = recorded({"forward": [operation("aten.zeros.default", "memset", [], [Y])]}, {}, {"y": Y})
    graph = from_eager(call, name="zeros", kernels={"forward": [[record("[memset]")]]})
    assert graph.kernels is not None
    assert graph.kernels[0].outputs == (Access("y", 64),) and graph.kernels[0].workspace_bytes == 0


def test_kernels_for_another_number_of_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="each operation of forward: 2, got 1"):
        from_eager(CALL, name="mlp", kernels={"forward": [[record("nvjet")]]})


def test_equal_operations_on_one_line_differ_and_a_checkpoint_repeats_one() -> None:
    again = operation("aten.mm.default", "gemm", [X, W], [H], line="model.py:5", rematerialized=True)
    twice = [operation("aten.add.Tensor", "elementwise", [X], [X], line="model.py:9") for _ in range(2)]
    repeated = operation("aten.add.Tensor", "elementwise", [X], [X], line="model.py:9", rematerialized=True)
    call = recorded({"forward": [CALL.parts["forward"][0], *twice], "backward": [again, repeated]}, {"x": X}, {})
    product, one, two, product_again, one_of_them = from_eager(call, name="k").operations
    assert one.site != two.site
    assert product_again.rematerialized and product_again.site == product.site
    assert one_of_them.site == ""
