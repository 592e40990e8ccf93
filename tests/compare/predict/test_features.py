"""Numbers of a kernel: those of its arrays, operations, names and launch."""

from __future__ import annotations

import math
from typing import Any

import pytest

from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Launch, SourceOp
from xlafuse.compare.predict.features import KINDS, NAMES, Device, Row, rows

DEVICE = Device(Ceilings({0.5: 4e12}, {"bfloat16": 8e14, "float32-ieee": 5e13}, launch_us=1.0))
SHAPE = (4096, 1024)
BYTES = 2 * math.prod(SHAPE)


def graph_of(*kernels: Kernel, compiler: str = "xla", **shapes: tuple[int, ...]) -> FusionGraph:
    named = {access.buffer for kernel in kernels for access in (*(kernel.inputs or ()), *(kernel.outputs or ()))}
    buffers = tuple(
        Buffer(name, shapes.get(name, SHAPE), "bf16", 2 * math.prod(shapes.get(name, SHAPE)), "intermediate")
        for name in sorted(named)
    )
    return FusionGraph("g", compiler, kernels, buffers)


def values_of(graph: FusionGraph, index: int = -1) -> dict[str, float]:
    row = list(rows(graph, DEVICE))[index]
    assert isinstance(row, Row)
    return dict(zip(NAMES, row.values, strict=True))


def kernel(
    *inputs: Access, op: str = "mul", kind: Any = "elementwise", out: Access | None = None, **more: Any
) -> Kernel:
    outputs = (out or Access("y", BYTES, shape=SHAPE, strides=(1024, 1)),)
    return Kernel("k", kind, source_ops=(SourceOp(op),), inputs=inputs, outputs=outputs, flops=1.0, **more)


def plain(name: str = "x") -> Access:
    return Access(name, BYTES, shape=SHAPE, strides=(1024, 1))


def test_contiguous_arrays_have_no_share_of_another_access() -> None:
    values = values_of(graph_of(kernel(plain())))
    assert [values[f"access {name}"] for name in ("strided", "transposed", "gathered", "broadcast")] == [0, 0, 0, 0]
    assert values["rows length in"] == pytest.approx(math.log2(2 * 1024 + 1))
    assert values["access same axis"] and values["operations transposes"] == 0


def test_an_array_of_another_order_of_axes_is_transposed() -> None:
    values = values_of(graph_of(kernel(Access("x", BYTES, shape=SHAPE, strides=(1, 4096)))))
    assert values["access transposed"] == 0.5 and values["access strided"] == 0
    assert not values["access same axis"]


def test_an_array_with_gaps_is_strided_and_has_short_runs() -> None:
    values = values_of(graph_of(kernel(Access("x", BYTES, shape=SHAPE, strides=(3072, 1)))))
    assert values["access strided"] == 0.5 and values["access transposed"] == 0
    assert values["access run in"] == pytest.approx(math.log2(2 * 1024 + 1))


def test_a_smaller_input_is_broadcast() -> None:
    values = values_of(graph_of(kernel(plain(), Access("bias", 2048, shape=(1024,), strides=(1,))), bias=(1024,)))
    assert values["access broadcast"] == pytest.approx(2048 / (2 * BYTES + 2048))


def test_the_largest_input_of_a_gather_is_gathered() -> None:
    assert values_of(graph_of(kernel(plain(), op="gather")))["access gathered"] == 0.5


def test_shares_are_missing_where_a_graph_has_no_strides() -> None:
    values = values_of(graph_of(kernel(Access("x", BYTES), out=Access("y", BYTES))))
    assert math.isnan(values["access transposed"]) and math.isnan(values["access run in"])
    assert values["rows length in"] == pytest.approx(math.log2(2 * 1024 + 1))  # of the buffer's shape


def test_data_that_a_kernel_just_wrote_may_be_in_l2_until_more_moves() -> None:
    first, second = kernel(plain("a"), out=plain("b")), kernel(plain("b"))
    assert values_of(graph_of(first, second))["l2 written"] == 1
    large = Access("c", 200 << 20, shape=(50, *SHAPE), strides=(1024 * 4096, 1024, 1))
    assert values_of(graph_of(first, kernel(large, out=plain("d")), second))["l2 written"] == 0
    backward = kernel(plain("b"), phase="backward")
    assert values_of(graph_of(first, backward))["l2 written"] == 0  # each phase is timed from a cold L2


def test_tiles_of_library_names_and_their_waves() -> None:
    product = kernel(
        Access("a", 2 * 4096 * 4096), Access("b", 2 * 4096 * 2048), kind="gemm", op="dot_general",
        out=Access("c", 2 * 4096 * 2048), runtime_name="nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
    )
    graph = graph_of(product, a=(4096, 4096), b=(4096, 2048), c=(4096, 2048))
    values = values_of(FusionGraph("g", "xla", (with_flops(product, 2 * 4096 * 4096 * 2048),), graph.buffers))
    assert (2 ** values["tile rows"] - 1, 2 ** values["tile columns"] - 1) == pytest.approx((256, 128))
    assert 2 ** values["tile K"] - 1 == pytest.approx(4096) and values["tile stages"] == 4
    assert values["tile waves"] == pytest.approx(16 * 16 / 132) and values["tile use"] == pytest.approx(256 / 264)


def with_flops(made: Kernel, flops: float) -> Kernel:
    return Kernel(**{**{name: getattr(made, name) for name in Kernel.__dataclass_fields__}, "flops": flops})


def test_the_launch_gives_waves_by_its_resources() -> None:
    launch = Launch(grid=(1056, 1, 1), block=(256, 1, 1), registers=64, shared_bytes=0)
    values = values_of(graph_of(kernel(plain(), launch=launch)))
    assert values["launch waves"] == 2 and values["launch occupancy"] == 0.5 and values["launch use"] == 1


def test_inductors_configuration_is_read_from_its_words() -> None:
    facts = {"config": "XBLOCK: 512, num_warps: 8, num_stages: 1, maxnreg: None"}
    values = values_of(graph_of(kernel(plain(), facts=facts), compiler="inductor"))
    assert 2 ** values["tile x"] - 1 == pytest.approx(512) and values["tile warps"] == 8


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"launches": None}, "launches"), ({"launches": 0}, "never runs"), ({"out": Access("y", None)}, "bytes")],
)
def test_a_kernel_without_launches_or_bytes_has_a_reason(more: dict[str, Any], reason: str) -> None:
    (row,) = rows(graph_of(kernel(plain(), **more)), DEVICE)
    assert isinstance(row, str) and reason in row


def test_the_base_is_roofline_and_launch_for_each_launch() -> None:
    (row,) = rows(graph_of(kernel(plain(), launches=3)), DEVICE)
    assert isinstance(row, Row) and row.base_us == pytest.approx(3 * (2 * BYTES / 4e12 * 1e6 + 1))


def test_an_attention_without_flops_is_taken_as_causal() -> None:
    shape = (2, 8, 1024, 64)
    access = tuple(Access(name, 2 * math.prod(shape)) for name in "qkv")
    made = Kernel("flex", "attention", source_ops=(SourceOp("flex_attention"),), inputs=access, outputs=access[:1])
    values = values_of(graph_of(made, q=shape, k=shape, v=shape))
    assert values["size flops guessed"]
    assert 2 ** values["size flops"] - 1 == pytest.approx(4 * 2 * 8 * 1024 * 1024 * 64 / 2)


def opaque(
    *inputs: tuple[int, ...], out: tuple[int, ...], op: str = "mpmd_map", kind: Any = "custom"
) -> dict[str, float]:
    """Return the numbers of a kernel whose operations say nothing."""
    shapes = {f"a{index}": shape for index, shape in enumerate(inputs)} | {"out": out}
    access = {name: Access(name, 2 * math.prod(shape)) for name, shape in shapes.items()}
    made = Kernel("k", kind, source_ops=(SourceOp(op),), inputs=tuple(access.values())[:-1], outputs=(access["out"],))
    return values_of(graph_of(made, **shapes))


@pytest.mark.parametrize(
    ("shapes", "out", "flops"),
    [
        (((2048, 4096), (4096, 512)), (2048, 512), 2 * 2048 * 4096 * 512),
        (((2048, 4096), (512, 4096)), (2048, 512), 2 * 2048 * 4096 * 512),
        (((2048, 4096), (8, 4096, 512)), (2048, 512), 2 * 2048 * 4096 * 512),  # a matrix for each group of rows
        (((8, 256, 64), (8, 64, 512)), (8, 256, 512), 2 * 8 * 256 * 64 * 512),
    ],
)
@pytest.mark.parametrize(("kind", "op"), [("custom", "mpmd_map"), ("gemm", "aten.mm")])
def test_a_product_without_flops_has_those_of_its_arrays(
    shapes: tuple[tuple[int, ...], ...], out: tuple[int, ...], flops: float, kind: str, op: str
) -> None:
    values = opaque(*shapes, out=out, kind=kind, op=op)
    assert values["size work"] == KINDS.index("gemm") and values["size flops guessed"]
    assert 2 ** values["size flops"] - 1 == pytest.approx(flops)


def test_an_opaque_kernel_of_equal_arrays_is_no_product() -> None:
    values = opaque((1024, 1024), (1024, 1024), out=(1024, 1024))
    assert values["size work"] == KINDS.index("custom") and math.isnan(values["size flops"])


def test_an_opaque_kernel_of_three_heads_arrays_is_an_attention() -> None:
    heads = (2, 1024, 8, 64)
    forward, queries = opaque(heads, heads, heads, out=heads), opaque(heads, heads, heads, heads, out=heads)
    assert forward["size work"] == KINDS.index("attention")
    assert 2 ** forward["size flops"] - 1 == pytest.approx(2 * 2 * 1024 * 8 * 64 * 1024)
    assert queries["size flops"] - forward["size flops"] == pytest.approx(math.log2(1.5))


def test_a_tile_of_several_axes_counts_all_its_rows() -> None:
    launch = Launch(config={"num_warps": 8, "output_tiles": [[1, 16, 1, 1024]]})
    assert 2 ** values_of(graph_of(kernel(plain(), launch=launch)))["tile rows"] - 1 == pytest.approx(16)
