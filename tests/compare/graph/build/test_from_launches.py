"""The graph of hand-written launches: buffers by storage, roles across both phases, repeated operations."""

from __future__ import annotations

import json

import pytest
from recording import computed, launch, operation, recorded, tensor

from xlafuse.compare.graph import store
from xlafuse.compare.graph.build.from_launches import from_launches
from xlafuse.compare.graph.model import Access, FusionGraph, Launch

X, Y, DY, DX = (tensor(number, (4, 8)) for number in range(4))
RSTD, PARTIAL, DX2 = tensor(4, (4,), "float32"), tensor(5, (2, 8), "float32"), tensor(6, (4, 8))


def named(of: object, name: str, shape: tuple[int, ...] | None = None) -> object:
    return tensor(of.storage, shape or of.shape, of.dtype, name)  # type: ignore[attr-defined]


@pytest.fixture
def norm() -> FusionGraph:
    forward = [
        launch("forward", [named(X, "x")], [named(Y, "y"), named(RSTD, "rstd")],
               [computed("mul", "normalize"), computed("mul", "weight")], flops=128.0),
    ]
    backward = [
        launch("backward", [named(X, "x"), named(RSTD, "rstd"), named(DY, "dy")],
               [named(DX2, "dx"), named(PARTIAL, "partial")],
               [computed("mul", "normalize", rematerialized=True), computed("mul", "normalize", backward=True)]),
        operation("aten.add.Tensor", "elementwise", [DX2, DY], [DX], stage="residual", backward=True),
    ]
    call = recorded({"forward": forward, "backward": backward}, {"x": X, "dy": DY}, {"y": Y, "dx": DX})
    return from_launches(call, name="norm", compiler="triton", target="h200", versions={"triton": "3.7"})


def test_kernels_in_order_with_bytes_and_names(norm: FusionGraph) -> None:
    assert norm.kernels is not None
    forward, backward, add = norm.kernels
    assert (forward.name, forward.runtime_name, forward.kind, forward.phase) == (
        "forward", "forward_runtime", "custom", "forward"
    )
    assert forward.inputs == (Access("x", 64),) and forward.outputs == (Access("y", 64), Access("rstd", 16))
    assert (backward.bytes_read, backward.bytes_written) == (64 + 16 + 64, 64 + 64)
    assert forward.flops == 128.0 and forward.facts == {"language": "triton"}
    assert forward.launch == Launch(
        (4, 1, 1), (128, 1, 1), 32, 1024, 0, config={"BLOCK": 64, "num_warps": 4, "num_stages": 3}
    )
    assert forward.lines == ("triton_side/kernels/k.py:7",) and forward.stages == ("normalize", "weight")
    # The operation of PyTorch's in between is a kernel too, by a name that only a device tells.
    assert (add.name, add.kind, add.runtime_name, add.phase) == ("aten.add.Tensor", "elementwise", None, "backward")
    assert add.source_ops[0].op == "aten.add" and add.source_ops[0].stage == "residual"


@pytest.mark.parametrize(
    ("views", "bytes"),
    [
        ([tensor(0, (4, 8)), tensor(0, (4, 8))], 64),
        ([tensor(0, (4, 8)), tensor(0, (8, 4), strides=(1, 8))], 64),  # transposed
        ([tensor(0, (4, 4), strides=(8, 1)), tensor(0, (4, 2), strides=(8, 1), offset=4)], 32 + 16),  # side by side
        ([tensor(0, (3, 8)), tensor(0, (3, 8), offset=8)], 64),  # but for a row each
    ],
)
def test_views_of_one_storage_count_the_bytes_they_cover(views: list[object], bytes: int) -> None:
    reads = launch("kernel", views, [Y], [computed("mul", "stage")])
    graph = from_launches(recorded({"forward": [reads]}, {"x": X}, {"y": Y}), name="views", compiler="triton")
    assert graph.kernels and graph.kernels[0].bytes_read == bytes


def test_buffers_are_memory_and_have_roles(norm: FusionGraph) -> None:
    assert {buffer.name: buffer.role for buffer in norm.buffers} == {
        "x": "input", "dy": "input", "y": "output", "dx": "output", "rstd": "saved", "partial": "intermediate",
        "dx_1": "intermediate",
    }
    assert {buffer.name for buffer in norm.materialized} == {"rstd", "partial", "dx_1"}
    assert norm.buffer["rstd"].dtype == "f32" and norm.buffer["rstd"].shape == (4,)
    assert norm.producers["dx_1"] == (1,) and norm.consumers["dx_1"] == (2,)
    assert norm.consumers["rstd"] == (1,)


def test_a_repeated_forward_operation_has_its_site(norm: FusionGraph) -> None:
    assert norm.kernels is not None
    first = norm.kernels[0].source_ops[0]
    again, gradient = norm.kernels[1].source_ops
    assert again.rematerialized and not again.backward and again.site == first.site
    assert gradient.backward and gradient.site not in {first.site, norm.kernels[0].source_ops[1].site}


def test_a_buffer_counts_once_and_a_view_by_its_elements() -> None:
    half = tensor(0, (2, 8), name="upper")
    call = recorded(
        {"forward": [launch("k", [named(X, "x"), half, named(X, "again")], [named(Y, "y")], [])]}, {}, {"y": Y}
    )
    graph = from_launches(call, name="k", compiler="triton")
    assert graph.kernels is not None and graph.kernels[0].inputs == (Access("x", 64),)
    call = recorded({"forward": [launch("k", [half], [named(Y, "y")], [])]}, {"x": X}, {"y": Y})
    graph = from_launches(call, name="k", compiler="triton")
    assert graph.kernels is not None and graph.kernels[0].inputs == (Access("x", 32),)
    assert graph.buffer["x"].bytes == 64


def test_a_buffer_that_backward_writes_first_is_not_saved() -> None:
    scratch = tensor(9, (4, 8))
    call = recorded(
        {
            "forward": [launch("f", [X], [Y, scratch], [])],
            "backward": [launch("b", [DY], [scratch], []), launch("c", [scratch], [DX], [])],
        },
        {"x": X, "dy": DY}, {"y": Y, "dx": DX},
    )
    assert from_launches(call, name="k", compiler="triton").saved == ()


def test_a_kernel_launched_twice_computes_two_operations() -> None:
    layer = [computed("mul", "norm")]
    call = recorded(
        {"forward": [launch("k", [X], [DX2], layer), launch("k", [DX2], [Y], layer)]}, {"x": X}, {"y": Y}
    )
    graph = from_launches(call, name="k", compiler="triton")
    assert graph.kernels is not None
    assert len({kernel.source_ops[0].site for kernel in graph.kernels}) == 2


def test_json(norm: FusionGraph) -> None:
    assert store.from_json(json.loads(json.dumps(store.to_json(norm)))).buffers == norm.buffers
