"""Split-K products, the kernels that add up their partial sums, and ragged products that XLA computes densely."""

from dataclasses import replace

import pytest

from xlafuse.compare.graph.analyse import missed_fusions, products
from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.graph.build.from_hlo import from_hlo
from xlafuse.compare.graph.build.xla_reasons import reasons
from xlafuse.compare.graph.findings.collect import findings
from xlafuse.compare.graph.model import FusionGraph, Reason
from xlafuse.compare.graph.render import dot, missed_view, text_view
from xlafuse.compare.sources.target_ceilings import target_ceilings
from xlafuse.hlo import gpu_program

CEILINGS = Ceilings({0.5: 4e12}, {}, launch_us=1.0)


def _split(ops: str = "jit(f)/dot_general", parts: int = 128) -> FusionGraph:
    """A product of XLA in `parts` partial sums, as jax 0.11.2 compiles bf16[16,65536] @ bf16[65536,64] for an H200."""
    graph = from_hlo(gpu_program.parse(f"""HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

%sums (p: f32[{parts},16,64]) -> bf16[16,64] {{
  %p = f32[{parts},16,64]{{2,1,0}} parameter(0)
  %zero = f32[] constant(0)
  %reduce = f32[16,64]{{1,0}} reduce(%p, %zero), dimensions={{0}}, to_apply=%add, metadata={{op_name="{ops}"}}
  ROOT %c = bf16[16,64]{{1,0}} convert(%reduce)
}}

ENTRY %main (a: bf16[{parts},16,512], b: bf16[{parts},512,64]) -> bf16[16,64] {{
  %a = bf16[{parts},16,512]{{2,1,0}} parameter(0)
  %b = bf16[{parts},512,64]{{2,1,0}} parameter(1)
  %dot = f32[{parts},16,64]{{2,1,0}} dot(%a, %b), lhs_batch_dims={{0}}, rhs_batch_dims={{0}},
    lhs_contracting_dims={{2}}, rhs_contracting_dims={{1}}, metadata={{op_name="jit(f)/dot_general"}}
  ROOT %y = bf16[16,64]{{1,0}} fusion(%dot), kind=kInput, calls=%sums
}}
"""))
    text = "the producer is not fusible"
    reason = Reason("dot", "y", "gemm", text, "xla priority-fusion", bytes_saved=8 * parts * 1024)
    return replace(graph, reasons=(reason,))


def test_a_split_product_and_its_sums_are_named() -> None:
    graph = _split()
    (found,) = products.split_products(graph)
    assert found == products.SplitK(0, 1, "dot", 128)
    shown = text_view.text(graph)
    assert "split-K, 128 partial sums of each element" in " ".join(shown.split())
    assert "adds up the partial sums of kernel 1" in " ".join(shown.split())
    assert "partial sums of split-K products: 1 buffer" in shown and "written by one kernel for another" not in shown


def test_partial_sums_are_no_missed_fusion_and_no_largest_intermediate() -> None:
    graph = _split()
    assert missed_fusions.ranked(graph, CEILINGS) == []
    assert "not fusible" not in text_view.render(missed_view.tree(graph, CEILINGS, "h200"))
    answer = missed_view.to_json(graph, CEILINGS, "h200")
    assert answer["missed"] == answer["others"] == []
    assert answer["together"] == {"saves_bytes": 0, "saves_launches": 0, "saves_us": 0.0, "saves_predicted": False}
    assert not {finding.kind for finding in findings({"xla": graph}, None)} & {"largest", "missed"}


@pytest.mark.parametrize("ops", ["jit(f)/reduce_sum", "jit(f)/mul"])
def test_a_sum_of_the_program_is_not_split_k(ops: str) -> None:
    graph = _split(ops)
    assert products.split_products(graph) == []
    assert len(missed_fusions.ranked(graph, CEILINGS)) == 1
    assert {"largest", "missed"} & {finding.kind for finding in findings({"xla": graph}, None)}


GRADIENT = "jit(f)/transpose(jvp())/transpose"  # JAX names the product of a weight's gradient so


def _sliced(sums: str = GRADIENT, product: str = GRADIENT) -> FusionGraph:
    """A product in 16 partial sums. Two kernels make a half each of the result."""
    halves = {"lower": "[0:32], [0:8]", "upper": "[0:32], [8:16]"}
    bodies = "".join(f"""
%{name} (p: f32[32,16,16]) -> bf16[32,8] {{
  %p = f32[32,16,16]{{2,1,0}} parameter(0)
  %zero = f32[] constant(0)
  %reduce = f32[32,16]{{1,0}} reduce(%p, %zero), dimensions={{1}}, to_apply=%add, metadata={{op_name="{sums}"}}
  %c = bf16[32,16]{{1,0}} convert(%reduce)
  ROOT %part = bf16[32,8]{{1,0}} slice(%c), slice={{{half}}}
}}
""" for name, half in halves.items())
    graph = from_hlo(gpu_program.parse(f"""HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}
{bodies}
ENTRY %main (a: bf16[16,32,512], b: bf16[16,512,16]) -> (bf16[32,8], bf16[32,8]) {{
  %a = bf16[16,32,512]{{2,1,0}} parameter(0)
  %b = bf16[16,512,16]{{2,1,0}} parameter(1)
  %dot = f32[32,16,16]{{2,0,1}} dot(%a, %b), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, lhs_contracting_dims={{2}},
    rhs_contracting_dims={{1}}, metadata={{op_name="{product}"}}
  %y = bf16[32,8]{{1,0}} fusion(%dot), kind=kLoop, calls=%lower
  %z = bf16[32,8]{{1,0}} fusion(%dot), kind=kLoop, calls=%upper
  ROOT %t = (bf16[32,8], bf16[32,8]) tuple(%y, %z)
}}
"""))
    assert not graph.unparsed
    return replace(graph, reasons=reasons(graph, ()))


@pytest.mark.parametrize("name", [GRADIENT, "jit(f)/vmap()/dot_general"])
def test_several_kernels_add_up_slices_of_a_product_of_any_name(name: str) -> None:
    graph = _sliced(name, name)
    assert products.split_products(graph) == [products.SplitK(0, 1, "dot", 16), products.SplitK(0, 2, "dot", 16)]
    shown = " ".join(text_view.text(graph).split())
    assert "split-K, 16 partial sums of each element" in shown and shown.count("adds up the partial sums of") == 2
    assert missed_fusions.ranked(graph, CEILINGS) == []
    assert not {finding.kind for finding in findings({"xla": graph}, None)} & {"largest", "missed", "duplicate"}
    assert graph.reasons and "not fused" not in dot.dot(graph)


def test_a_half_of_a_sum_reads_a_half_of_the_partial_sums() -> None:
    """As XLA's code does, which computes the elements of the slice alone."""
    for kernel in (_sliced().kernels or ())[1:]:
        assert (kernel.bytes_read, kernel.bytes_written) == (4 * 32 * 16 * 8, 2 * 32 * 8)


def test_a_transposed_product_is_not_split_k_because_the_program_sums_it() -> None:
    graph = _sliced("jit(f)/transpose(jvp())/reduce_sum")
    assert products.split_products(graph) == []
    assert len(missed_fusions.ranked(graph, CEILINGS)) == 2


def test_sums_without_a_name_are_not_said_to_be_split_k() -> None:
    assert products.split_products(_sliced("", "")) == []


def test_a_product_that_cublas_splits_is_named() -> None:
    (product, _) = _split().kernels or ()
    ran = replace(product, facts={"with": {"_ZN8cublasLt19splitKreduce_kernel": 1}})
    assert "split-K, its partial sums in the library's workspace" in text_view.facts(ran)
    assert not any("split-K" in words for words in text_view.facts(product))


GROUPS, ROWS, WIDTH, OUT = 8, 4096, 1024, 2048
DENSE = (
    f"%y = bf16[{ROWS},{OUT}]{{1,0}} dot(%masked, %w), lhs_contracting_dims={{1,2}}, rhs_contracting_dims={{0,1}}"
)
CUBLAS = f'%y = bf16[{ROWS},{OUT}]{{1,0}} custom-call(%masked, %w), custom_call_target="__cublas$lt$matmul"'
GROUPED = f'%y = bf16[{ROWS},{OUT}]{{1,0}} custom-call(%masked, %w), custom_call_target="__cublas$lt$groupedMatmul"'


def _ragged(product: str, op: str = "ragged_dot_general", sizes: int = GROUPS) -> FusionGraph:
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
    graph = _ragged(product)
    assert products.dense_ragged_products(graph) == {1: GROUPS}
    assert "a ragged product computed densely, 8 times its FLOPs" in " ".join(text_view.text(graph).split())


def test_the_finding_prices_the_superfluous_flops(ceilings: Ceilings) -> None:
    graph = _ragged(DENSE)
    (found,) = [each for each in findings({"xla": graph}, ceilings) if each.kind == "dense ragged product"]
    flops = 2 * ROWS * GROUPS * WIDTH * OUT
    assert "f.py:3 densely, each row with every group: 137 GFLOP, 8 times as many as it needs." in found.text
    assert found.us == pytest.approx(flops * 7 / 8 / ceilings.rate("bf16") * 1e6)


def test_groups_of_unknown_number_give_no_factor_and_no_price(ceilings: Ceilings) -> None:
    graph = _ragged(DENSE, sizes=5)
    assert products.dense_ragged_products(graph) == {1: None}
    (found,) = [each for each in findings({"xla": graph}, ceilings) if each.kind == "dense ragged product"]
    assert found.us is None


def test_an_integer_for_each_row_is_not_the_number_of_groups() -> None:
    graph = _ragged(DENSE)
    rows = replace(graph.buffers[0], name="order", shape=(ROWS,), dtype="s32")
    assert products.dense_ragged_products(replace(graph, buffers=(*graph.buffers, rows))) == {1: GROUPS}


@pytest.mark.parametrize(("product", "op"), [(DENSE, "dot_general"), (GROUPED, "ragged_dot_general")])
def test_other_products_are_not_ragged_and_dense(product: str, op: str) -> None:
    assert products.dense_ragged_products(_ragged(product, op)) == {}
