"""Capturing what Inductor emits, on a CPU: C++ kernels and library GEMMs."""

import dataclasses
import inspect
import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.inductor import _private as private
from xlafuse.triton_side.inductor import compiler, dump
from xlafuse.triton_side.inductor.graph import SourceNode
from xlafuse.triton_side.inductor.ir_text import read_fx
from xlafuse.triton_side.inductor.output_code import read_code

ROWS, WIDTH, HIDDEN = 16, 32, 64


def mlp(inputs: dict[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    x = inputs["x"]
    with stage("norm"):
        h = x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    with stage("up"):
        up = h @ inputs["up"]
    with stage("act"):
        activated = up * torch.sigmoid(up)
    with stage("down"):
        down = activated @ inputs["down"]
    with stage("residual"):
        y = x + down
    return {"y": y}


def line_of(text: str) -> str:
    lines, first = inspect.getsourcelines(mlp)
    return f"{__file__}:{first + next(index for index, line in enumerate(lines) if text in line)}"


@pytest.fixture(scope="module")
def run() -> tuple[compiler.Captured, dict[str, Tensor], dict[str, Tensor]]:
    """The capture of one training forward, its inputs with gradients of the compiled backward, and its outputs."""
    torch.manual_seed(0)
    shapes = {"x": (ROWS, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    inputs = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    compiled = compiler.compile(mlp)
    with compiler.capture() as captured:
        outputs = compiled(inputs, eps=1e-6)
    outputs["y"].sum().backward()
    return captured, inputs, outputs


def test_the_captured_function_still_computes(run):
    captured, inputs, outputs = run
    eager = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    expected = mlp(eager, eps=1e-6)["y"]
    expected.sum().backward()
    torch.testing.assert_close(outputs["y"], expected)
    for name, tensor in inputs.items():
        torch.testing.assert_close(tensor.grad, eager[name].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_every_call_in_the_emitted_code_is_one_kernel_in_its_order(run, part):
    graph = run[0].graph(part)
    body = graph.code[graph.code.index("def call(") : graph.code.index("def get_args")]
    called = re.findall(r"^ +(extern_kernels\.\w+|cpp_fused\w+)\(", body, flags=re.MULTILINE)
    assert called
    assert [kernel.name for kernel in graph.kernels] == called
    assert graph.unparsed == ()


def test_a_kernel_knows_its_operations_stages_and_lines(run):
    forward = run[0].graph("forward").kernels
    (up,) = [kernel for kernel in forward if kernel.stages == ("up",)]
    assert (up.kind, up.is_extern, up.ops) == ("gemm", True, ("aten.mm",))
    assert up.lines == (line_of('h @ inputs["up"]'),)
    (norm,) = [kernel for kernel in forward if "norm" in kernel.stages]
    assert norm.kind == "reduction" and not norm.is_extern
    assert {"aten.mean", "aten.rsqrt"} <= set(norm.ops)
    assert line_of("torch.rsqrt") in norm.lines


def test_a_gemm_rewritten_by_a_pattern_keeps_both_operations(run):
    (addmm,) = [kernel for kernel in run[0].graph("forward").kernels if kernel.name == "extern_kernels.addmm"]
    assert addmm.ops == ("aten.mm", "aten.add")
    assert addmm.stages == ("down", "residual")
    assert addmm.lines == (line_of('activated @ inputs["down"]'), line_of("y = x + down"))


def test_stages_and_lines_reach_backward(run):
    backward = run[0].graph("backward").kernels
    assert {name for kernel in backward for name in kernel.stages} >= {"norm", "up", "act", "down"}
    gemms = [kernel for kernel in backward if kernel.kind == "gemm"]
    assert len(gemms) == 4  # the gradients of x and of the weight, twice
    assert all(kernel.stages and kernel.lines for kernel in gemms)


def test_printed_graphs_have_the_stages_of_the_capture(run):
    for graph in run[0].graphs:
        printed = read_fx(graph.fx).nodes
        nodes = [node for call in graph.compiled().calls for node in call.nodes if node.name in printed]
        assert any(node.stage for node in nodes)
        assert [printed[node.name].stage for node in nodes] == [node.stage for node in nodes]


# The implementation `inductor-remat` of lm_step has the same requirement.
TAKES_GRADIENTS = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12),
    reason="Dynamo of torch 2.11 refuses requires_grad_ in a compiled function",
)


@TAKES_GRADIENTS
def test_a_gradient_inside_a_function_has_the_stage_of_its_operation():
    def descended(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = {name: inputs[name].detach().requires_grad_() for name in ("up", "down")}
        with torch.enable_grad():
            loss = mlp({**inputs, **weights}, eps=1e-6)["y"].sum()
            gradients = torch.autograd.grad(loss, list(weights.values()))
        with stage("descend"):
            updated = {name: inputs[name] - x for name, x in zip(weights, gradients, strict=True)}
        return {"loss": loss.detach(), **updated}

    torch.manual_seed(0)
    shapes = {"x": (ROWS, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    compiled = compiler.compile(descended)
    with torch.no_grad(), compiler.capture() as captured:
        found = compiled(inputs)
    for name, tensor in descended(inputs).items():
        torch.testing.assert_close(found[name], tensor)
    (graph,) = captured.graphs
    sources = {(s.stage, s.backward) for call in graph.compiled().calls for s in call.sources}
    assert {("up", False), ("up", True), ("act", True), ("down", True), ("descend", False)} <= sources


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        with stage("gate"):
            return y * torch.sigmoid(y)


class Layers(torch.nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Gated() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x.sum()


def sources_of(function) -> list[tuple[str, SourceNode]]:
    torch.compiler.reset()
    with compiler.capture() as captured:
        compiler.compile(function)(torch.randn(ROWS, WIDTH, requires_grad=True))
    graphs = captured.program().graphs
    return [(graph.part, source) for graph in graphs for call in graph.calls for source in call.sources]


def test_operations_without_a_stage_have_the_path_of_their_module_in_both_phases():
    net = Layers()
    found = sources_of(net)
    for part in ("forward", "backward"):
        stages = {source.stage for phase, source in found if phase == part and source.stage}
        assert stages == {"layers/0/up", "layers/1/up", "gate"}
    places = {source.place.partition(" ")[2] for _, source in found if source.stage == "layers/0/up"}
    assert places == {"forward"}

    def through_a_global(x: Tensor) -> Tensor:
        return net.layers[1](x)

    assert {source.stage for _, source in sources_of(through_a_global)} >= {"layers/1/up", "gate"}


@TAKES_GRADIENTS
def test_a_gradient_inside_a_function_has_the_module_of_its_operation():
    net = Layers()
    found = sources_of(lambda x: torch.autograd.grad(net(x), list(net.parameters())))
    assert {source.stage for _, source in found if source.backward} >= {"layers/0/up", "layers/1/up"}


def test_operations_of_a_checkpoint_are_forwards_in_backward():
    def again(found: list[tuple[str, SourceNode]]) -> set[str]:
        return {source.op for part, source in found if part == "backward" and not source.backward}

    assert "aten.addmm" in again(sources_of(Layers(checkpointed=True)))
    assert "aten.addmm" not in again(sources_of(Layers()))


def test_bytes_of_a_gemm_are_its_operands(run):
    (up,) = [kernel for kernel in run[0].graph("forward").kernels if kernel.stages == ("up",)]
    assert sum(buffer.bytes for buffer in up.inputs) == 4 * (ROWS * WIDTH + WIDTH * HIDDEN)
    assert sum(buffer.bytes for buffer in up.outputs) == 4 * ROWS * HIDDEN


def test_graphs_and_scheduler_ir_are_kept_apart(run):
    captured = run[0]
    assert captured.joint is not None and "tangents_1" in captured.joint
    forward, backward = captured.graphs
    assert (forward.part, backward.part) == ("forward", "backward")
    assert "tangents_1" in backward.fx and "tangents_1" not in forward.fx
    for graph in captured.graphs:
        assert "SchedulerNode" in graph.pre_fusion and "SchedulerNode" in graph.post_fusion
        assert graph.pre_fusion != graph.post_fusion


def test_the_capture_as_plain_data(run):
    program = run[0].program()
    forward, backward = program.graphs
    assert [call.kernel for graph in program.graphs for call in graph.calls] == list(run[0].kernels)
    assert forward.memory[forward.outputs[0]].shape == (ROWS, WIDTH)
    assert forward.memory["primals_1"].bytes == 4 * ROWS * WIDTH
    (up,) = [call for call in forward.calls if call.kernel.stages == ("up",)]
    assert up.flops == 2 * ROWS * WIDTH * HIDDEN
    assert up.runtime_name is None
    assert not any(source.backward for call in forward.calls for source in call.sources)
    by_name = {source.name: source for call in backward.calls for source in call.sources}
    assert by_name["sigmoid"].backward is False and any(source.backward for source in by_name.values())
    assert json.loads(json.dumps([dataclasses.asdict(call.kernel) for call in backward.calls]))


def test_refused_fusions_are_kept(run):
    said = [refusal for graph in run[0].graphs for refusal in graph.refusals]
    assert said and all(refusal.text and refusal.first and refusal.second for refusal in said)
    known = {operation for graph in run[0].program().graphs for call in graph.calls for operation in call.operations}
    assert any(refusal.first <= known for refusal in said)


def test_write_stores_kernels_and_code(run, tmp_path):
    captured = run[0]
    captured.write(tmp_path)
    listed = json.loads((tmp_path / "kernels.json").read_text())
    assert [kernel["name"] for kernel in listed] == [kernel.name for kernel in captured.kernels]
    for part in ("forward", "backward"):
        assert (tmp_path / part / "output_code.py").read_text() == captured.graph(part).code


def test_reading_a_written_capture_keeps_stage_and_line_of_every_operation(run, tmp_path):
    run[0].write(tmp_path)
    written, found = run[0].program(), dump.read(tmp_path)
    for ours, theirs in zip(written.graphs, found.graphs, strict=True):
        assert [call.sources for call in theirs.calls] == [call.sources for call in ours.calls]
    assert any(len({node.stage for node in call.sources}) > 1 for graph in found.graphs for call in graph.calls)


def test_bytes_of_a_product_of_more_than_a_billion_elements():
    rows = 40_000
    with compiler.recording(measured=False) as captured, private.fake_tensor_mode(), private.compiling_only():
        compiler.compile(torch.bmm)(torch.empty(1, rows, 8), torch.empty(1, 8, rows))
    (product,) = captured.kernels
    assert [buffer.bytes for buffer in product.outputs] == [4 * rows * rows]
    assert [buffer.bytes for buffer in product.inputs] == [4 * rows * 8] * 2


def test_a_fused_kernel_reads_what_it_gathers():
    """Two sums over one row of gathered values are one kernel, for which Inductor counts the whole table."""

    def picked(table, ids, x):
        found = table.gather(1, ids[:, None])[:, 0]
        return (found * x).sum(), (found + x).amax()

    table, ids, x = torch.randn(64, 500), torch.randint(500, (64,)), torch.randn(64)
    with torch.no_grad(), compiler.capture() as captured:
        compiler.compile(picked)(table, ids, x)
    (kernel,) = captured.kernels
    sizes = {access.bytes for access in kernel.inputs}
    assert table.numel() * 4 not in sizes and sizes == {64 * 4 * 2, 64 * 8, 64 * 4}


def test_a_fused_kernels_reads_of_its_own_results_are_no_inputs():
    def centred(x):
        total = x.sum(-1, keepdim=True)
        return total, x - total

    with torch.no_grad(), compiler.capture() as captured:
        compiler.compile(centred)(torch.randn(64, 32))
    (kernel,) = captured.kernels
    assert [access.bytes for access in kernel.inputs] == [64 * 32 * 4]
    assert sorted(access.bytes for access in kernel.outputs) == [64 * 4, 64 * 32 * 4]


def test_a_kernel_that_only_follows_another_one_does_not_read_its_result():
    """Inductor notes that x is changed after the product, which reads it."""

    def step(x, weight):
        product = x @ weight
        x.add_(1.0)
        return product

    with torch.no_grad(), compiler.capture() as captured:
        compiler.compile(step)(torch.randn(64, 32), torch.randn(32, 32))
    product, add = captured.kernels
    assert [access.name for access in add.inputs] == [access.name for access in add.outputs] == [product.inputs[0].name]


def test_a_capture_without_a_compile_is_an_error():
    with pytest.raises(RuntimeError, match="compiled nothing"), compiler.capture():
        pass


def test_a_custom_pass_in_use_is_an_error():
    with torch._inductor.config.patch(_post_fusion_custom_pass=lambda nodes: nodes):
        with pytest.raises(RuntimeError, match="_post_fusion_custom_pass is in use"), compiler.capture():
            pass


def test_kernels_that_become_a_cuda_graph_stand_where_the_graph_is_called():
    """In mode reduce-overhead they are in a function of their own, before `call`."""
    code = """
def partition_0(args):
    arg0_1, arg1_1 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        # [Provenance debug handles] triton_poi_fused_add_0:4
        triton_poi_fused_add_0.run(arg0_1, arg1_1, buf0, 64, stream=raw_stream0)
    return (buf0, )

def partition_1(args):
    buf1, = args
    args.clear()
    buf2 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
    # [Provenance debug handles] extern_kernels.mm:6
    extern_kernels.mm(buf1, buf1, out=buf2)
    return (buf2, )

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        partition0_args = [arg0_1, arg1_1]
        del arg0_1, arg1_1
        (buf0,) = self.partitions[0](partition0_args)
        del partition0_args
        # [Provenance debug handles] triton_poi_fused_mul_1:5
        triton_poi_fused_mul_1.run(buf0, buf1, 64, stream=raw_stream0)
        partition1_args = [buf1]
        (buf2,) = self.partitions[1](partition1_args)
        return (buf2, )

runner = Runner(partitions=[partition_0,partition_1,])
call = runner.call
"""
    read = read_code(code)
    generated = ["triton_poi_fused_add_0", "triton_poi_fused_mul_1"]
    assert [line.partition(".run(")[0] for line in read.unparsed] == generated  # this code does not define them
    assert [call.name for call in read.calls] == ["extern_kernels.mm"]
    assert read.inputs == ("arg0_1", "arg1_1") and read.outputs == ("buf2",)


def test_reasons_against_a_cuda_graph_are_kept():
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter as skip

    with compiler.cuda_graph_skips() as skips:
        skip("skipping cudagraphs due to mutated inputs")
    skip("skipping cudagraphs due to another call")
    assert skips == ["skipping cudagraphs due to mutated inputs"]


def test_a_missing_private_name_names_the_tested_versions(monkeypatch):
    monkeypatch.setitem(private._NAMES, "torch._inductor.debug", ("gone_in_this_version",))
    message = r"torch\._inductor\.debug\.gone_in_this_version.*2\.11\.0, 2\.12\.1, 2\.13\.0"
    with pytest.raises(RuntimeError, match=message):
        private._require_names()


def test_a_line_that_sums_partial_results_counts_one_kernel_per_launch():
    code = """
def call(self, args):
        arg0_1, = args
        workspace_0 = empty_strided_cuda((2048, ), (1, ), torch.float32)
        buf1 = workspace_0[0 * 4 * 256 : (0 + 1) * 4 * 256].view(4, 256).sum(dim=0).to(torch.bfloat16)
        workspace_1 = workspace_0; del workspace_0  # reuse
        buf2 = workspace_1[1 * 4 * 256 : (1 + 1) * 4 * 256].view(4, 256).sum(dim=0)
        triton_poi_fused_mul_1.run(buf1, buf2, 64, stream=raw_stream0)
        return (buf2, )
"""
    read = read_code(code)
    assert [call.name for call in read.calls] == ["aten.sum", "aten.to", "aten.sum"]
    assert read.calls[0].reads == ["workspace_0"] and read.calls[1].reads == read.calls[0].writes
    assert [dict(call.viewed) for call in (read.calls[0], read.calls[2])] == [
        {"workspace_0": 4 * 256}, {"workspace_1": 4 * 256},
    ]
    assert read.unparsed == ["triton_poi_fused_mul_1.run(buf1, buf2, 64, stream=raw_stream0)"]  # the code has no such


def test_a_constant_of_the_code_is_a_buffer():
    code = """
_tensor_constant0 = None  # device(type='cuda', index=0) torch.float32 (3, 4) (4, 1) 7f1c

def call(self, args):
        arg0_1, = args
        extern_kernels.mm(arg0_1, _tensor_constant0, out=buf0)
        return (buf0, )
"""
    read = read_code(code)
    constant = read.memory["_tensor_constant0"]
    assert (constant.shape, constant.bytes, constant.constant) == ((3, 4), 48, True)
    assert read.calls[0].reads == ["arg0_1", "_tensor_constant0"]


def test_memory_that_two_buffers_took_over_in_turn_is_read():
    code = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
@triton_heuristics.pointwise(
    inductor_meta={'grid_type': 'Grid1D', 'mutated_arg_names': ['in_out_ptr0']}
)
@triton.jit
def triton_poi_fused_0(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 64
    tmp0 = tl.load(in_out_ptr0 + (x0), xmask)
    tl.store(in_out_ptr0 + (x0), tmp0, xmask)
''', device_str='cuda')

def call(self, args):
        mm, = args
        buf13 = mm; del mm  # reuse
        buf17 = buf13; del buf13  # reuse
        triton_poi_fused_0.run(buf17, 64, stream=raw_stream0)
        return (buf17, )
"""
    (call,) = read_code(code).calls
    assert (call.reads, call.writes) == (["mm"], ["buf17"])


def test_the_choice_of_coordinate_descent_is_the_kernel_in_use() -> None:
    """max-autotune continues from the best candidate, and `compile_results` may lack its final choice."""
    from xlafuse.triton_side.inductor import _private as private

    def result(config: object, kernel: str) -> SimpleNamespace:
        return SimpleNamespace(config=config, kernel=kernel)

    start, found, unknown = (SimpleNamespace(name=name) for name in ("start", "found", "unknown"))
    kernel = private.CachingAutotuner.__new__(private.CachingAutotuner)
    kernel.compile_results = [result(start, "first")]
    private._candidates[kernel] = 1
    module = SimpleNamespace(k=kernel)

    kernel.launchers = [SimpleNamespace(config=start)]
    assert private.triton_kernel(module, "k") == private.TritonKernel(1, False, str(start), "first")

    found.found_by_coordesc = unknown.found_by_coordesc = True
    private._compiled_by_descent[kernel] = {str(found): result(found, "better")}
    kernel.launchers = [SimpleNamespace(config=found)]
    assert private.triton_kernel(module, "k") == private.TritonKernel(1, True, str(found), "better")

    kernel.launchers = [SimpleNamespace(config=unknown)]
    assert private.triton_kernel(module, "k") == private.TritonKernel(1, True, str(unknown), None)


def test_branches_that_depend_on_data_are_unparsed(tmp_path):
    def either(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(y.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() * 3, (x,)) + 1

    with torch.no_grad(), compiler.capture() as captured:
        compiler.compile(either)(torch.ones(64, 64), torch.ones(4))
    captured.write(tmp_path)
    for program in (captured.program(), dump.read(tmp_path)):
        (graph,) = program.graphs
        assert len([line for line in graph.unparsed if re.search(r"(true|false)_graph_0\(", line)]) == 2
