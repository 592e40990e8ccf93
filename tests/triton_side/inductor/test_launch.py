"""Grids, configurations and layouts from the text of Inductor's code."""

from __future__ import annotations

from typing import Any

import pytest

from xlafuse.triton_side.inductor.launch import configuration, grid, layouts_in
from xlafuse.triton_side.inductor.output_code import read_code

CODE = """# AOT ID: ['0_inference']
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
@triton_heuristics.pointwise(
    size_hints={'x': 4096},
    inductor_meta={'grid_type': 'Grid1D', 'mutated_arg_names': []},
)
@triton.jit
def triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')

triton_tem_fused_mm_1 = async_compile.triton('triton_tem_fused_mm_1', '''
@triton_heuristics.template(
    inductor_meta={'grid_type': 'FixedGrid', 'fixed_grid': ['_grid_0', '_grid_1', '_grid_2']},
)
@triton.jit
def triton_tem_fused_mm_1(arg_A, arg_B, out_ptr0):
    pass
''', device_str='cuda')

class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        assert_size_stride(arg0_1, (64, 32), (1, 64), 'input')
        assert_size_stride(arg1_1, (32, 64), (64, 1), 'input')
        buf0 = empty_strided_cuda((64, 32), (32, 1), torch.float32)
        triton_poi_fused_0.run(arg0_1, buf0, 2048, stream=stream0)
        buf1 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
        triton_tem_fused_mm_1.run(buf0, arg1_1, buf1, 8, 2, 1, stream=stream0)
        buf2 = reinterpret_tensor(buf0, (32, 64), (64, 1), 0); del buf0  # reuse
        extern_kernels.mm(reinterpret_tensor(buf1, (64, 64), (1, 64), 0), arg1_1, out=buf2)
        return (buf2, )
"""


@pytest.mark.parametrize(
    ("kind", "sizes", "config", "last", "expected"),
    [
        ("Grid1D", {"xnumel": 1000}, {"XBLOCK": 64}, (), (16, 1, 1)),
        ("Grid1D", {"xnumel": 1000, "r0_numel": 64}, {"R0_BLOCK": 64}, (), (1000, 1, 1)),  # a row a block
        ("Grid2D", {"xnumel": 100, "ynumel": 33}, {"XBLOCK": 10, "YBLOCK": 16}, (), (10, 3, 1)),
        ("Grid3D", {"xnumel": 8, "ynumel": 8, "znumel": 5}, {"XBLOCK": 8, "YBLOCK": 4, "ZBLOCK": 1}, (), (1, 2, 5)),
        ("Grid2DWithYZOverflow", {"xnumel": 1, "ynumel": 100_000}, {"XBLOCK": 1, "YBLOCK": 1}, (), (1, 50_000, 2)),
        ("CooperativeReductionGrid", {"xnumel": 6}, {"RSPLIT": 32, "XBLOCK": 2}, (), (32, 3, 1)),
        ("MixOrderReductionGrid", {"xnumel": 100}, {"RSPLIT_SIZE": 32, "XBLOCK": 1}, (), (4, 1, 1)),
        ("SplitScanGrid", {"xnumel": 6, "r0_numel": 1000}, {"R0_BLOCK": 256}, (), (4, 6, 1)),
        ("FixedGrid", {}, {}, (8, 2, 1), (8, 2, 1)),
        ("FixedGrid", {}, {}, (), None),
        ("Grid1D", {}, {"XBLOCK": 64}, (), None),  # a size that is no constant
        ("SequentialComboKernelGrid", {"xnumel": 64}, {"XBLOCK": 64}, (), None),
        ("", {"xnumel": 64}, {"XBLOCK": 64}, (), None),
    ],
)
def test_a_grid_follows_inductors_rule(
    kind: str, sizes: dict[str, int], config: dict[str, Any], last: tuple[int, ...], expected: Any
) -> None:
    assert grid(kind, sizes, config, last) == expected


@pytest.mark.parametrize(
    "kind", ["Grid1D", "Grid2D", "Grid3D", "Grid2DWithYZOverflow", "CooperativeReductionGrid", "SplitScanGrid"]
)
def test_rules_are_those_of_the_installed_inductor(kind: str) -> None:
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    config = {"XBLOCK": 1 if kind == "SplitScanGrid" else 32, "YBLOCK": 8, "ZBLOCK": 4, "RSPLIT": 16, "R0_BLOCK": 64}
    sizes = {"xnumel": 1000, "ynumel": 777_777, "znumel": 63, "r0_numel": 1001}
    rule = heuristics.GridExpr.from_meta({"grid_type": kind}, config)
    assert grid(kind, sizes, config, ()) == rule.eval_slow(sizes)


def test_a_configuration_by_name() -> None:
    text = "XBLOCK: 64, GROUP: True, num_warps: 4, num_stages: 1, maxnreg: None"
    assert configuration(text) == {"XBLOCK": 64, "GROUP": True, "num_warps": 4, "num_stages": 1}
    assert configuration(None) == configuration("") == {}


def test_grids_and_strides_of_a_code() -> None:
    code = read_code(CODE)
    assert not code.unparsed
    pointwise, template, product = code.calls
    assert code.grid(pointwise, "XBLOCK: 128, num_warps: 4") == (16, 1, 1)
    assert code.grid(pointwise, None) is None  # without its configuration
    assert code.grid(template, "BLOCK_M: 64, num_warps: 4") == (8, 2, 1)
    assert code.grid(product, None) is None
    assert code.strides == {"arg0_1": (1, 64), "arg1_1": (64, 1), "buf0": (32, 1), "buf1": (64, 1), "buf2": (64, 1)}
    assert product.layouts is not None
    assert product.layouts["buf1"] == ((64, 64), (1, 64)) and product.layouts["arg1_1"] is None
    assert pointwise.layouts is None


def test_views_of_a_call() -> None:
    view, other = "reinterpret_tensor(a, (4, 2), (1, 4), 0)", "reinterpret_tensor(a, (2, 4), (4, 1), 0)"
    found = layouts_in(f"extern_kernels.mm({view}, b, out=c)")
    assert found["a"] == ((4, 2), (1, 4)) and found["b"] is found["c"] is None
    assert "a" not in layouts_in(f"extern_kernels.mm({view}, {other}, out=c)")
    assert "a" not in layouts_in(f"extern_kernels.mm({view}, a, out=c)")
    assert "a" not in layouts_in("extern_kernels.mm(reinterpret_tensor(a, (s0, 2), (2, 1), 0), b, out=c)")
