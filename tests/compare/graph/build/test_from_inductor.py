"""The fusion graph of what Inductor made, from a capture and from its dumps; of a tiny MLP with all its findings."""

import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from full_marks import full

from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.graph.analyse.totals import totals
from xlafuse.compare.graph.build.from_inductor import PHRASES, code_of, from_inductor
from xlafuse.compare.graph.model import REASONS, FusionGraph, Kernel
from xlafuse.compare.graph.render import text_view
from xlafuse.triton_side.inductor.dump import read
from xlafuse.triton_side.inductor.graph import (
    IS_CAUSAL,
    Buffer,
    Call,
    CompiledGraph,
    GraphBreak,
    Memory,
    Program,
    Refusal,
    SourceNode,
    flops,
)
from xlafuse.triton_side.inductor.graph import Kernel as InductorKernel
from xlafuse.triton_side.inductor.ir_text import read_fx

ROOT = Path(__file__).parents[4]
DATA = ROOT / "tests/data/inductor"
DUMPS = [f"torch-{version}/{kind}" for version in ("2.11.0", "2.13.0") for kind in ("debug", "trace")]
MLP = "triton_side/blocks/swiglu_mlp.py"


@pytest.fixture(scope="module", params=DUMPS)
def mlp(request: pytest.FixtureRequest) -> FusionGraph:
    return from_inductor(read(DATA / request.param), target="h200", versions={"torch": "2"})


def kernel(graph: FusionGraph, **wanted: Any) -> Kernel:
    found = [k for k in graph.kernels or () if all(getattr(k, name) == value for name, value in wanted.items())]
    assert len(found) == 1, (wanted, [k.name for k in found])
    return found[0]


# The graph of the MLP


def test_inductor_gave_the_residual_to_a_gemm(mlp):
    addmm = kernel(mlp, name="extern_kernels.addmm")
    assert addmm.kind == "gemm" and addmm.runtime_name is None
    assert [(op.op, op.stage, op.line) for op in addmm.source_ops] == [
        ("aten.mm", "down", f"{MLP}:34"), ("aten.add", "residual", f"{MLP}:36"),
    ]
    assert addmm.flops == 2 * 64 * 256 * 128


def test_the_silu_chain_is_one_backward_kernel_with_two_outputs(mlp):
    (silu,) = [k for k in mlp.kernels if k.phase == "backward" and "act" in k.stages]
    assert silu.kind == "elementwise" and len(silu.outputs) == 2
    assert silu.runtime_name == silu.name == "triton_poi_fused_add_mul_sigmoid_sigmoid_backward_0"


def test_forward_operations_computed_again_in_backward(mlp):
    again = {op.site for k in mlp.kernels for op in k.source_ops if op.rematerialized}
    assert again == {"sigmoid", "mul_3", "convert_element_type", "mul_1", "convert_element_type_1"}
    assert again < {op.site for k in mlp.kernels if k.phase == "forward" for op in k.source_ops}
    assert not any(op.backward for k in mlp.kernels if k.phase == "forward" for op in k.source_ops)


def test_a_second_step_of_an_operation_that_forward_computes_is_a_repetition():
    def graph_of(part: str, *names: str) -> CompiledGraph:
        nodes = tuple(SourceNode(name, "aten.var_mean", "norm", None, (), place="/home/me/a.py:3 f") for name in names)
        computed = dataclasses.replace(call("k", "x", "c", "op0"), sources=nodes)
        graph = program([computed], []).graphs[0]
        return dataclasses.replace(graph, part=part)

    graph = from_inductor(Program((graph_of("forward", "var_mean"), graph_of("backward", "var_mean#2", "add"))))
    assert [op.rematerialized for kernel in graph.kernels for op in kernel.source_ops] == [False, True, False]
    assert graph.kernels[0].source_ops[0].place == "/home/me/a.py:3 f"


def test_residuals_are_one_buffer_across_both_parts(mlp):
    assert {buffer.name: (buffer.shape, buffer.dtype, buffer.bytes) for buffer in mlp.saved} == {
        "buf1": ((64, 1), "f32", 256),
        "buf2": ((64, 128), "bf16", 16384),
        "buf3": ((64, 256), "bf16", 32768),
        "buf4": ((64, 256), "bf16", 32768),
        "buf5": ((64, 256), "bf16", 32768),
    }
    for name in ("buf3", "primals_5"):  # a residual, and a weight that forward hands on as a view
        assert {mlp.kernels[index].phase for index in mlp.consumers[name]} == {"forward", "backward"}
    assert mlp.buffer["primals_5"].role == "input"
    assert {b.name for b in mlp.buffers if b.role == "output" and b.name in mlp.producers} >= {"buf6", "buf10", "buf8"}
    assert mlp.buffer["tangents_1"].role == "input"


def test_bytes_and_flops(mlp):
    # The numbers of Inductor's count_bytes for these two graphs, as the test of all blocks below has them.
    totals = {"forward": 0, "backward": 0}
    for k in mlp.kernels:
        totals[k.phase] += k.bytes_read + k.bytes_written
    assert totals == {"forward": 492032, "backward": 984064}
    assert [k.flops for k in mlp.kernels if k.kind == "gemm"] == [2 * 64 * 128 * 256] * 9
    norm = mlp.kernels[0]
    assert norm.flops == 6 * 64 * 128 + 2 * 64  # mean counts the elements it takes


def test_names_are_unique_and_the_json_holds_it_all(mlp):
    names = [k.name for k in mlp.kernels]
    assert len(set(names)) == len(names)
    assert [k.facts["call"] for k in mlp.kernels].count("extern_kernels.mm") == 8
    assert store.from_json(json.loads(json.dumps(store.to_json(mlp)))) == mlp
    assert (mlp.compiler, mlp.target, mlp.unparsed) == ("inductor", "h200", ())


def test_every_edge_to_a_library_product_has_a_reason(mlp):
    pairs = {(reason.producer, reason.consumer): reason for reason in mlp.reasons}
    reason = pairs["triton_poi_fused_mul_sigmoid_1", "extern_kernels.addmm"]
    assert (reason.code, reason.origin) == ("gemm", "inferred")
    assert reason.bytes_saved == 32768  # the read alone: backward wants the buffer too


def test_the_second_kernel_of_a_split_reduction_repeats_nothing(artifacts):
    graph = from_inductor(read(artifacts / "swiglu_mlp-llama-8b-bf16-train-inductor.zip"))
    second = kernel(graph, name="triton_per_fused__to_copy_add_mul_sum_3")
    assert [(op.op, op.site) for op in second.source_ops] == [("aten.sum", "sum_1#2")]
    assert second.flops == 16 * 4096
    assert second.provenance == "compiled" and "XBLOCK" in second.facts["config"]


def test_a_library_call_without_a_formula_leaves_the_totals_incomplete():
    """A whole layer may be behind it, with arrays between its kernels."""
    layer = SourceNode("l", "aten._transformer_encoder_layer_fwd", None, None, (), shapes=((5, 5),))
    made = call("torch.ops.aten._transformer_encoder_layer_fwd.default", "x", "c", "op0", kind="library")
    made = dataclasses.replace(
        made, kernel=dataclasses.replace(made.kernel, is_extern=True), sources=(layer,), nodes=(layer,)
    )
    graph = from_inductor(program([made], []))
    ceilings = Ceilings({0.5: 1e12}, {})
    found = totals(graph, ceilings=ceilings)
    assert graph.kernels[0].flops is None
    assert (found.declared.unknown, found.fusion_efficiency, found.roofline_time_us.unknown) == (1, None, 1)
    traffic, roofline = text_view.totals_lines(graph, ceilings)
    assert "at least 200 B" in traffic and "at least" in roofline


# Why not


def call(name: str, reads: str, writes: str, operations: str, *, kind: str = "elementwise") -> Call:
    def buffers(names: str) -> tuple[Buffer, ...]:
        return tuple(Buffer(each, 100) for each in names.split())

    return Call(
        InductorKernel(
            name, "forward", kind, (), (), (), (), buffers(reads), buffers(writes), False, kind == "gemm", "", None
        ),
        sources=(), nodes=(), operations=frozenset(operations.split()),
    )


def program(calls: list[Call], refusals: list[tuple[str, str, str]], outputs: str = "c") -> Program:
    names = {b.name for each in calls for b in (*each.kernel.inputs, *each.kernel.outputs)}
    said = tuple(Refusal(frozenset(a.split()), frozenset(b.split()), text) for a, b, text in refusals)
    memory = {name: Memory(name, (25,), "f32", 100) for name in sorted(names)}
    graph = CompiledGraph("forward", 0, tuple(calls), memory, ("x",), tuple(outputs.split()), said)
    return Program((graph,))


def test_an_answer_to_the_question_the_wrong_way_round_is_no_reason():
    calls = [call("k1", "x", "a", "op0"), call("k2", "a", "c", "op1")]
    said = [("op0", "op1", "tiling mismatch (1, 2, 3)"), ("op1", "op0", "node1 must go before node2")]
    (reason,) = from_inductor(program(calls, said)).reasons
    assert (reason.code, reason.text) == ("layout", "tiling mismatch (1, 2, 3)")


def test_nothing_compiled_is_an_error():
    with pytest.raises(ValueError, match="nothing was compiled"):
        from_inductor(Program(()))


def test_what_inductor_said_of_most_of_two_kernels_is_the_reason():
    graph = from_inductor(
        program(
            [call("k1", "x", "a", "op0 op1"), call("k2", "a", "c", "op2 op3")],
            [
                ("op0 op1", "op2 op3", "numel/rnumel mismatch (reduce) (4, 1), (8, 2)"),
                ("op0", "op2", "no shared data"),
                ("op0", "op1", "intermediate nodes between node1 & node2"),  # in one kernel after all
            ],
        )
    )
    (reason,) = graph.reasons
    assert (reason.producer, reason.consumer, reason.code, reason.origin) == ("k1", "k2", "shape", "inductor")
    assert reason.text == "numel/rnumel mismatch (reduce) (4, 1), (8, 2)"
    assert reason.bytes_saved == 200  # used by no other kernel


def test_an_edge_that_nobody_spoke_of_is_a_barrier_or_without_a_reason():
    calls = [call("k1", "x", "a", "op0"), call("mm", "a", "b", "op1", kind="gemm"), call("k2", "a b", "c", "op2")]
    reasons = {(r.producer, r.consumer): r for r in from_inductor(program(calls, [])).reasons}
    assert reasons["k1", "mm"].code == reasons["mm", "k2"].code == "gemm"
    silent = reasons["k1", "k2"]
    assert (silent.code, silent.text, silent.origin) == ("other", "Inductor gave no reason", "inferred")
    assert silent.bytes_saved == 100  # mm needs what k1 wrote too


def test_inductors_words_about_shared_data_stand_as_they_are():
    calls = [call("k1", "x", "a", "op0"), call("k2", "x", "c", "op1"), call("k3", "y", "d", "op2")]
    said = [("op0", "op1", "no shared data"), ("op0", "op2", "no shared data")]
    (reason,) = from_inductor(program(calls, said, outputs="a c d")).reasons
    # Inductor counts as shared what both read by the same expression; the pair that shares nothing is no reason.
    assert (reason.producer, reason.consumer, reason.bytes_saved) == ("k1", "k2", 100)
    assert (reason.code, reason.text, reason.origin) == ("no-shared-data", "no shared data", "inductor")


def test_a_score_below_the_threshold_says_nothing_of_the_order_in_memory():
    calls = [call("k1", "x", "a", "op0"), call("k2", "a", "c", "op1")]
    (reason,) = from_inductor(program(calls, [("op0", "op1", "score_fusion_memory_threshold")])).reasons
    assert (reason.code, reason.text, reason.bytes_saved) == ("unprofitable", "score_fusion_memory_threshold", 200)


def test_a_graph_break_is_a_reason_with_a_line():
    calls = [call("k1", "x", "c", "op0")]
    cut = Program(program(calls, []).graphs, (GraphBreak("Failed to trace builtin operator", "/home/me/model.py:10"),))
    (reason,) = from_inductor(cut).reasons
    assert (reason.code, reason.line, reason.producer) == ("graph-break", "/home/me/model.py:10", "")


def test_every_phrase_leads_to_a_known_word():
    assert {code for _, code in PHRASES} < set(REASONS)
    assert code_of("something that a later version says") == "other"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("Fusion will increase peak memory", "peak-memory"),
        ("Nodes are too far away. Fusing them may increase peak memory.", "peak-memory"),
        ("prologue fusion will not increase amount of bytes read in kernel", "unprofitable"),
    ],
)
def test_a_fusion_that_takes_more_memory_is_another_matter_than_one_that_gains_nothing(said: str, code: str):
    assert code_of(said) == code


def test_all_that_the_installed_inductor_can_say_is_known():
    torch = pytest.importorskip("torch")
    folder = Path(torch.__file__).parent / "_inductor"
    files = ("scheduler.py", "choices.py", "codegen/simd.py")
    spoken = [
        text for file in files
        for text in re.findall(r'(?:why|WhyNoFuse\(\w+, \w+\))\(\s*"([^"]+)"', (folder / file).read_text())
    ]
    assert len(spoken) > 30
    unknown = {text for text in spoken if not any(re.search(phrase, text) for phrase, _ in PHRASES)}
    assert unknown == set()


# FLOPs


@pytest.mark.parametrize(
    ("op", "taken", "made", "expected"),
    [
        ("aten.mm", [(4, 8), (8, 16)], (4, 16), 2 * 4 * 8 * 16),
        ("aten.addmm", [(16,), (4, 8), (8, 16)], (4, 16), 2 * 4 * 8 * 16),
        ("aten.bmm", [(3, 4, 8), (3, 8, 16)], (3, 4, 16), 2 * 3 * 4 * 8 * 16),
        ("mm_plus_mm", [(4, 8), (8, 16), (4, 2), (2, 16)], (4, 16), 2 * 4 * 16 * 10),
        ("aten.convolution", [(1, 3, 8, 8), (5, 3, 3, 3)], (1, 5, 6, 6), 2 * 5 * 36 * 27),
        ("aten._scaled_dot_product_flash_attention", [(1, 2, 8, 4)] * 3, (1, 2, 8, 4), 2 * 2 * (2 * 8 * 8 * 4)),
        ("aten._scaled_dot_product_flash_attention_backward", [(1, 2, 8, 4)] * 4, (1, 2, 8, 4), 5 * 2 * 2 * 8 * 8 * 4),
        ("flex_attention", [(1, 2, 8, 4)] * 3, (1, 2, 8, 4), None),
        ("aten.sum", [(4, 8)], (4,), 32),
        ("aten.mul", [(4, 8), (8,)], (4, 8), 32),
        ("aten.permute", [(4, 8)], (8, 4), 0),
        ("aten.sort", [(4, 8)], (4, 8), None),
        ("aten.nonesuch", [(4, 8)], (4,), None),
        ("their.own", [(4, 8)], (4, 8), None),
    ],
)
def test_flops(op, taken, made, expected):
    causal = False if "scaled_dot_product" in op else None
    node = SourceNode("n", op, None, None, ("a",), shapes=(made,), input_shapes=tuple(taken), causal=causal)
    assert flops(node) == expected


def test_a_causal_mask_leaves_half_of_the_scores_and_an_unknown_one_no_count():
    op, shapes = "aten._scaled_dot_product_flash_attention", ((1, 2, 8, 4),) * 3
    node = SourceNode("n", op, None, None, ("a",), shapes=shapes[:1], input_shapes=shapes, causal=True)
    assert flops(node) == 2 * 2 * (2 * 8 * 8 * 4) / 2
    assert flops(dataclasses.replace(node, causal=None)) is None


@pytest.mark.parametrize(
    ("call", "causal"),
    [
        ("_scaled_dot_product_flash_attention.default(q, k, v)", False),
        ("_scaled_dot_product_flash_attention.default(q, k, v, 0.0, True, scale = 0.5)", True),
        ("_scaled_dot_product_efficient_attention.default(q, k, v, None, True, is_causal = True)", True),
        ("_scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.0, True)", True),
        ("_scaled_dot_product_efficient_attention_backward.default(d, q, k, v, None, o, l, s, t, 0.0, "
         "[True, True, True, False], True)", True),
        ("_scaled_dot_product_cudnn_attention_backward.default(d, q, k, v, o, l, s, t, None, None, None, 8, 8, 0.0, "
         "False)", False),
    ],
)
def test_the_mask_of_a_printed_attention_call(call, causal):
    (node,) = read_fx(f'    a: "f16[1, 2, 8, 4]" = torch.ops.aten.{call}\n').nodes.values()
    assert node.causal is causal


def test_the_positions_of_is_causal_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    for op, position in IS_CAUSAL.items():
        schema = getattr(torch.ops.aten, op.removeprefix("aten.")).default._schema
        assert [a.name for a in schema.arguments].index("is_causal") == position, op


# Captures, with torch on a CPU


def captured(
    function: Any, *shapes: tuple[int, ...], requires_grad: bool = False, fullgraph: bool = True
) -> FusionGraph:
    torch = pytest.importorskip("torch")
    from xlafuse.triton_side.inductor import compiler

    torch.compiler.reset()
    inputs = [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]
    with compiler.capture() as capture:
        compiler.compile(function, fullgraph=fullgraph)(*inputs)
    graph = from_inductor(capture)
    assert store.from_json(store.to_json(graph)) == graph
    return graph


@pytest.mark.slow
def test_a_graph_break_makes_two_graphs_and_a_reason():
    torch = pytest.importorskip("torch")

    def cut(x, w):
        y = x @ w
        torch._dynamo.graph_break()
        return y @ w

    graph = captured(cut, (8, 8), (8, 8), requires_grad=True, fullgraph=False)
    sites = [[op.site for op in k.source_ops] for k in graph.kernels]
    # Backward of the second part comes first.
    assert sites == [
        ["mm"], ["graph-1/mm"], ["graph-1/mm_1"], ["graph-1/mm_2"], ["mm_1"], ["mm_2"],
    ]
    *between, reason = [reason for reason in graph.reasons if reason.code == "graph-break"]
    assert [(each.producer, each.consumer) for each in between] == [
        ("extern_kernels.mm", "extern_kernels.mm#2"), ("extern_kernels.mm#4", "extern_kernels.mm#5"),
        ("extern_kernels.mm#4", "extern_kernels.mm#6"),
    ]
    line = inspect.getsourcelines(cut)[1] + 2
    assert reason.line == f"tests/compare/graph/build/test_from_inductor.py:{line}" and "graph_break" in reason.text
    for name in ("primals_1", "primals_2", "buf0"):  # forward hands its operands on
        assert {graph.kernels[index].phase for index in graph.consumers[name]} == {"forward", "backward"}


@pytest.mark.slow
def test_slices_of_a_concatenation_and_mutation_are_the_buffer_itself():
    torch = pytest.importorskip("torch")

    def both(x, y):
        y.add_(1)
        return torch.cat([torch.sort(x, dim=-1)[0], x], dim=-1)

    graph = captured(both, (8, 16), (4,))
    sort = kernel(graph, kind="library")
    assert [access.bytes for access in sort.outputs] == [8 * 16 * 4]
    (result,) = [b for b in graph.buffers if b.role == "output"]
    assert result.bytes == 2 * 8 * 16 * 4
    assert sum(a.bytes for k in graph.kernels for a in k.outputs if a.buffer == result.name) == result.bytes
    (mutated,) = [b for b in graph.buffers if b.role == "input" and b.shape == (4,)]
    assert graph.producers[mutated.name] == graph.consumers[mutated.name]


@pytest.mark.slow
def test_a_kernel_that_lays_out_an_operand_is_not_the_convolution():
    torch = pytest.importorskip("torch")

    def convolved(x, w):
        return torch.conv2d(torch.exp(x), w)

    graph = captured(convolved, (2, 3, 8, 8), (4, 3, 3, 3))
    laid_out, library, copied = graph.kernels  # the last one returns the result in the usual layout
    assert [op.op for op in laid_out.source_ops] == ["aten.exp"]
    assert (library.kind, library.flops) == ("library", 2 * (2 * 4 * 6 * 6) * 27)
    assert copied.flops is None and "aten.exp" not in [op.op for op in copied.source_ops]


# A block of each kind, for a GPU that is not there

COUNTED = """
import importlib, json
from xlafuse.triton_side.deviceless import for_target as deviceless
deviceless.activate(json.load(open({properties!r})))
from xlafuse.triton_side.inductor import _private as private
from xlafuse.compare.graph.build.from_inductor import from_inductor

counted = {{}}
load = private.GraphLowering._compile_to_module_lines

def counting(graph, code):
    part = "backward" if graph.is_backward else "forward"
    counted[part] = {{node.get_name(): node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes}}
    return load(graph, code)

private.GraphLowering._compile_to_module_lines = counting
found = {{}}
for name, (shapes, attributes) in {blocks!r}.items():
    apply = importlib.import_module("xlafuse.triton_side.blocks." + name.split()[0]).apply
    specs = {{key: (shape, "int32" if key == "positions" else "bfloat16") for key, shape in shapes.items()}}
    graph = from_inductor(deviceless.compile_inductor(apply, specs, attributes, train=True, max_autotune=False))
    for part, nodes in counted.items():
        ours = {{k.name: k.bytes_read + k.bytes_written for k in graph.kernels if k.phase == part}}
        found[name + " " + part] = [ours, nodes]
    counted.clear()
print(json.dumps(found))
"""
EPS = {"eps": 1e-6}
BLOCKS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, float]]] = {
    "gelu": ({"x": (64, 256)}, {}),
    "softmax": ({"x": (64, 1000)}, {}),
    "rmsnorm": ({"x": (4096, 1024), "weight": (1024,)}, EPS),
    "rmsnorm both-orders": ({"x": (16384, 1024), "weight": (1024,)}, EPS),
    "linear_gelu": ({"x": (64, 128), "weight": (128, 256), "bias": (256,)}, {}),
    "swiglu_mlp": (
        {
            "x": (64, 128), "norm_weight": (128,), "gate_weight": (128, 256), "up_weight": (128, 256),
            "down_weight": (256, 128),
        },
        EPS,
    ),
    "rope": (
        {"q": (2, 4, 64, 32), "k": (2, 1, 64, 32), "positions": (2, 64)}, {"theta": 500000.0},
    ),
    "attention": ({name: (2, 2, 64, 32) for name in "qkv"}, {}),
}
FEW_BLOCKS = ("softmax", "rmsnorm both-orders")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build fake_cuda_hooks.cpp")
@pytest.mark.parametrize("names", [FEW_BLOCKS, full(tuple(BLOCKS.keys() - FEW_BLOCKS))])
def test_bytes_are_inductors_own_count_on_a_block_of_each_kind(tmp_path, names):
    pytest.importorskip("torch")
    blocks = {name: BLOCKS[name] for name in names}
    properties = ROOT / "compare/targets/h200/cuda_device_properties.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COUNTED.format(properties=str(properties), blocks=blocks)],
        env=environment | {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    both_orders = found.pop("rmsnorm both-orders backward", None)
    for name, (kernels, nodes) in found.items():
        assert sum(kernels.values()) == sum(nodes.values()), (name, kernels, nodes)
    assert len(found) == 2 * len(blocks) - (both_orders is not None)  # both phases
    if both_orders is None:
        return
    # A reduction over both orders: the scheduler counts the 128 partial rows that it had planned, in float32, and one
    # kernel that adds them up. The emitted code leaves 1024 rows in a workspace, and PyTorch adds and casts them.
    ours, theirs = both_orders
    planned, row = 128 * 1024 * 4, 1024
    assert sum(theirs.values()) - 2 * planned - row * 2 == sum(ours.values()) - 2 * 8 * planned - row * (4 + 4 + 2)
    assert [name for name in ours if name.startswith("aten.")] == ["aten.sum", "aten.to"]


def test_units_around_a_graph_break_share_buffers():
    torch = pytest.importorskip("torch")
    from xlafuse.triton_side.inductor import compiler

    def cut(x, w):
        first, second = torch.sin(x) @ w, x + 1
        torch._dynamo.graph_break()
        return second * first + x @ w  # not in the order in which the first unit returns them

    torch.compiler.reset()
    packed = torch.randn(2, 8, 8)  # two inputs in one storage
    with compiler.capture() as captured:
        compiler.compile(cut, fullgraph=False)(packed[0], packed[1])
    graph = from_inductor(captured)
    assert graph.unparsed == ()
    assert (totals(graph).fusion_efficiency or 0) < 0.7  # two results pass through memory
    assert [b.bytes for b in graph.buffers if b.role == "input"] == [256, 256]
    assert len([b for b in graph.buffers if b.role == "output"]) == 1
    one, other = captured.program().graphs
    passed = [name for name in one.outputs if name is not None]
    read = {access.buffer for k in (graph.kernels or ())[len(one.calls) :] for access in k.inputs or ()}
    assert set(passed) <= read and all(graph.buffer[name].role == "intermediate" for name in passed)
    assert "graph-break" in {r.code for r in graph.reasons if r.producer and r.consumer}
    # Without a run, nothing is known of it.
    unknown = Program(tuple(dataclasses.replace(g, storages={}) for g in (one, other)))
    assert "2 graphs" in from_inductor(unknown).notes[0]


def test_gradients_pass_between_units_in_reverse():
    torch = pytest.importorskip("torch")
    from xlafuse.triton_side.inductor import compiler

    def cut(x, w, v):
        first, second = torch.sin(x) @ w, x + 1
        torch._dynamo.graph_break()
        third = second * first
        fourth = third @ v
        torch._dynamo.graph_break()
        return torch.tanh(fourth) + third * 2, third

    torch.compiler.reset()
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    with compiler.capture() as captured:
        outputs = compiler.compile(cut, fullgraph=False)(*inputs)
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    program = captured.program()
    run = from_inductor(program)
    assert run.unparsed == ()
    not_run = [dataclasses.replace(g, storages={} if g.part == "backward" else g.storages) for g in program.graphs]
    told = from_inductor(Program(tuple(not_run)))
    assert told.unparsed == ()
    # Autograd adds the caller's gradient of `third` to the other one; only a run shows that.
    assert _cotangents(run) == {"graph-1/tangents_1", "graph-2/tangents_1"}
    assert _cotangents(told) == {"graph-2/tangents_1"}
    # Without a run of forward, the passed buffers are unknown.
    unknown = from_inductor(Program(tuple(dataclasses.replace(g, storages={}) for g in program.graphs)))
    assert [text.split()[0] for text in unknown.notes] == ["forward", "backward"]


def test_an_array_that_backward_reads_in_two_units_is_one_buffer():
    torch = pytest.importorskip("torch")
    from xlafuse.triton_side.inductor import compiler

    def cut(x, w):
        weights = torch.softmax(x, 1)
        torch._dynamo.graph_break()
        return torch.sin(weights @ w)

    torch.compiler.reset()
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    with compiler.capture() as captured:
        compiler.compile(cut, fullgraph=False)(*inputs).sum().backward()
    graph = from_inductor(captured)
    assert graph.unparsed == ()
    written = next(access.buffer for k in graph.kernels or () for access in k.outputs or () if k.phase == "forward")
    readers = [
        k for k in graph.kernels or () if k.phase == "backward" and written in {a.buffer for a in k.inputs or ()}
    ]
    assert len(readers) >= 2  # of the product's gradient, and of softmax's


def _cotangents(graph: FusionGraph) -> set[str]:
    return {buffer.name for buffer in graph.buffers if buffer.role == "input" and "tangents" in buffer.name}


def test_a_unit_that_returns_its_input():
    def unit(number: int, part: str, inputs: str, outputs: str, calls: list[Call], **holds: int) -> CompiledGraph:
        (graph,) = program(calls, []).graphs
        memory = {name: Memory(name, (25,), "f32", 100) for name in ("x", "y", "a", "c", "d", "tangents_1")}
        taken, given = tuple(inputs.split()), tuple(outputs.split())
        return dataclasses.replace(
            graph, part=part, unit=number, memory=memory, inputs=taken, outputs=given, storages=holds
        )

    first = unit(0, "forward", "x", "a", [call("k1", "x", "a", "op0")], x=0, a=1)
    second = unit(1, "forward", "y", "y c", [call("k2", "y", "c", "op0")], y=1, c=2)
    backward = unit(1, "backward", "tangents_1", "d", [call("k3", "tangents_1", "d", "op0")])
    graph = from_inductor(Program((first, second, backward)))
    assert [(b.name, b.role) for b in graph.buffers if b.name in ("x", "a", "graph-1/c")] == [
        ("x", "input"), ("a", "intermediate"), ("graph-1/c", "output"),
    ]
    assert graph.consumers["a"] == (1,) and "graph-1/y" not in graph.buffer
