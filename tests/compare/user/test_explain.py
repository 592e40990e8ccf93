"""`xlafuse.explain` on code such as users have, compiled in its separate process for an absent GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from full_marks import full

import xlafuse
from xlafuse.compare.cli.main import cli
from xlafuse.compare.functions.names import resolve
from xlafuse.compare.graph.analyse.exchange import exchange_of
from xlafuse.compare.graph.analyse.totals import totals
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.sources.explained import Explained
from xlafuse.compare.user import explain as explain_user

pytestmark = pytest.mark.slow
CODE = Path(__file__).parent / "user_code"
TARGET = {"target": "h200"}
ARGS = "bf16[64,4096], bf16[4096,256]"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Let this process and those that compile import the user's modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CODE))
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves a GPU to the compiling process
        yield


def imported(name: str, needs: str) -> Any:
    """Return a fixture with a module of the user's, which needs an installed package."""

    @pytest.fixture(scope="module", name=name)
    def module() -> Any:
        pytest.importorskip(needs)
        return importlib.import_module(name)

    return module


jax_code, jax_calls = imported("jax_code", "jax"), imported("jax_calls", "jax_cuda13_plugin")
torch_code, torch_breaks = imported("torch_code", "torch"), imported("torch_breaks", "torch")


def struct(*shape: int, dtype: str = "bfloat16") -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype))


def names(graph: Any) -> set[str]:
    return {op.op for kernel in graph.kernels for op in kernel.source_ops}


def stages(graph: Any) -> set[str]:
    return {stage for kernel in graph.kernels for stage in kernel.stages}


def inputs(graph: Any) -> list[tuple[tuple[int, ...], str]]:
    return [(buffer.shape, buffer.dtype) for buffer in graph.buffers if buffer.role == "input"]


# JAX


@pytest.fixture(scope="module")
def jax_graphs(jax_code: Any) -> dict[str, FusionGraph]:
    """Return graphs of functions of JAX with their arguments, which one process compiles."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    leaves = {"a": np.ones((16, 32), np.float32), "rest": [jnp.ones((32, 8))]}
    args, kwargs = jax_code.train_inputs()
    module, x = jax_code.attention(), struct(2, 16, 64, dtype="float32")
    calls = [
        partial(jax_code.tree, leaves, "product", scale=None),
        partial(jax_code.tree, leaves, "sum", scale=struct(8, dtype="float32")),
        partial(jax_code.train_step, *args, **kwargs),
        partial(module, x, mask=None),
        partial(module.only_norm, x),
        jax.jit(jax_code.gelu).lower(struct(64, 128)),
    ]
    return dict(xlafuse.explain(calls, **TARGET).graphs)


def test_a_plain_function(jax_code: Any, tmp_path: Path):
    import jax

    def state() -> Any:
        return dict(jax.config.values), dict(os.environ), list(sys.path), jax.jit(jax_code.gelu)._cache_size()

    before = state()
    explained = xlafuse.explain(jax_code.gelu, struct(256, 512), **TARGET)
    assert state() == before, "this process stays unchanged"
    graph = explained.graph
    assert (graph.name, graph.compiler, graph.target) == ("gelu", "xla", "h200")
    (kernel,) = graph.kernels
    assert kernel.bytes_read == kernel.bytes_written == 256 * 512 * 2
    assert "tanh" in names(graph)
    assert any(line.endswith("jax_code.py:11") for line in kernel.lines)
    assert graph.versions["jax"] and not graph.unparsed and not explained.notes
    assert str(explained).startswith("gelu\n") and "fusion" in str(explained)
    explained.save(tmp_path / "gelu.json.gz")
    assert xlafuse.load(tmp_path / "gelu.json.gz") == graph
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match="no.json"):
        xlafuse.load(tmp_path / "no.json")


@pytest.mark.full
def product(a: Any, b: Any) -> Any:
    return a @ b


def test_a_product_that_was_not_recorded_is_that_of_the_shorter_predicted_time() -> None:
    """A library's kernel for a large product, Triton's for a few rows; no GPU's that nothing was measured on."""
    jax = pytest.importorskip("jax")

    def kernels(rows: int, target: str) -> list[tuple[str, str]]:
        arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, 4096), (4096, 4112))]
        (graph,) = xlafuse.explain(product, *arrays, framework="jax", target=target).graphs.values()
        return [(kernel.facts.get("custom_call_target", "triton"), kernel.provenance) for kernel in graph.kernels or ()]

    assert kernels(4112, "h200") == [("__cublas$lt$matmul", "predicted choice")]
    assert ("triton", "predicted choice") in kernels(16, "h200")
    assert {provenance for _, provenance in kernels(4112, "b200")} == {"not autotuned"}


def test_it_renders_in_a_notebook(jax_code: Any):
    page = xlafuse.explain(jax_code.gelu, struct(8, 128), **TARGET, name="<gelu>")._repr_html_()
    assert "<details" in page and "&lt;gelu&gt;" in page and "<gelu>" not in page


def test_pytrees_keywords_and_static_values(jax_graphs: dict[str, FusionGraph]):
    product, scaled = jax_graphs["tree"], jax_graphs["tree-2"]
    assert inputs(product) == [((16, 32), "f32"), ((32, 8), "f32")]
    assert inputs(scaled) == [((16, 32), "f32"), ((32, 8), "f32"), ((8,), "f32")]
    assert "add" in names(scaled) - names(product)


def test_a_jitted_train_step_with_scan_and_remat(jax_graphs: dict[str, FusionGraph]):
    graph = jax_graphs["train_step"]
    assert {kernel.launches for kernel in graph.kernels} >= {1, 3}  # three layers, in a loop
    assert any(op.rematerialized and op.op == "tanh" for kernel in graph.kernels for op in kernel.source_ops)
    assert any(op.backward for kernel in graph.kernels for op in kernel.source_ops)
    assert "layer" in {stage.split("/")[-1] for stage in stages(graph)}
    # jit traces the learning rate, a Python number that is not declared static.
    assert ((), "f32") in inputs(graph)
    assert "clamp" in names(graph) or {"min", "max"} & names(graph)


def test_an_nnx_attention_module(jax_graphs: dict[str, FusionGraph]):
    graph = jax_graphs["Attention"]
    assert {"norm", "attention"} <= {stage.split("/")[0] for stage in stages(graph)}
    assert len(inputs(graph)) == 10  # four kernels and biases, the norm's scale, x: no weight became a constant
    assert ((2, 16, 64), "f32") in inputs(graph)
    assert "dot_general" not in names(jax_graphs["Attention.only_norm"])


@pytest.mark.full
def test_variables_that_a_module_changes_are_outputs(jax_code: Any):
    from flax import nnx

    graph = xlafuse.explain(jax_code.Counting(rngs=nnx.Rngs(0)), struct(128, 64, dtype="float32"), **TARGET).graph
    returned = [buffer.shape for buffer in graph.buffers if buffer.role == "output"]
    assert sorted(returned) == [(64,), (64,), (128, 64)]  # running mean, running variance and the result


def test_training_is_two_compiled_calls(jax_code: Any):
    graph = xlafuse.explain(jax_code.normed_gelu, struct(128, 256), struct(256), grad=True, **TARGET).graph
    assert {kernel.phase for kernel in graph.kernels} == {"forward", "backward"}
    assert graph.saved
    by_backward = {a.buffer for kernel in graph.kernels if kernel.phase == "backward" for a in kernel.inputs}
    assert {buffer.name for buffer in graph.saved} <= by_backward
    gradients = {buffer.shape for buffer in graph.buffers if buffer.role == "output"}
    assert {(128, 256), (256,)} <= gradients


def test_lowered_and_compiled_functions(jax_code: Any, jax_graphs: dict[str, FusionGraph]):
    import jax

    for_target = jax_graphs["gelu"]
    assert (for_target.target, len(for_target.kernels)) == ("h200", 1)
    assert any(line.endswith("jax_code.py:11") for line in for_target.kernels[0].lines)
    lowered = jax.jit(jax_code.gelu).lower(struct(64, 128))
    as_compiled = xlafuse.explain(lowered.compile())
    assert as_compiled.graph.name == "gelu" and "tanh" in names(as_compiled.graph)
    assert any("compiled for the CPU" in note for note in as_compiled.notes) == (jax.default_backend() == "cpu")
    with pytest.raises(xlafuse.ExplainError, match="neither arguments"):
        xlafuse.explain(lowered, struct(64, 128))
    with pytest.raises(explain_user.ExplainError, match="target="):
        xlafuse.explain(lowered.compile(), **TARGET)
    with pytest.raises(explain_user.ExplainError, match="framework='torch'"):
        xlafuse.explain(lowered, framework="torch", **TARGET)


def test_several_gpus_are_for_jax() -> None:
    import torch

    with pytest.raises(explain_user.ExplainError, match="devices=4"):
        xlafuse.explain(torch.relu, torch.empty(4, device="meta"), devices=4, **TARGET)


def test_several_are_compared(jax_code: Any):
    pair = {"plain": jax_code.normed_gelu, "apart": jax_code.normed_gelu_apart}
    explained = xlafuse.explain(pair, struct(256, 512), struct(512), **TARGET)
    assert [len(graph.kernels) for graph in explained.graphs.values()] == [1, 2]
    assert "parted" in explained.align().row("activation").cells[1].relations
    assert any("apart" in finding.text for finding in explained.findings())
    assert "parted" in str(explained)
    assert str(explained["plain"]).startswith("plain")
    with pytest.raises(ValueError, match="2 graphs"):
        _ = explained.graph


CALLS = ("printed", "factorised", "doubled", "sine_of_numpy", "logged", "solved", "eigenvectors")


@pytest.fixture(scope="module")
def called_graphs(jax_calls: Any) -> dict[str, FusionGraph]:
    """Return graphs of functions that call out of XLA: for Python, routines of LAPACK, and a kernel of Pallas."""
    functions = [getattr(jax_calls, name) for name in (*CALLS, "only_printed")]
    return dict(xlafuse.explain(functions, struct(64, 64, dtype="float32"), **TARGET).graphs)


@pytest.mark.parametrize("name", CALLS)
def test_calls_out_of_xla_are_kernels_of_their_own(called_graphs: dict[str, FusionGraph], name: str) -> None:
    graph = called_graphs[name]
    kinds = [kernel.kind for kernel in graph.kernels]
    assert {"custom", "library"} & set(kinds) and len(kinds) > 1 and not graph.unparsed


def test_a_jax_function_may_return_none(called_graphs: dict[str, FusionGraph]) -> None:
    assert [kernel.kind for kernel in called_graphs["only_printed"].kernels] == ["reduction", "custom"]


def test_a_function_over_several_gpus(jax_calls: Any) -> None:
    args = (struct(64, 4096), struct(4096, 256))
    graph = xlafuse.explain(jax_calls.summed, *args, devices=4, **TARGET).graph
    assert [kernel.kind for kernel in graph.kernels].count("collective") == 1
    exchange = exchange_of(next(k for k in graph.kernels if k.kind == "collective"))
    assert exchange is not None and (exchange.opcode, exchange.gpus) == ("all-reduce", 4)
    assert exchange.sent_bytes == 2 * 3 / 4 * 64 * 256 * 2
    assert inputs(graph) == [((64, 1024), "bf16"), ((1024, 256), "bf16")]  # as shard_map splits them
    with pytest.raises(explain_user.ExplainError, match="devices"):
        xlafuse.explain(jax_calls.summed, *args, devices=2, **TARGET)


def test_arguments_of_a_mesh_without_shardings_lie_whole_on_each_gpu(jax_calls: Any) -> None:
    graph = xlafuse.explain(jax_calls.product, struct(64, 4096), struct(4096, 256), devices=4, **TARGET).graph
    assert inputs(graph) == [((64, 4096), "bf16"), ((4096, 256), "bf16")]


@pytest.mark.parametrize(
    "call", [["product", "--inputs", "jax_calls:inputs_over_mesh"], ["sharded_product()", "--args", ARGS]],
    ids=["arguments", "in_shardings"],
)
def test_arguments_lie_as_their_shardings_say(jax_calls: Any, call: list[str], tmp_path: Path) -> None:
    """In processes of their own: the number of CPUs that JAX shows is fixed at its start."""
    out = tmp_path / "graph.json"
    command = [sys.executable, "-m", "xlafuse", "explain", f"jax_calls:{call[0]}", *call[1:], "-o", str(out)]
    subprocess.run([*command, "--devices", "4", "--target", "b200"], cwd=CODE, check=True, capture_output=True)
    graph = explain_user.load(out)
    assert inputs(graph) == [((64, 1024), "bf16"), ((1024, 256), "bf16")]
    assert [kernel.facts["gpus"] for kernel in graph.kernels or () if kernel.kind == "collective"] == [4]


@pytest.mark.full
def test_a_torch_function_may_work_in_place(torch_code: Any) -> None:
    import torch

    graph = xlafuse.explain(torch_code.scaled_in_place, torch.empty(64, 64, device="meta"), **TARGET).graph
    (kernel,) = graph.kernels
    assert kernel.bytes_read == kernel.bytes_written == 64 * 64 * 4


def test_closed_over_weights_are_noted(jax_code: Any):
    import jax.numpy as jnp

    weights = jnp.ones((128, 128))
    explained = xlafuse.explain(lambda x: x @ weights, struct(8, 128, dtype="float32"), **TARGET, name="f")
    note = explained.notes[0]
    assert note.startswith("f closes over arrays (float32[128, 128])")
    assert ((128, 128), "f32") in inputs(explained.graph)


@pytest.mark.full
def test_closed_over_weights_of_a_training_step_are_inputs(jax_code: Any):
    import jax.numpy as jnp

    weights = {"up": jnp.ones((128, 512)), "down": jnp.ones((512, 128))}

    def mlp(x: Any) -> Any:
        return jnp.tanh(x @ weights["up"]) @ weights["down"]

    graph = xlafuse.explain(mlp, struct(64, 128, dtype="float32"), grad=True, **TARGET).graph
    assert {((128, 512), "f32"), ((512, 128), "f32")} <= set(inputs(graph))
    # tanh's result is the only computed array that backward needs from forward
    forward, backward = ([each for each in graph.kernels if each.phase == phase] for phase in ("forward", "backward"))
    written = {access.buffer for kernel in forward for access in kernel.outputs or ()}
    read = {access.buffer for kernel in backward for access in kernel.inputs or ()}
    assert {buffer.shape for buffer in graph.buffers if buffer.name in written & read} == {(64, 512)}


def test_the_callers_settings_apply(jax_code: Any):
    import jax

    with jax.enable_x64(True):
        graph = xlafuse.explain(jax_code.gelu, struct(8, 8, dtype="float64"), **TARGET).graph
    assert {buffer.dtype for buffer in graph.buffers} == {"f64"}


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda code: xlafuse.explain(lambda x: x * 2, 3.0, **TARGET), "framework='jax'"),
        (lambda code: xlafuse.explain(code.gelu, struct(8, dtype="int32"), grad=True, **TARGET), "floating dtype"),
        (lambda code: xlafuse.explain(code.gelu, struct(8), target="h2000"), "unknown target"),
        (lambda code: xlafuse.explain(3, struct(8)), "cannot be called"),
        (lambda code: xlafuse.explain([code.gelu], struct(8), name="f"), "one graph"),
        (lambda code: xlafuse.explain(lambda x: os._exit(7), struct(8), **TARGET), "died .exit code 7"),
        (lambda code: xlafuse.explain(lambda x: time.sleep(60), struct(8), **TARGET, timeout=4), "4 s.*--timeout"),
    ],
)
def test_failures_are_explain_errors(jax_code: Any, call: Any, complaint: str):
    with pytest.raises(xlafuse.ExplainError, match=complaint):
        call(jax_code)


# PyTorch


@pytest.mark.full
def test_a_torch_module_with_keywords(torch_code: Any):
    import torch

    (x,), keywords = torch_code.inputs()
    module = torch.compile(torch_code.mlp())
    graph = xlafuse.explain(module, x, **keywords, **TARGET).graph
    assert (graph.name, graph.compiler, graph.target) == ("Mlp", "inductor", "h200")
    assert [kernel.kind for kernel in graph.kernels].count("gemm") == 2
    assert any(line.endswith("torch_code.py:14") for kernel in graph.kernels for line in kernel.lines)
    assert not torch.cuda.is_initialized() and module.training


@pytest.fixture(scope="module")
def torch_steps(torch_code: Any) -> Explained:
    """Return training steps of PyTorch functions, which one process compiles."""
    import torch

    q = torch.empty(2, 4, 64, 32, dtype=torch.bfloat16, device="meta")
    calls = [partial(torch_code.attention, q, q, q), partial(torch_code.broken, torch.empty(32, 64))]
    return xlafuse.explain(calls, grad=True, **TARGET)


def test_torch_forward_and_backward(torch_steps: Explained):
    graph = torch_steps.graphs["attention"]
    assert [kernel.kind for kernel in graph.kernels].count("attention") == 2
    assert {kernel.phase for kernel in graph.kernels} == {"forward", "backward"}
    assert any("flash" in note for note in torch_steps.notes)


def test_graph_breaks_are_reasons(torch_steps: Explained):
    graph = torch_steps.graphs["broken"]
    forward = [kernel.name for kernel in graph.kernels if kernel.phase == "forward"]
    assert len(forward) == 2
    reasons = [reason for reason in graph.reasons if reason.code == "graph-break"]
    assert tuple(forward) in {(reason.producer, reason.consumer) for reason in reasons}
    (broke,) = [reason for reason in reasons if reason.line]
    assert broke.line.endswith("torch_code.py:29")
    (note,) = [note for note in torch_steps.notes if "breaks at" in note]
    assert f"breaks at {broke.line}: Call to `torch._dynamo.graph_break()`" in note


@pytest.mark.full
def test_pieces_around_values_that_depend_on_data_are_compiled(torch_breaks: Any):
    import torch

    named = ("number", "mask", "branch", "indices", "nothing", "in_place", "counted", "repeated")
    functions = [getattr(torch_breaks, name) for name in named]
    explained = xlafuse.explain(functions, torch.empty(64, 128, device="meta"), **TARGET)
    wanted = {
        "number": {"aten.sum", "aten.mul"}, "mask": {"aten.gt", "aten.mul"}, "branch": {"aten.sum", "aten.add"},
        "indices": {"aten.add"}, "nothing": {"aten.add"}, "in_place": {"aten.mul"},
        "counted": {"aten.relu", "aten.bincount"}, "repeated": {"aten.relu", "aten.mm"},
    }
    for name, operations in wanted.items():
        assert operations <= names(explained.graphs[name]), name
        broken = any(reason.origin == "dynamo" for reason in explained.graphs[name].reasons)
        assert broken == (name not in ("nothing", "in_place")), name
    assert sum("assumed" in note for graph in explained.graphs.values() for note in graph.notes) == 4
    text = explained.text()
    assert "mask: without a GPU, it is assumed" in text and "aten.nonzero" in text

    counted = explained["counted"]
    *_, last = counted.graph.kernels
    assert (last.name, last.outputs) == ("aten.bincount.default", None)
    (line,) = last.lines
    assert any(f"only to {line}, because the size of" in note for note in counted.graph.notes)
    assert "declared bytes: at least" in counted.text()

    repeated = explained["repeated"]
    kinds = [kernel.kind for kernel in repeated.graph.kernels]
    assert kinds == ["elementwise", "gemm", "gemm"] * 3
    found = totals(repeated.graph)
    x, square = 64 * 128 * 4, 64 * 64 * 4
    # A piece reads and writes x; x @ x.T reads it once; the second product reads and writes it.
    assert found.declared.value == 3 * (2 * x + (x + square) + (square + 2 * x)) and not found.declared.unknown
    assert found.compulsory == {"forward": 2 * x}
    assert "aten.mm x6" in " ".join(repeated.graph.notes) and "repeated() itself runs uncompiled" in repeated.text()


@pytest.mark.parametrize(
    ("named", "shape", "reason"),
    [
        ("uncompiled", (64,), r"torch_breaks.py:\d+: .*graph_break.*6 operations .aten.add x3, aten.relu x3"),
        full("recurrent", (2, 4, 16), r"LSTM.*aten._cudnn_rnn"),
    ],
)
def test_where_nothing_is_compiled_the_error_gives_dynamos_reason(
    torch_breaks: Any, named: str, shape: tuple[int, ...], reason: str
):
    import torch

    function = torch_breaks.uncompiled
    if named == "recurrent":
        function = torch.nn.LSTM(16, 8, 2, bidirectional=True, batch_first=True, device="meta")
    with pytest.raises(xlafuse.ExplainError, match=f"compiled nothing: .*{reason}"):
        xlafuse.explain(function, torch.empty(shape, device="meta"), **TARGET)


@pytest.mark.full
def test_a_factory_or_class_is_refused_with_a_call_that_works(torch_code: Any, monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.chdir(CODE)
    x = torch.empty(8, 16)
    for given in (torch_code.mlp, torch_code.Mlp):
        with pytest.raises(xlafuse.ExplainError, match="on the command line '") as raised:
            explain_user.identify(given, (x,), {})
        assert isinstance(resolve(str(raised.value).split("'")[1]), torch_code.Mlp)
    with pytest.raises(xlafuse.ExplainError, match="Linear is a class; .* without parameters"):
        explain_user.identify(torch.nn.Linear, (x,), {})
    with pytest.raises(xlafuse.ExplainError, match="returns a module"):
        xlafuse.explain(torch_code.mlp, framework="torch", **TARGET)


@pytest.mark.full
def test_dynamic_shapes_that_become_static_are_noted(torch_breaks: Any, monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    functions = {"dynamic": torch_breaks.dynamic(), "static": torch.compile(torch_breaks.relu)}
    explained = xlafuse.explain(functions, torch.empty(64, 128, device="meta"), **TARGET)
    assert [note.partition(":")[0] for note in explained.notes if "static" in note] == ["dynamic"]


def test_the_names_in_the_code_tell_the_framework(torch_breaks: Any):
    from xlafuse.compare.functions.parcel import ArrayLike

    array = ArrayLike("numpy", (64, 128), "float32")
    assert explain_user.identify(torch_breaks.relu, (array,), {}).framework == "torch"
    assert explain_user.identify(torch_breaks.branch, (array,), {}).framework == "torch"  # as its module imports it
    nothing: dict[str, Any] = {"__name__": "no_module"}
    exec("def double(x): return x + x", nothing)
    with pytest.raises(xlafuse.ExplainError, match="framework"):
        explain_user.identify(nothing["double"], (array,), {})


def _imports_inside(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.tanh(x)


def _closes_over_functions() -> Any:
    import jax

    activation = jax.nn.gelu

    def helper(x: Any) -> Any:
        return activation(x)

    return lambda x: helper(x) * 2


def _closes_over_weights() -> Any:
    import jax.numpy as jnp

    weights = {"up": jnp.ones(4)}
    return lambda x: x * weights["up"]


@dataclass
class _Layer:
    scale: float

    def __call__(self, x: Any) -> Any:
        return _imports_inside(x) * self.scale


@pytest.mark.parametrize(
    "made",
    [lambda: _imports_inside, _closes_over_functions, _closes_over_weights, lambda: _Layer(2.0),
     lambda: _Layer(2.0).__call__],
    ids=["import", "closed-over functions", "closed-over arrays", "called object", "method"],
)
def test_the_framework_is_that_of_the_values_that_a_function_uses(jax_code: Any, made: Any):
    from xlafuse.compare.functions.parcel import ArrayLike

    function = made()
    assert explain_user.identify(function, (ArrayLike("numpy", (4,), "float32"),), {}).framework == "jax"


@pytest.mark.full
def test_parts_of_one_product_are_not_the_same_values(torch_breaks: Any):
    import torch

    x = torch.empty(8, 256, 128, dtype=torch.bfloat16, device="meta")
    explained = xlafuse.explain(torch_breaks.Attention(), x, **TARGET)
    kinds = {finding.kind for finding in explained.findings()}
    assert not kinds & {"duplicate", "recomputed"}


@pytest.mark.full
def test_torch_errors_name_the_users_line(torch_code: Any):
    import torch

    with pytest.raises(xlafuse.ExplainError, match=r"(?s)mismatched: .*torch_code.py:\d+"):
        xlafuse.explain(torch_code.mismatched, torch.empty(8, 16), **TARGET)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers (180 MB): pip install transformers")
def test_a_llama_decoder_layer(torch_code: Any):
    layer, args, kwargs = torch_code._llama()
    explained = xlafuse.explain(layer, *args, **kwargs, grad=True, **TARGET)
    graph = explained.graph
    assert not [reason for reason in graph.reasons if reason.code == "graph-break"]
    forward = [kernel for kernel in graph.kernels if kernel.phase == "forward"]
    assert [kernel.kind for kernel in forward].count("gemm") == 7
    assert any("scaled_dot_product_flash_attention" in kernel.name for kernel in forward)
    assert graph.saved and not graph.unparsed


# Both frameworks


@pytest.mark.full
def test_functions_of_both_frameworks_are_compiled_and_checked(jax_code: Any, torch_code: Any) -> None:
    import torch

    functions = {"jax": jax_code.gelu, "torch": torch_code.gelu}
    tensor = torch.empty(64, 128, dtype=torch.bfloat16)
    found = xlafuse.explain(functions, tensor, check=(torch.randn(8, 16),), **TARGET)
    assert {name: graph.compiler for name, graph in found.graphs.items()} == {"jax": "xla", "torch": "inductor"}
    assert [inputs(graph) for graph in found.graphs.values()] == [[((64, 128), "bf16")]] * 2
    assert [(one.name, one.other, one.agrees) for one in found.agreement] == [("torch", "jax", True)]


# On this machine's GPU


@pytest.mark.gpu
def test_jax_on_this_machines_gpu(jax_code: Any):
    graph = xlafuse.explain(jax_code.normed_gelu, struct(128, 256), struct(256), grad=True).graph
    assert "NVIDIA" in graph.target
    assert {kernel.provenance for kernel in graph.kernels} <= {"compiled", "device"}


@pytest.mark.gpu
def test_torch_on_this_machines_gpu(torch_code: Any):
    (x,), keywords = torch_code.inputs()
    graph = xlafuse.explain(torch_code.mlp(), x, **keywords, grad=True).graph
    assert "NVIDIA" in graph.target
    assert {kernel.phase for kernel in graph.kernels} == {"forward", "backward"}
    assert {kernel.provenance for kernel in graph.kernels} <= {"compiled", "device"}


# The command


@pytest.fixture
def other_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Name another Python for XLA, which leaves a file `ran` where it runs."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch {tmp_path}/ran\nOTHER_PYTHON=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("XLAFUSE_XLA_PYTHON", str(python))
    return tmp_path / "ran"


def explain_command(*words: str) -> Any:
    return CliRunner().invoke(cli, ["explain", *words, "--target", "h200"])


NORMED = ("--args", "bf16[256,512], bf16[512]", "--framework", "jax")


def test_the_command_compiles_by_the_python_that_is_named_for_xla(
    jax_code: Any, other_python: Path, tmp_path: Path
) -> None:
    source = str(CODE / "jax_code.py")
    words = (f"{source}:train_step", "--inputs", f"{source}:train_inputs", "--out", str(tmp_path / "step.json"))
    shown = explain_command(*words)
    assert shown.exit_code == 0, shown.output
    assert other_python.exists() and "compiled by this" not in shown.output
    assert "train_step" in shown.stdout and "3 launches" in shown.stdout
    assert xlafuse.load(tmp_path / "step.json").name == "train_step"


@pytest.mark.parametrize(
    "words", [("jax_code.py:normed_gelu", *NORMED), ("torch_code.py:gelu", "--args", "f32[64,64]")]
)
def test_files_below_the_current_folder_are_named_from_there(
    words: tuple[str, ...], jax_code: Any, torch_code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that is committed or compared names no folder of the machine that compiled it."""
    monkeypatch.chdir(CODE)
    done = explain_command(*words, "--json")
    assert done.exit_code == 0, done.output
    assert f"{words[0].partition(':')[0]}:" in done.stdout and str(CODE) not in done.stdout


def test_the_command_with_several_functions(jax_code: Any) -> None:
    source = str(CODE / "jax_code.py")
    both = explain_command(f"{source}:normed_gelu", f"{source}:normed_gelu_apart", *NORMED, "--json")
    data = json.loads(both.stdout)
    assert {name: len(graph["kernels"]) for name, graph in data["graphs"].items()} == {
        "normed_gelu": 1, "normed_gelu_apart": 2,
    }


def test_a_failure_of_the_command_names_the_users_line(jax_code: Any) -> None:
    failed = explain_command(f"{CODE / 'jax_code.py'}:mismatched", "--args", "f32[2,3]", "--framework", "jax")
    assert failed.exit_code == 1
    assert re.search(r"mismatched: TypeError: .*jax_code.py:\d+", failed.stderr.splitlines()[-1])


def test_nothing_but_progress_goes_to_stderr(jax_code: Any):
    words = [f"{CODE / 'jax_code.py'}:normed_gelu_apart", *NORMED, "--why"]
    done = subprocess.run(
        [sys.executable, "-m", "xlafuse", "explain", *words, "--target", "h200"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "1. 524 kB" in done.stdout, done.stderr
    assert all(line.startswith(("compiling ", "still compiling")) for line in done.stderr.splitlines()), done.stderr


def test_a_closure_stays_in_this_python_and_a_note_says_so(jax_code: Any, other_python: Path) -> None:
    explained = xlafuse.explain(lambda x: x * 2, struct(8), **TARGET, framework="jax", name="twice")
    assert not other_python.exists() and len(explained.graph.kernels) == 1
    (note,) = explained.notes
    assert "this Python's jax" in note and "twice" in note


def test_a_file_that_the_other_python_cannot_import_stays(other_python: Path, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    file = tmp_path / "only_here.py"
    file.write_text(
        "import os\nassert 'OTHER_PYTHON' not in os.environ, 'not there'\nimport jax\n\n\ndef f(x):\n    return x * 2\n"
    )
    named = ["explain", f"{file}:f", "--args", "f32[8]", "--framework", "jax", "--target", "h200"]
    found = CliRunner().invoke(cli, named)
    assert found.exit_code == 0 and other_python.exists(), found.output
    assert "not there" in " ".join(found.stdout.split())


@pytest.mark.full
def test_a_sort_that_cub_would_do_on_a_gpu_is_noted(jax_code: Any) -> None:
    functions = [jax_code.sorted_all, jax_code.sorted_few]
    explained = xlafuse.explain(functions, struct(200_000, dtype="int32"), **TARGET)
    notes = [each for each in explained.notes if "CUB" in each]
    assert len(notes) == 1 and notes[0].startswith("sorted_all: ") and "200,000" in notes[0]


def test_attention_of_cudnn_is_compiled_or_names_its_package(jax_code: Any) -> None:
    try:
        graph = xlafuse.explain(jax_code.attention_of_cudnn, struct(1, 128, 1, 64), **TARGET).graph
    except xlafuse.ExplainError as problem:
        assert "pip install nvidia-cudnn-cu13" in str(problem) and "\n" not in str(problem)
    else:
        assert [kernel.kind for kernel in graph.kernels].count("attention") == 1
