"""The summary of a graph in its record, and its fingerprint: work and configuration of kernels, not their names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from graph_builder import graph as made
from graph_builder import kernel

from xlafuse.compare.graph.analyse.summary import fingerprint, summary
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Launch, SourceOp

OPS = (SourceOp("mul", "scale", "a.py:1"), SourceOp("add", "shift", "a.py:2"))
KERNEL = Kernel(
    "fusion.3", "elementwise", source_ops=OPS, inputs=(Access("x", 8),), outputs=(Access("y", 8),),
    provenance="replayed", launch=Launch((4, 1, 1), registers=32), facts={"fusion_kind": "kLoop"},
)
WRITTEN = replace(KERNEL, facts={"language": "triton"})
SECOND = replace(KERNEL, name="copy", kind="copy", source_ops=(), inputs=(Access("y", 8),), outputs=(Access("z", 8),))


def graph(*kernels: Kernel) -> FusionGraph:
    buffers = tuple(Buffer(name, (4,), "bf16", 8, "intermediate") for name in "xyz")
    return FusionGraph("xla", "xla", kernels=kernels, buffers=buffers)


def test_names_lines_and_what_the_assembler_chose_do_not_count() -> None:
    other = replace(
        KERNEL, name="loop_fusion", source_ops=tuple(replace(op, line="b.py:9", site="s") for op in reversed(OPS)),
        launch=replace(KERNEL.launch, registers=40), provenance="device", device_time_us=3.0,
    )
    assert fingerprint(graph(other, SECOND)) == fingerprint(graph(KERNEL, SECOND))


def test_a_launch_counts_where_its_author_fixed_it() -> None:
    """A GPU records the launch of each kernel, and a compiler may not state it."""
    launches = Launch((4, 1, 1)), Launch((8, 1, 1)), Launch((4, 1, 1), config={"num_warps": 8})
    assert len({fingerprint(graph(replace(KERNEL, launch=launch))) for launch in launches}) == 1
    assert len({fingerprint(graph(replace(WRITTEN, launch=launch))) for launch in launches}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "reduction"}, {"phase": "backward"}, {"launches": 2}, {"inputs": (Access("x", 6),)},
        {"outputs": (Access("y", None),)}, {"source_ops": OPS[:1]},
        {"facts": {"fusion_kind": "kInput"}}, {"source_ops": (replace(OPS[0], stage="other"), OPS[1])},
    ],
)
def test_work_and_configuration_count(change: dict[str, Any]) -> None:
    assert fingerprint(graph(replace(KERNEL, **change), SECOND)) != fingerprint(graph(KERNEL, SECOND))


def test_the_order_of_kernels_counts() -> None:
    assert fingerprint(graph(SECOND, KERNEL)) != fingerprint(graph(KERNEL, SECOND))


def test_a_configuration_that_a_gpu_would_choose_gives_no_fingerprint() -> None:
    guess = replace(KERNEL, provenance="not autotuned")
    assert fingerprint(graph(guess, SECOND)) is None
    assert fingerprint(FusionGraph("xla", "xla", kernels=None)) is None
    known = {"config": "XBLOCK: 64"}
    same = [fingerprint(graph(replace(KERNEL, provenance=p, facts=known))) for p in ("not autotuned", "device")]
    assert same[0] is not None and same[0] == same[1]
    assert fingerprint(graph(replace(KERNEL, facts={"config": "XBLOCK: 32"}))) != same[0]


WRITTEN_BY_HAND = (
    kernel("aten.mm.default", "gemm", "qkv:aten.mm", "x w", "qkv"),
    kernel("aten.addmm.default", "gemm", "up:aten.addmm", "h v b", "pre"),
    kernel("attend", "custom", "scores:dot softmax:exp values:dot", "qkv", "out", facts={"language": "triton"}),
    kernel("sum", "custom", "norm:reduce_sum", "out", "s", facts={"language": "triton"}),
    kernel("dw", "custom", "qkv:dot", "out x", "dw", phase="backward", facts={"language": "cuda"}),
)


def test_a_record_says_who_computes_the_products_of_which_stages() -> None:
    found = summary(made(*WRITTEN_BY_HAND, compiler="triton"), ("forward", "backward"))
    assert found["forward"].products == {"cuBLAS": ["qkv", "up"], "triton": ["scores", "values"]}
    assert found["backward"].products == {"cuda": ["qkv"]}


def test_where_nobody_chose_or_there_is_none_nothing_is_said() -> None:
    assert not summary(made(*WRITTEN_BY_HAND), ["forward"])["forward"].products
    assert not summary(made(WRITTEN_BY_HAND[3], compiler="triton"), ["forward"])["forward"].products
