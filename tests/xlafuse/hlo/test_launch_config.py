"""Configurations that XLA states in a kernel's backend_config, and the layouts of operands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xlafuse.hlo import gpu_program
from xlafuse.hlo.gpu_program import Launch

PRODUCT = """HloModule m, is_scheduled=true

%inside (p: bf16[64,32], q: bf16[32,16]) -> bf16[64,16] {{
  %p = bf16[64,32]{{1,0}} parameter(0)
  %q = bf16[32,16]{{0,1}} parameter(1)
  ROOT %d = bf16[64,16]{{1,0}} dot(%p, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{dot}
}}

ENTRY %main (x: bf16[64,32], w: bf16[16,32]) -> bf16[64,16] {{
  %x = bf16[64,32]{{1,0}} parameter(0)
  %w = bf16[16,32]{{1,0}} parameter(1)
  %t = bf16[32,16]{{0,1}} bitcast(%w)
  ROOT %f = bf16[64,16]{{1,0}} fusion(%x, %t), kind=kCustom, calls=%inside{config}
}}
"""
BLOCK = {
    "num_warps": "4", "output_tiles": [{"sizes": ["16", "8"]}, {"sizes": ["1"]}], "num_stages": 2, "num_ctas": 1,
    "is_tma_allowed": True,
}


def launch(config: Any = None, dot: Any = None, *, quoted: bool = False) -> Launch:
    def attribute(value: Any) -> str:
        text = json.dumps(value)
        return "" if value is None else f", backend_config={json.dumps(text) if quoted else text}"

    text = PRODUCT.format(config=attribute(config), dot=attribute(dot))
    (found,) = gpu_program.program(gpu_program.parse(text)).launches
    return found


@pytest.mark.parametrize("quoted", [False, True])  # as older versions write it
@pytest.mark.parametrize(
    ("config", "dot", "expected"),
    [
        (
            {"fusion_backend_config": {"kind": "__triton", "block_level_fusion_config": BLOCK}}, {"sizes": ["32"]},
            {"num_warps": 4, "output_tiles": [[16, 8], [1]], "num_stages": 2, "num_ctas": 1, "is_tma_allowed": True,
             "contracting_tiles": [[32]]},
        ),
        (
            {"fusion_backend_config": {"triton_gemm_config": {"block_m": "64", "block_k": "32", "split_k": "1"}}}, None,
            {"block_m": 64, "block_k": 32, "split_k": 1},
        ),
        ({"gemm_backend_config": {"selected_algorithm": "3", "epilogue": "DEFAULT"}}, None, {"selected_algorithm": 3}),
        ({"gemm_backend_config": {"epilogue": "DEFAULT"}}, None, {}),
        ({"fusion_backend_config": {"kind": "__triton"}}, {"sizes": ["32"]}, {}),
        ({"fusion_backend_config": [1], "gemm_backend_config": "x"}, None, {}),
        (None, None, {}),
    ],
)
def test_a_configuration_is_as_the_backend_config_states_it(
    config: Any, dot: Any, expected: dict[str, Any], quoted: bool
) -> None:
    assert launch(config, dot, quoted=quoted).config == expected


def test_a_kernel_is_given_the_layout_of_its_operands() -> None:
    """A bitcast gives the same memory another shape."""
    found = launch()
    shapes = [access.shape for access in (*found.reads, *found.writes)]
    assert [shape and (shape.dims, shape.strides) for shape in shapes] == [
        ((64, 32), (32, 1)), ((32, 16), (1, 32)), ((64, 16), (16, 1))
    ]


@pytest.mark.parametrize(
    ("array", "strides"),
    [
        ("f32[4,3,2]{2,1,0}", (6, 2, 1)), ("f32[4,3,2]{0,2,1}", (1, 8, 4)), ("f32[]", ()), ("f32[5]{0}", (1,)),
        ("f32[4,3]", None), ("f32[4,3]{1}", None), ("f32[4,128]{1,0:T(8,128)}", None), ("f32[4,3]{0,1:S(5)}", (1, 4)),
        ("f32[?,3]{1,0}", None), ("f32[4,0]{1,0}", (0, 1)),
    ],
)
def test_strides_are_those_of_the_layout(array: str, strides: tuple[int, ...] | None) -> None:
    text = f"HloModule m\nENTRY %main (x: {array}) -> {array} {{\n  ROOT %x = {array} parameter(0)\n}}\n"
    module = gpu_program.parse(text)
    (parameter,) = module.computations["main"].instructions.values()
    assert not module.unparsed and parameter.shapes[0].strides == strides


def test_two_views_of_one_buffer_have_no_common_layout() -> None:
    text = PRODUCT.format(config="", dot="").replace("fusion(%x, %t)", "fusion(%v, %t)").replace(
        "%x = bf16[64,32]{1,0} parameter(0)", "%v = bf16[64,32]{1,0} bitcast(%w)"
    ).replace("x: bf16[64,32], w: bf16[16,32]", "w: bf16[16,32]").replace(
        "%w = bf16[16,32]{1,0} parameter(1)", "%w = bf16[16,32]{1,0} parameter(0)"
    )
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "%v =" in line)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    (found,) = gpu_program.program(gpu_program.parse("\n".join(lines))).launches
    assert [access.shape for access in found.reads] == [None]
