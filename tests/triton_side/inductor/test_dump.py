"""Reading Inductor's files: versions and kinds of dump agree, and hostile files do no harm."""

import dataclasses
import gzip
import json
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from xlafuse.triton_side.inductor import dump
from xlafuse.triton_side.inductor.dump import DumpError, read
from xlafuse.triton_side.inductor.graph import Buffer, GraphBreak, SourceNode, flops, kind_of
from xlafuse.triton_side.inductor.graph_reader import GraphReader, Texts
from xlafuse.triton_side.inductor.ir_text import read_fx, read_ir, replaced
from xlafuse.triton_side.inductor.output_code import read_code

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests/data/inductor"
VERSIONS = ("2.11.0", "2.13.0")
DEBUG = DATA / "torch-2.13.0/debug"
FORWARD = DEBUG / "torchinductor/model__0_forward_1.0"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_trace_and_a_debug_folder_agree(version):
    debug, trace = (read(DATA / f"torch-{version}" / kind) for kind in ("debug", "trace"))
    for one, other in zip(debug.graphs, trace.graphs, strict=True):
        assert [call.kernel for call in one.calls] == [call.kernel for call in other.calls]
        assert [call.sources for call in one.calls] == [call.sources for call in other.calls]
        assert (one.memory, one.inputs, one.outputs) == (other.memory, other.inputs, other.outputs)
        assert one.unparsed == other.unparsed == ()


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    (log,) = (DATA / "torch-2.13.0/trace").glob("*.log")
    text = log.read_text()
    shapes = ("((64, 256), (256, 1)", "((32, 256), (256, 1)")
    changed = {2: ("extern_kernels.addmm", "extern_kernels.baddbmm"), 3: shapes}
    for rank in range(4):
        other = text.replace(*changed.get(rank, ("", "")))
        (tmp_path / f"dedicated_log_torch_trace_rank_{rank}_abc.log").write_text(other)
    return tmp_path


def test_one_of_several_ranks_is_read_and_the_others_are_compared(ranks):
    (log,) = (DATA / "torch-2.13.0/trace").glob("*.log")
    alone, several = read(log), read(ranks)
    assert several.graphs == alone.graphs and alone.notes == ()
    assert several.notes == (
        "rank 0 of 4 ranks; rank 1: the same kernels; rank 2: other kernels (with extern_kernels.baddbmm, without "
        "extern_kernels.addmm); rank 3: the same kernels on other shapes; --rank chooses another",
    )


def test_a_chosen_rank_is_compared_with_the_others(ranks):
    chosen = read(ranks, rank=2)
    assert "extern_kernels.baddbmm" in {call.kernel.name for graph in chosen.graphs for call in graph.calls}
    assert chosen.notes[0].startswith("rank 2 of 4 ranks; ranks 0, 1, 3: other kernels (with extern_kernels.addmm")
    with pytest.raises(DumpError, match="no TORCH_TRACE log of rank 7; it has ranks 0, 1, 2, 3"):
        read(ranks, rank=7)
    with pytest.raises(DumpError, match="no TORCH_TRACE log of rank 0"):
        read(DEBUG, rank=0)


@pytest.mark.parametrize("name", ["trace.txt", "trace.gz", "trace", "trace.zip", "folder/of/logs.txt"])
def test_a_log_is_known_by_its_content(tmp_path: Path, name: str) -> None:
    (log,) = (DATA / "torch-2.13.0/trace").glob("*.log")
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = log.read_bytes()
    if name.endswith(".zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(log, "run/log.dat")
    else:
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else b"\xef\xbb\xbf" + data)
    assert read(tmp_path / name.split("/")[0]).graphs == read(log).graphs


def test_a_rank_is_known_by_the_events_of_a_renamed_log(tmp_path):
    (log,) = (DATA / "torch-2.13.0/trace").glob("*.log")
    for rank in (1, 3):
        text = log.read_text().replace('"frame_id": 0,', f'"rank": {rank}, "frame_id": 0,')
        (tmp_path / f"worker{rank}.txt").write_text(text)
    assert read(tmp_path).notes == ("rank 1 of 2 ranks; rank 3: the same kernels; --rank chooses another",)
    assert read(tmp_path, rank=3).notes[0].startswith("rank 3 ")


@pytest.mark.parametrize("packed", [False, True])
def test_a_log_that_is_cut_off_gives_the_compiles_before_that(tmp_path, packed):
    (log,) = (DATA / "torch-2.13.0/trace").glob("*.log")
    data = gzip.compress(log.read_bytes()) if packed else log.read_bytes()
    path = tmp_path / "trace.txt"
    path.write_bytes(data[: len(data) * 7 // 8])
    program = read(path)
    assert [graph.part for graph in program.graphs] == ["forward"]
    (note,) = program.notes
    assert note.endswith("later compiles are missing")
    path.write_bytes(log.read_bytes().rstrip())  # only the last line break is missing
    assert [graph.part for graph in read(path).graphs] == ["forward", "backward"]


def test_compiles_that_share_cached_code_are_units_of_their_own(tmp_path):
    (log,) = (DATA / "torch-2.13.0/trace").glob("*.log")
    text = log.read_text()
    header = 'V1125 19:18:24.264000 9649 torch/_dynamo/guards.py:5400] {"artifact": {"name": "recompile_reasons"}, '
    why = header + '"frame_id": 0, "frame_compile_id": 1}\n\t0/0: n == 2   # f.py:4 in g\n\tUser stack trace:\n'
    (tmp_path / "trace.log").write_text(text + why + text.replace('"frame_compile_id": 0', '"frame_compile_id": 1'))
    program = read(tmp_path / "trace.log")
    graphs = program.graphs
    assert len(program.notes) == 1 and "0/0: n == 2;" in program.notes[0]
    assert [(graph.part, graph.unit) for graph in graphs] == [
        ("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1),
    ]


def test_two_versions_of_torch_emit_the_same_kernels():
    old, new = (read(DATA / f"torch-{version}/debug") for version in VERSIONS)
    assert [c.kernel for g in old.graphs for c in g.calls] == [c.kernel for g in new.graphs for c in g.calls]


def test_calls_are_in_the_order_of_the_code_with_views_and_reuse_resolved():
    forward, backward = read(DEBUG).graphs
    assert [call.kernel.name for call in forward.calls] == [
        "triton_per_fused__to_copy_add_mean_mul_rsqrt_0", "extern_kernels.mm", "extern_kernels.mm",
        "triton_poi_fused_mul_sigmoid_1", "extern_kernels.addmm",
    ]
    # `buf1 = reinterpret_tensor(buf0, ...); del buf0  # reuse` of a buffer that no kernel wrote: buf0 is not read
    assert [buffer.name for buffer in forward.calls[0].kernel.inputs] == ["primals_1", "primals_2"]
    assert [buffer.name for buffer in forward.calls[0].kernel.outputs] == ["buf1", "buf2"]
    # `buf3 = mm_1; del mm_1  # reuse`: reads mm_1, writes another logical buffer
    silu = backward.calls[1].kernel
    assert {buffer.name for buffer in silu.inputs} == {"buf1", "mm", "mm_1"}
    assert {buffer.name for buffer in silu.outputs} == {"buf2", "buf3"}
    assert forward.outputs[:2] == ("buf6", "primals_1") and "buf5" in forward.outputs


def test_stages_lines_and_operations_before_the_pattern_matcher():
    addmm = read(DEBUG).graphs[0].calls[-1]
    assert [(source.op, source.stage) for source in addmm.sources] == [("aten.mm", "down"), ("aten.add", "residual")]
    assert [node.op for node in addmm.nodes] == ["aten.addmm"]
    assert addmm.flops == 2 * 64 * 256 * 128
    assert addmm.kernel.lines == ("triton_side/blocks/swiglu_mlp.py:34", "triton_side/blocks/swiglu_mlp.py:36")


def test_nested_stages_of_a_printed_graph():
    found = read_fx(
        '    def forward(self, x: "f32[2]"):\n'
        "        # Annotation: {'stage outer': True, 'stage inner': True} File: /home/me/model.py:8 in f, code: 2 * x\n"
        '        mul: "f32[2]" = torch.ops.aten.mul.Tensor(x, 2)\n'
        '        exp: "f32[2]" = torch.ops.aten.exp.default(mul)\n'
        "        # File: /home/me/model.py:9 in f, code: return x\n"
        '        neg: "f32[2]" = torch.ops.aten.neg.default(exp)\n'
    )
    assert {name: node.stage for name, node in found.nodes.items()} == {
        "mul": "outer/inner", "exp": "outer/inner", "neg": None,
    }


@pytest.mark.parametrize(
    ("made", "operands", "many"),
    [((64, 16), ((64, 32), (4, 32, 16)), 64 * 32 * 16), ((4, 32, 16), ((32, 64), (64, 16)), 64 * 32 * 16),
     ((4, 8, 16), ((4, 8, 32), (4, 32, 16)), 4 * 8 * 32 * 16)],
    ids=["forward", "of weights", "groups of one size"],
)
def test_flops_of_a_grouped_product(made, operands, many):
    """The ends of the groups are a third operand."""
    node = SourceNode("g", "aten._grouped_mm", None, None, (), shapes=(made,), input_shapes=(*operands, (4,)))
    assert flops(node) == 2 * many


def test_no_framework_is_imported():
    code = f"""
import sys
for name in ("torch", "triton", "jax"):
    sys.modules[name] = None  # importing it is an error
from xlafuse.triton_side.inductor.dump import read
print(sum(len(graph.calls) for graph in read({str(DEBUG)!r}).graphs))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout == "14\n", done.stderr


def test_without_the_ir_a_kernel_reads_as_much_as_its_loop_says(tmp_path):
    shutil.copytree(FORWARD, tmp_path / "model__0_forward_1.0")
    code = tmp_path / "model__0_forward_1.0/output_code.py"
    (tmp_path / "model__0_forward_1.0/ir_post_fusion.txt").unlink()
    whole = code.read_text()
    for extent, size in (("xnumel = 16384\n", 32768), ("xnumel = 100\n", 200), ("", None)):
        code.write_text(whole.replace("xnumel = 16384\n", extent))
        (graph,) = read(tmp_path).graphs
        assert [buffer.bytes for buffer in graph.calls[3].kernel.inputs] == [size, size]
        assert None not in [buffer.bytes for buffer in graph.calls[4].kernel.inputs]


def test_a_kernel_that_prepares_an_attention_is_none():
    def kind(name, *ops, extern=False):
        return kind_of(name, set(ops), set(ops), None, is_template=False, is_extern=extern, is_reduction=False)

    assert kind("triton_poi_fused__scaled_dot_product_flash_attention_add_0", "aten.add", "aten.view") == "elementwise"
    assert kind("triton_poi_fused__scaled_dot_product_flash_attention_clone_1", "aten.clone") == "copy"
    # It only copies operands into the layout of the call, so it has the call's operation.
    assert kind("triton_poi_fused__to_copy_0", "aten._scaled_dot_product_flash_attention") == "elementwise"
    call = "torch.ops.aten._scaled_dot_product_flash_attention.default"
    assert kind(call, "aten._scaled_dot_product_flash_attention", extern=True) == kind(call, extern=True) == "attention"


LIBRARY = "/venv/lib/python3.12/site-packages/transformers/models/llama/modeling_llama.py"
OWN = '  File "train.py", line 30, in f\n    loss = step(x)\n  File "train.py", line 8, in forward\n    x = norm(x)\n'
IN_LIBRARY = f'{OWN}  File "{LIBRARY}", line 60, in forward\n    return x * scale\n'
AOT = "# AOT ID: ['0_backward']\ndef call(self, args):\n    mul, permute = args\n"


def read_with_stacks(code, stacks, **texts):
    texts = Texts("dump", AOT + code, stacks=stacks, **texts)
    return GraphReader(texts, read_code(texts.code)).compiled(0)


def product(stacks):
    """Return the operation of a product, to which no provenance mapping gives nodes, as in backward under autograd."""
    graph = read_with_stacks(
        """    buf0 = empty_strided_cuda((8192, 768), (768, 1), torch.bfloat16)
    # Topologically Sorted Source Nodes: [permute_193, mm_47], Original ATen: [aten.t, aten.mm]
    # [Provenance debug handles] extern_kernels.mm:2
    extern_kernels.mm(mul, permute, out=buf0)
    return (buf0, )
""", {"extern_kernels.mm:2": stacks})
    (source,) = graph.calls[0].sources
    return source.op, source.line, source.place


def test_a_place_is_the_innermost_call_outside_of_libraries():
    assert product([OWN]) == ("aten.mm", "train.py:8", "train.py:8 forward")
    assert product([IN_LIBRARY]) == ("aten.mm", f"{LIBRARY}:60", "train.py:8 forward")
    inside = '  File "/usr/local/lib/python3.12/dist-packages/torch/optim/adamw.py", line 9, in step\n    p.add_(u)\n'
    assert product([OWN + inside]) == ("aten.mm", "train.py:8", "train.py:8 forward")
    assert product([OWN, OWN.replace("8", "9")]) == product([]) == ("aten.mm", None, None)


def test_a_model_that_a_library_has_is_named_by_the_librarys_lines():
    """The program's own file only calls the compiled model, so Dynamo's frames begin in the library."""
    alone = f'  File "{LIBRARY}", line 60, in forward\n    return F.silu(x)\n'
    inside = '  File "/venv/lib/python3.12/site-packages/torch/nn/functional.py", line 9, in silu\n    return f(x)\n'
    assert product([alone + inside]) == ("aten.mm", f"{LIBRARY}:60", f"{LIBRARY}:60 forward")
    assert product([inside]) == ("aten.mm", None, None)


def test_a_library_call_of_backward_without_a_named_node_has_the_memory_of_its_result():
    node = (
        '        _grouped_mm_8: "bf16[4, 32, 64]" = torch.ops.aten._grouped_mm.default(permute, mul, offsets)\n'
        "        return (_grouped_mm_8,)\n"
    )
    graph = read_with_stacks(
        """    buf0 = extern_kernels._grouped_mm(reinterpret_tensor(mul, (32, 8), (1, 32), 0), permute, None)
    assert_size_stride(buf0, (4, 32, 64), (2048, 64, 1), 'torch.ops.aten._grouped_mm.default')
    return (buf0, )
""", {}, before=node, after=node)
    assert graph.memory["buf0"].shape == (4, 32, 64) and graph.outputs == ("buf0",)


@pytest.mark.parametrize("stacks, place", [
    ([IN_LIBRARY, OWN], "train.py:8 forward"),
    ([IN_LIBRARY, IN_LIBRARY.replace("line 8", "line 9")], f"{LIBRARY}:60 forward"),  # the kernel has both calls of it
    ([], f"{LIBRARY}:60 forward"),
])
def test_a_node_of_a_library_has_the_place_of_its_call(stacks, place):
    """A printed graph has only the innermost frame; the stacks of a kernel have its callers."""
    text = (
        '    def forward(self, mul: "bf16[64, 32]", permute: "bf16[32, 32]"):\n'
        f"        # File: {LIBRARY}:60 in forward, code: return x * scale\n"
        '        mm: "bf16[64, 32]" = torch.ops.aten.mm.default(mul, permute)\n'
        "        # File: train.py:12 in <genexpr>, code: q, k, v = (t.view(b) for t in qkv)\n"
        '        neg: "bf16[64, 32]" = torch.ops.aten.neg.default(mm)\n'
    )
    assert [node.place for node in read_fx(text).nodes.values()] == [f"{LIBRARY}:60 forward", "train.py:12 <genexpr>"]
    handle = "extern_kernels.mm:2"
    graph = read_with_stacks(
        f"""    buf0 = empty_strided_cuda((64, 32), (32, 1), torch.bfloat16)
    # [Provenance debug handles] {handle}
    extern_kernels.mm(mul, permute, out=buf0)
    return (buf0, )
""", {handle: stacks}, before=text, after=text, handles={handle: ["mm"]})
    (source,) = graph.calls[0].sources
    assert (source.line, source.place) == (f"{LIBRARY}:60", place)


def test_partial_sums_have_the_place_of_their_reduction():
    text = (
        '    def forward(self, mul: "f32[64, 32]", permute: "f32[32]"):\n'
        "        # File: train.py:8 in forward, code: x = norm(x)\n"
        '        sum_1: "f32[32]" = torch.ops.aten.sum.dim_IntList(mul, [0])\n'
    )
    definition = """
# Graph fragment:
#   %mul : Tensor "f32[64, 32][32, 1]cuda:0" = PlaceHolder[target=mul]
#   %sum_1 : Tensor "f32[32][1]cuda:0" = call_function[target=torch.ops.aten.sum.dim_IntList](args = (%mul, [0]))
#   return %buf1
triton_per_fused_sum_0 = async_compile.triton('triton_per_fused_sum_0', '''
@triton.jit
def triton_per_fused_sum_0(in_ptr0, ws_ptr, xnumel, r0_numel):
    tmp0 = tl.load(in_ptr0 + (r0_1 + 32*x0), None)
    tl.store(ws_ptr + (tl.program_id(0)), tmp0, None)
''', device_str='cuda')
"""
    code = """    workspace_0 = empty_strided_cuda((128, ), (1, ), torch.float32)
    triton_per_fused_sum_0.run(mul, workspace_0, 64, 32, stream=stream0)
    buf1 = workspace_0[0 * 4 * 32 : (0 + 1) * 4 * 32].view(4, 32).sum(dim=0)
    return (buf1, )
"""
    texts = Texts("dump", definition + AOT + code, text, text)
    last = GraphReader(texts, read_code(texts.code)).compiled(0).calls[-1]
    assert [(source.op, source.line, source.place) for source in last.sources] == [
        ("aten.sum", "train.py:8", "train.py:8 forward"),
    ]


def test_a_backward_operation_of_forward_is_known_by_its_name_before_the_passes():
    """The passes give new nodes the same names in forward and in backward."""
    head = '    def forward(self, x: "f32[2]"):\n'
    exp, new = (f'        {name}: "f32[2]" = torch.ops.aten.exp.default(x)\n' for name in ("exp", "exp_default"))
    code = "# AOT ID: ['0_forward']\ndef call(self, args):\n    x, = args\n    return (x, )\n"
    assert GraphReader(Texts("dump", code, head + exp, head + new), read_code(code)).node_names == {"exp"}
    assert GraphReader(Texts("dump", code, after=head + new), read_code(code)).node_names == {"exp_default"}
    joint = Texts("dump", code, head + exp, head + new, elsewhere=frozenset({"exp"}))
    assert GraphReader(joint, read_code(code)).node_names == {"exp_default"}


def test_the_stacks_of_a_traces_kernels_are_read():
    (log,) = (DATA / "torch-2.11.0/trace").glob("*.log")
    graphs = read(log).graphs
    places = {source.place for graph in graphs for call in graph.calls for source in call.sources}
    assert places and all(place is None or place.startswith("triton_side/blocks/") for place in places)


def test_our_own_archive(tmp_path):
    archive = tmp_path / "mlp.zip"
    kernels = [
        {
            "name": call.kernel.name, "part": "forward", "ops": list(call.kernel.ops), "provenance": "device",
            "fx_nodes": list(call.kernel.fx_nodes), "inputs": [{"name": "buf2", "bytes": 7}], "outputs": None,
            "config": "XBLOCK: 1", "sources": [dataclasses.asdict(source) for source in call.sources],
        }
        for call in read(FORWARD).graphs[0].calls
    ]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as packed:
        packed.writestr("kernels.json", json.dumps(kernels))
        packed.write(FORWARD / "output_code.py", "forward/output_code.py")
        packed.write(FORWARD / "fx_graph_transformed.py", "forward/fx_graph.py")
    (graph,) = read(archive).graphs
    addmm = graph.calls[-1]
    assert addmm.kernel.inputs[0].bytes == 7 and addmm.kernel.outputs is None
    assert (addmm.kernel.provenance, addmm.kernel.config) == ("device", "XBLOCK: 1")
    # No text shows the graph before the passes; kernels.json lists the operations.
    assert [source.op for source in addmm.sources] == ["aten.mm", "aten.add"]


def test_two_calls_follow_a_reduction_over_rows_and_columns():
    code = read_code(
        """# AOT ID: ['3_backward']
def call(self, args):
    primals_1, = args
    workspace_0 = empty_strided_cuda((1024, ), (1, ), torch.float32)
    # [Provenance debug handles] aten.sum:3
    # [Provenance debug handles] aten.to:4
    buf1 = workspace_0[0 * 4 * 256 : (0 + 1) * 4 * 256].view(4, 256).sum(dim=0).to(torch.bfloat16)
    return (buf1, )
"""
    )
    assert (code.part, code.unit) == ("backward", 3)
    assert [(call.name, call.handle, call.reads, call.writes) for call in code.calls] == [
        ("aten.sum", "aten.sum:3", ["workspace_0"], ["buf1_sum"]),
        ("aten.to", "aten.to:4", ["buf1_sum"], ["buf1"]),
    ]


def test_sums_before_a_cast_have_their_own_buffer(tmp_path):
    (tmp_path / "output_code.py").write_text(
        """# AOT ID: ['3_backward']
def call(self, args):
    primals_1, = args
    workspace_0 = empty_strided_cuda((1024, ), (1, ), torch.float32)
    buf1 = empty_strided_cuda((256, ), (1, ), torch.bfloat16)
    buf1 = workspace_0[0 * 4 * 256 : (0 + 1) * 4 * 256].view(4, 256).sum(dim=0).to(torch.bfloat16)
    return (buf1, )
"""
    )
    (graph,) = read(tmp_path).graphs
    adds, converts = (call.kernel for call in graph.calls)
    assert adds.outputs == converts.inputs == (Buffer("buf1_sum", 1024),)
    assert converts.outputs == (Buffer("buf1", 512),) and graph.memory["buf1_sum"].dtype == "f32"


def test_a_call_with_several_results_and_one_that_mutates():
    code = read_code(
        """
def call(self, args):
    arg0_1, arg1_1 = args
    buf0 = torch.ops.aten.sort.stable(arg0_1, stable=False, dim=3, descending=False)
    buf1 = buf0[0]
    buf2 = buf0[1]
    torch.ops.aten.index_put_.default(arg1_1, [buf2], reinterpret_tensor(buf1, (4, ), (1, ), 0), True)
    mystery(buf1)
    return (buf1, None, )
"""
    )
    sort, put = code.calls
    assert (sort.reads, sort.writes) == (["arg0_1"], ["buf1", "buf2"])
    assert (put.reads, put.writes) == (["arg1_1", "buf2", "buf1"], ["arg1_1"])
    assert code.unparsed == ["mystery(buf1)"]
    assert code.outputs == ("buf1", None)


def test_a_buffer_in_the_memory_of_a_library_calls_result_is_known(tmp_path):
    (tmp_path / "output_code.py").write_text(
        FOREACH.partition("def call")[0].replace("in_ptr1", "in_out_ptr0") + """
def call(self, args):
    arg0_1, = args
    buf0 = torch.ops.aten._foreach_norm.Scalar([arg0_1], 2.0)
    buf1 = buf0[0]
    buf2 = buf1; del buf1  # reuse
    triton_for_fused_0.run(arg0_1, buf2, arg0_1, arg0_1, arg0_1, stream=raw_stream0)
    return (buf2, )
"""
    )
    (graph,) = read(tmp_path).graphs
    assert {"buf1", "buf2"} <= {text.split(":")[0] for text in graph.unparsed}  # so totals are "at least"


def scattered(folder: Path, statement: str) -> tuple[dict[str, int | None], dict[str, int | None]]:
    """Return the bytes of each buffer that a statement reads and writes."""
    arguments = {"x": "(64, 1000)", "row": "(1, 1000)", "i": "(1,)", "j": "(7, 1)", "v": "()", "mask": "(64, 1000)"}
    dtypes = {"i": "int64", "j": "int64", "mask": "bool"}
    made = [
        f"    {name} = rand_strided({shape}, (1,), device='cuda:0', dtype=torch.{dtypes.get(name, 'float32')})"
        for name, shape in arguments.items()
    ]
    (folder / "output_code.py").write_text(
        f"def call(self, args):\n    {', '.join(arguments)} = args\n    {statement}\n    return (x, )\n"
        "def get_args():\n" + "\n".join(made) + "\n"
    )
    (graph,) = read(folder).graphs
    assert graph.unparsed == ()
    (call,) = graph.calls
    assert call.kernel.kind == "scatter" and len(call.kernel.ops) == 1
    return tuple({b.name: b.bytes for b in side} for side in (call.kernel.inputs, call.kernel.outputs))


ROW, WHOLE = 4000, 256000


@pytest.mark.parametrize(
    ("statement", "reads", "writes"),
    [
        ("aten.index_put_(x, [i], row, False)", {"i": 8, "row": ROW}, {"x": ROW}),
        ("aten.index_put_(x, [i], row, True)", {"x": ROW, "i": 8, "row": ROW}, {"x": ROW}),
        ("torch.ops.aten.index_put_.default(x, [i], v, accumulate=True)", {"x": ROW, "i": 8, "v": 4}, {"x": ROW}),
        ("aten.index_put_(x, [None, i], v, False)", {"i": 8, "v": 4}, {"x": 64 * 4}),
        ("aten.index_put_(x, [j, i], v, False)", {"j": 56, "i": 8, "v": 4}, {"x": 7 * 4}),
        ("aten.index_put_(x, [mask], v, False)", {"mask": 64000, "v": 4}, {"x": WHOLE}),
        ("aten.scatter_.value(x,0,j,3)", {"j": 56}, {"x": 7 * 4}),
        ("aten.scatter_.src(x,0,j,row)", {"j": 56, "row": ROW}, {"x": 7 * 4}),
        (
            "aten.scatter_reduce_.two(x,0,j,row, reduce='sum', include_self=True)",
            {"x": 7 * 4, "j": 56, "row": ROW}, {"x": 7 * 4},
        ),
    ],
    ids=["rows", "added rows", "one value", "columns", "two indices", "mask", "scatter a value", "scatter", "reduce"],
)
def test_a_scatter_in_place_touches_the_elements_of_its_indices(tmp_path, statement, reads, writes):
    assert scattered(tmp_path, statement) == (reads, writes)


def test_a_library_call_in_place_changes_all_its_lists():
    code = read_code(
        """
def call(self, args):
    arg0_1, arg1_1, arg2_1, arg3_1, arg4_1 = args
    torch.ops.aten._fused_adamw_.default([arg0_1], [arg1_1], [arg2_1], [arg3_1], [], [arg4_1], lr=0.1)
    return ()
"""
    )
    (step,) = code.calls
    assert step.reads == ["arg0_1", "arg1_1", "arg2_1", "arg3_1", "arg4_1"]
    assert step.writes == ["arg0_1", "arg2_1", "arg3_1"]


FOREACH = """# AOT ID: ['0_inference']
triton_for_fused_0 = async_compile.triton('triton_for_fused_0', '''
@triton_heuristics.foreach(
    inductor_meta={'kernel_name': 'triton_for_fused_0', 'mutated_arg_names': ['in_ptr0', 'out_ptr0', 'out_ptr1']},
)
@triton.jit
def triton_for_fused_0(in_ptr0, in_ptr1, in_ptr2, out_ptr0, out_ptr1):
    pid = tl.program_id(0)
    if pid < num_xblocks_0:
        xnumel = 1000
        r0_numel = 1
        tmp0 = tl.load(in_ptr0 + (x0), xmask)
        tmp1 = tl.load(in_ptr2 + (0))
        tl.store(out_ptr0 + (x0), tmp2, xmask)
    elif pid < num_xblocks_1:
        xnumel = 10
        r0_numel = 1
        tmp3 = tl.load(in_ptr1 + (x0), xmask)
        tmp4 = tl.load(in_ptr2 + (0))
        tl.atomic_add(out_ptr1 + (x0), tmp5, xmask, sem='relaxed')
''', device_str='cuda')
def call(self, args):
    arg0_1, arg1_1, arg2_1, arg3_1 = args
    triton_for_fused_0.run(arg0_1, arg1_1, arg2_1, arg0_1, arg3_1, stream=raw_stream0)
    return ()
def get_args():
    arg0_1 = rand_strided((1000, ), (1, ), device='cuda:0', dtype=torch.float32)
    arg1_1 = rand_strided((10, ), (1, ), device='cuda:0', dtype=torch.float32)
    arg2_1 = rand_strided((), (), device='cuda:0', dtype=torch.float32)
    arg3_1 = rand_strided((500, ), (1, ), device='cuda:0', dtype=torch.float32)
"""


def test_a_foreach_kernel_has_the_bytes_of_its_loads_and_stores_and_its_operations(tmp_path):
    (tmp_path / "output_code.py").write_text(FOREACH)
    (tmp_path / "fx_graph_transformed.py").write_text(
        '    def forward(self, arg0_1: "f32[1000]", arg1_1: "f32[10]", arg2_1: "f32[]", arg3_1: "f32[500]"):\n'
        "        # File: /home/me/model.py:3 in f, code: torch._foreach_mul_(v, 0.9)\n"
        "        _foreach_mul = torch.ops.aten._foreach_mul.Tensor([arg0_1, arg1_1], arg2_1)\n"
        '        getitem: "f32[1000]" = _foreach_mul[0]\n'
        '        getitem_1: "f32[10]" = _foreach_mul[1]\n'
        '        copy_: "f32[1000]" = torch.ops.aten.copy_.default(arg0_1, getitem);  arg0_1 = copy_ = None\n'
        '        exp: "f32[1000]" = torch.ops.aten.exp.default(getitem);  getitem = None\n'
    )
    (graph,) = read(tmp_path).graphs
    (call,) = graph.calls
    assert call.kernel.inputs == (
        Buffer("arg0_1", 4000), Buffer("arg1_1", 40), Buffer("arg2_1", 4), Buffer("arg3_1", 40),
    )
    assert call.kernel.outputs == (Buffer("arg0_1", 4000), Buffer("arg3_1", 40))
    assert call.kernel.ops == ("aten._foreach_mul", "aten.copy_") and call.kernel.lines == ("/home/me/model.py:3",)


def test_ambiguous_replacements_are_not_guessed():
    text = """
        a: "f32[2]" = torch.ops.aten.exp.default(x)
        b: "f32[2]" = torch.ops.aten.neg.default(x)
        c: "f32[2]" = torch.ops.aten.add.Tensor(y, 1)
"""
    before = read_fx('    def forward(self, x: "f32[2]", y: "f32[2]"):' + text)
    assert replaced(before, {"unrelated"}) == {frozenset("y"): ("c",)}
    assert replaced(before, {"b"}) == {frozenset("x"): ("a",), frozenset("y"): ("c",)}


def test_graph_breaks_of_a_trace(tmp_path):
    log = next((DATA / "torch-2.13.0/trace").glob("*.log"))
    event = json.dumps({"artifact": {"name": "dynamo_graph_break_reason", "encoding": "string"}, "has_payload": "0"})
    payload = [
        "Graph break in user code at /home/me/model.py:10", "Graph Break Reason: Failed to trace builtin operator",
        "  Hint: do not", "", "User code traceback:", "  File ...",
    ]
    lines = [f"V1120 12:20:06.285000 22032 torch/_dynamo/symbolic_convert.py:5098] {event}\n"]
    text = "".join([*lines, *(f"\t{line}\n" for line in payload)])
    (tmp_path / "dedicated_log_torch_trace_x.log").write_text(text + text + log.read_text())
    found = read(tmp_path)
    assert found.breaks == (
        GraphBreak("Failed to trace builtin operator\n  Hint: do not", "/home/me/model.py:10"),
    )
    assert len(found.graphs) == 2


# Hostile files


def hostile(tmp_path: Path, statement: str) -> Path:
    file = tmp_path / "output_code.py"
    file.write_text(f"def call(self, args):\n    x, = args\n    {statement}\n    return (x, )\n")
    return file


@pytest.mark.parametrize(
    "statement",
    [
        "y = " + "(" * 20_000 + ")" * 20_000,
        "y = " + "[" * 150 + "]" * 150,
        "y = " + "-" * 20_000 + "x",
        "y = x" + ".a" * 20_000,
        "y = " + "x + " * 20_000 + "x",
        "y = reinterpret_tensor(" * 150 + "x" + ")" * 150,
        "y = " + "9" * 100_000,
        "f'{x!r:" * 100,
        "y = x\x00",
    ],
    ids=["brackets", "lists", "signs", "attributes", "sums", "views", "digits", "formats", "null"],
)
def test_a_hostile_statement_is_unparsed_or_harmless(tmp_path, statement):
    started = time.process_time()
    (graph,) = read(hostile(tmp_path, statement)).graphs
    assert graph.calls == ()
    assert time.process_time() - started < 10


def test_nothing_in_a_dump_is_executed(tmp_path):
    marker = tmp_path / "executed"
    statement = f"y = __import__('pathlib').Path({str(marker)!r}).touch()"
    (graph,) = read(hostile(tmp_path, statement)).graphs
    assert graph.unparsed == (statement,)
    assert not marker.exists()


def test_impossible_sizes_are_ignored(tmp_path):
    statement = f"y = empty_strided_cuda(({'9' * 30}, 4), (4, 1), torch.float32)"
    (graph,) = read(hostile(tmp_path, f"{statement}\n    extern_kernels.mm(x, x, out=y)")).graphs
    assert "y" not in graph.memory


def truncated(tmp_path: Path, share: float) -> Path:
    for file in FORWARD.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    return tmp_path


@pytest.mark.parametrize("share", [0, 0.01, 0.5])
def test_files_cut_short_before_the_first_call(tmp_path, share):
    with pytest.raises(DumpError, match="no kernel call in its emitted code; `call` does not return"):
        read(truncated(tmp_path, share))


def test_files_cut_short_between_calls(tmp_path):
    (graph,) = read(truncated(tmp_path, 0.82)).graphs
    assert 0 < len(graph.calls) < 5
    assert graph.unparsed[-1].startswith("`call` does not return")


def test_a_folder_without_a_dump_and_a_file_of_another_kind(tmp_path):
    with pytest.raises(DumpError, match="no emitted code in it"):
        read(tmp_path)
    (tmp_path / "torch_trace_x.log").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(DumpError, match="no emitted code in it"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing")


def test_a_text_above_the_size_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "MAX_BYTES", 1000)
    with pytest.raises(DumpError, match="more than 0 MiB"):
        read(FORWARD)


def test_reading_time_grows_linearly(tmp_path):
    folder = tmp_path / "model__0_forward_1.0"
    folder.mkdir()
    run = 300_000
    (folder / "output_code.py").write_text(
        "def call(self, args):\n    # " + "Original ATen: [" * (run // 16) + "\n    x, = args\n    return (x, )\n"
        "cpp_fused_0 = async_compile.cpp_pybinding([], r'''\nkernel(" + "a" * run + "\n'''\n"
    )
    annotations = "# Annotation: " + "File: a" * (run // 7) + "\n"
    (folder / "fx_graph_transformed.py").write_text(annotations + "        " + "a" * run + " = 1\n")
    (folder / "ir_post_fusion.txt").write_text("op0: SchedulerNode(x)\nop0.outputs = [\n  " + "a" * run + "\n]\n")
    started = time.process_time()
    read(tmp_path)
    assert time.process_time() - started < 10


ON_CPU = """# AOT ID: ['0_inference']
cpp_fused__softmax_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0,
                       float* out_ptr1)
{
    float tmp_acc0 = -std::numeric_limits<float>::infinity();
}
''')

def call(self, args):
    arg0_1, = args
    args.clear()
    buf0 = empty_strided_cpu((64, 1), (1, 64), torch.float32)
    buf1 = empty_strided_cpu((64, 32), (32, 1), torch.float32)
    cpp_fused__softmax_0(arg0_1, buf0, buf1)
    del arg0_1
    return (buf1, )

def get_args():
    arg0_1 = rand_strided((64, 32), (32, 1), device='cpu', dtype=torch.float32)
"""


def test_code_for_a_cpu_is_said_to_be_that_and_keeps_its_own_arrays(tmp_path):
    (tmp_path / "output_code.py").write_text(ON_CPU)
    program = read(tmp_path / "output_code.py")
    assert "CPU" in program.notes[0] and "C++" in program.notes[0]
    (softmax,) = program.graphs[0].calls
    assert ([buffer.name for buffer in softmax.kernel.outputs], softmax.workspace_bytes) == (["buf1"], 256)
    assert softmax.kernel.kind == "reduction"
    assert read(DEBUG).notes == ()


def test_a_change_in_place_is_a_node_of_its_buffer():
    nodes, _ = read_ir(
        """op0: SchedulerNode(ComputedBuffer)
op0.writes = [MemoryDep('buf0', d0, {d0: 100})]
op0.unmet_dependencies = []
op0.met_dependencies = []
op0.outputs = [
    buf0: ComputedBuffer
    buf0.layout = FixedLayout('cuda:0', torch.float32, size=[100], stride=[1])
    buf0.users = [NodeUser(node=SchedulerNode(name='op1'), can_inplace=False, is_weak=False)]
]
op0.sizes = ([100], [])

op1: SchedulerNode(ComputedBuffer)
op1.writes = [MemoryDep('buf1', tmp0, {d0: 8}, atomic_add)]
op1.unmet_dependencies = [StarDep(name='buf0', mode='atomic_add')]
op1.met_dependencies = [MemoryDep('arg0_1', d0, {d0: 8})]
op1.outputs = [
    buf1: ComputedBuffer
    buf1.layout = MutationLayoutSHOULDREMOVE('cuda:0', torch.float32, size=[100], stride=[1])
    buf1.mutations = ['buf0']
    buf1.users = [NodeUser(node=OUTPUT, can_inplace=False, is_weak=False)]
]
op1.sizes = ([8], [])
"""
    )
    assert [(node.operations, node.writes, node.stores["buf0"]) for node in nodes] == [
        ({"op0"}, {"buf0"}, 100), ({"op1"}, {"buf0"}, 8),
    ]
    assert dict(nodes[1].reads) == {"buf0": 8, "arg0_1": 8}


def test_a_fused_node_counts_the_accesses_of_its_members():
    member = """{name}: SchedulerNode(ComputedBuffer)
{name}.writes = [MemoryDep('{made}', d0, {{d0: 4}})]
{name}.unmet_dependencies = []
{name}.met_dependencies = [MemoryDep('arg0_1', 500*d0 + tmp0, {{d0: 4}})]
{name}.outputs = [
    {made}: ComputedBuffer
    {made}.users = [NodeUser(node=OUTPUT, can_inplace=False, is_weak=False)]
]
{name}.sizes = ([4], [])
"""
    members = [member.format(name=f"op{index}", made=f"buf{index}") for index in (0, 1)]
    (node,), _ = read_ir(
        "op0_op1: FusedSchedulerNode(SchedulerNode,SchedulerNode)\n"
        "op0_op1.writes = [MemoryDep('buf0', d0, {d0: 4}), MemoryDep('buf1', d0, {d0: 4})]\n"
        f"op0_op1.snodes[0] =\n{members[0]}op0_op1.snodes[1] =\n{members[1]}"
    )
    assert node.operations == {"op0", "op1"} and node.writes == {"buf0", "buf1"}
    assert dict(node.reads) == {"arg0_1": 8} and dict(node.stores) == {"buf0": 4, "buf1": 4}


def test_a_keyword_with_the_name_of_a_node_is_no_operand() -> None:
    found = read_fx("""
    def forward(self, arg0_1: "i64[4]"):
        index: "f32[4, 8]" = torch.ops.aten.index.Tensor(arg0_1, [arg0_1])
        iota: "i64[8]" = torch.ops.prims.iota.default(8, start = 0, device = device(type='cuda', index=0))
        mul: "f32[4, 8]" = torch.ops.aten.mul.Tensor(index, iota)
""")
    assert found.nodes["iota"].inputs == () and found.nodes["mul"].inputs == ("index", "iota")
