"""The languages of a hand-written implementation's products, in its record."""

from __future__ import annotations

from graph_builder import graph, kernel

from xlafuse.compare.graph.analyse import summary

KERNELS = (
    kernel("aten.mm.default", "gemm", "qkv:aten.mm", "x w", "qkv"),
    kernel("aten.addmm.default", "gemm", "up:aten.addmm", "h v b", "pre"),
    kernel("attend", "custom", "scores:dot softmax:exp values:dot", "qkv", "out", facts={"language": "triton"}),
    kernel("sum", "custom", "norm:reduce_sum", "out", "s", facts={"language": "triton"}),
    kernel("dw", "custom", "qkv:dot", "out x", "dw", phase="backward", facts={"language": "cuda"}),
)


def test_a_record_says_who_computes_the_products_of_which_stages() -> None:
    found = summary.summary(graph(*KERNELS, compiler="triton"), ("forward", "backward"))
    assert found["forward"].products == {"cuBLAS": ["qkv", "up"], "triton": ["scores", "values"]}
    assert found["backward"].products == {"cuda": ["qkv"]}


def test_where_nobody_chose_or_there_is_none_nothing_is_said() -> None:
    assert not summary.summary(graph(*KERNELS), ["forward"])["forward"].products
    assert not summary.summary(graph(KERNELS[3], compiler="triton"), ["forward"])["forward"].products
