"""Ragged products that XLA computes densely."""

from dataclasses import replace

import pytest

from xlafuse.compare.graph.analyse.dense_ragged import dense_ragged_products
from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.graph.build.from_hlo import from_hlo
from xlafuse.compare.graph.findings.collect import findings
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.graph.render import text_view
from xlafuse.compare.sources.target_ceilings import target_ceilings
from xlafuse.hlo import gpu_program

GROUPS, ROWS, WIDTH, OUT = 8, 4096, 1024, 2048
DENSE = (
    f"%y = bf16[{ROWS},{OUT}]{{1,0}} dot(%masked, %w), lhs_contracting_dims={{1,2}}, rhs_contracting_dims={{0,1}}"
)
CUBLAS = f'%y = bf16[{ROWS},{OUT}]{{1,0}} custom-call(%masked, %w), custom_call_target="__cublas$lt$matmul"'
GROUPED = f'%y = bf16[{ROWS},{OUT}]{{1,0}} custom-call(%masked, %w), custom_call_target="__cublas$lt$groupedMatmul"'


def _graph(product: str, op: str = "ragged_dot_general", sizes: int = GROUPS) -> FusionGraph:
    """jax.lax.ragged_dot as XLA compiles it: the rows, masked for each group, times all weights."""
    return from_hlo(gpu_program.parse(f"""HloModule jit_f, is_scheduled=true

ENTRY %main (x: bf16[{ROWS},{WIDTH}], w: bf16[{GROUPS},{WIDTH},{OUT}], g: s32[{sizes}]) -> bf16[{ROWS},{OUT}] {{
  %x = bf16[{ROWS},{WIDTH}]{{1,0}} parameter(0)
  %w = bf16[{GROUPS},{WIDTH},{OUT}]{{2,1,0}} parameter(1)
  %g = s32[{sizes}]{{0}} parameter(2)
  %masked = bf16[{ROWS},{GROUPS},{WIDTH}]{{2,1,0}} custom-call(%x, %g), custom_call_target="mask"
  ROOT {product}, metadata={{op_name="jit(f)/{op}" source_file="f.py" source_line=3}}
}}
"""))


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return target_ceilings("h200")


@pytest.mark.parametrize("product", [DENSE, CUBLAS])
def test_a_dense_ragged_product_is_named_with_its_factor(product: str) -> None:
    graph = _graph(product)
    assert dense_ragged_products(graph) == {1: GROUPS}
    assert "a ragged product computed densely, 8 times its FLOPs" in " ".join(text_view.text(graph).split())


def test_the_finding_prices_the_superfluous_flops(ceilings: Ceilings) -> None:
    graph = _graph(DENSE)
    (found,) = [each for each in findings({"xla": graph}, ceilings) if each.kind == "dense ragged product"]
    flops = 2 * ROWS * GROUPS * WIDTH * OUT
    assert "f.py:3 densely, each row with every group: 137 GFLOP, 8 times as many as it needs." in found.text
    assert found.us == pytest.approx(flops * 7 / 8 / ceilings.rate("bf16") * 1e6)


def test_groups_of_unknown_number_give_no_factor_and_no_price(ceilings: Ceilings) -> None:
    graph = _graph(DENSE, sizes=5)
    assert dense_ragged_products(graph) == {1: None}
    (found,) = [each for each in findings({"xla": graph}, ceilings) if each.kind == "dense ragged product"]
    assert found.us is None


def test_an_integer_for_each_row_is_not_the_number_of_groups() -> None:
    graph = _graph(DENSE)
    rows = replace(graph.buffers[0], name="order", shape=(ROWS,), dtype="s32")
    assert dense_ragged_products(replace(graph, buffers=(*graph.buffers, rows))) == {1: GROUPS}


@pytest.mark.parametrize(("product", "op"), [(DENSE, "dot_general"), (GROUPED, "ragged_dot_general")])
def test_other_products_are_not_ragged_and_dense(product: str, op: str) -> None:
    assert dense_ragged_products(_graph(product, op)) == {}
