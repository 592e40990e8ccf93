"""One compile: its results, the copies that it avoids, and compiling for an H200 on any machine."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Struct

from xlafuse.blocks import gelu, rmsnorm, softmax, swiglu_mlp
from xlafuse.compile import compiler, directions, variants

BF16 = jnp.bfloat16
ROWS = {"x": Struct((1024, 2048), BF16)}
# Large enough that XLA does not merge the products of gate and up, which would lose one of the names.
MLP = {
    "x": Struct((4096, 2048), BF16), "norm_weight": Struct((2048,), BF16),
    "gate_weight": Struct((2048, 5632), BF16), "up_weight": Struct((2048, 5632), BF16),
    "down_weight": Struct((5632, 2048), BF16),
}


def test_existing_arrays_are_returned_without_a_copy() -> None:
    def function(inputs: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        double = inputs["x"] * 2
        return double, inputs["x"], double, jnp.float32(0.5)

    x = jnp.arange(6.0)
    compiled = compiler.compile(function, ({"x": x},))
    assert compiled.executable is not None
    double, same, again, half = compiled.executable({"x": x})
    assert double.tolist() == [0, 2, 4, 6, 8, 10] and half == 0.5 and half.dtype == jnp.float32
    assert same is x and again is double
    assert [struct.shape for struct in compiled.computed_structs] == [(6,)]
    assert compiled.memory.outputs == 24
    assert [struct.shape for struct in compiled.output_structs] == [(6,), (6,), (6,), ()]


def test_gelu_saves_its_input_without_a_copy() -> None:
    forward, _ = directions.train_phases(gelu.apply, {})
    x = jnp.ones((4, 8), BF16)
    compiled = compiler.compile(forward, ({"x": x},))
    assert compiled.executable is not None
    _, residuals = compiled.executable({"x": x})
    assert any(leaf is x for leaf in jax.tree.leaves(residuals))


def test_recomputing_saves_only_inputs_and_products() -> None:
    forward, _ = directions.train_phases(gelu.apply, {}, recompute=True)
    compiled = compiler.compile(forward, (ROWS,))
    assert compiled.memory.outputs == 1024 * 2048 * 2


def test_a_second_compile_is_not_cached() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) @ x

    struct = Struct((64, 64), jnp.float32)
    first, second = (compiler.compile(function, (struct,)) for _ in range(2))
    assert second.compile_s > 1e-3  # a cached result takes microseconds
    assert first.hlo_text == second.hlo_text


def test_ieee_precision_reaches_both_phases() -> None:
    inputs = {name: Struct(struct.shape, jnp.float32) for name, struct in MLP.items()}
    forward, backward = directions.train_phases(swiglu_mlp.apply, {"eps": 1e-6})
    first = compiler.compile(forward, (inputs,), matmul_precision="ieee")
    second = compiler.compile(backward, first.output_structs[::-1], matmul_precision="ieee")
    for phase, products in ((first, 3), (second, 6)):
        assert phase.stablehlo.count("stablehlo.dot_general") == products
        assert phase.stablehlo.count("precision = [HIGHEST, HIGHEST]") == products


def test_rmsnorm_for_an_h200_is_one_kernel_of_compulsory_bytes(h200: compiler.Target) -> None:
    inputs = ROWS | {"weight": Struct((2048,), BF16)}
    compiled = compiler.compile(directions.forward(rmsnorm.apply, {"eps": 1e-6}), (inputs,), target=h200)
    (kernel,) = compiled.kernels
    assert compiled.executable is None
    assert kernel.kind == "reduction" and "rsqrt" in kernel.ops
    assert kernel.bytes_read == 1024 * 2048 * 2 + 2048 * 2
    assert kernel.bytes_written == 1024 * 2048 * 2
    assert kernel.stages == ("mean_square", "normalize", "weight")
    assert {line.rpartition("/")[2].split(":")[0] for line in kernel.lines} == {"rmsnorm.py"}
    assert compiled.autotuning == {kernel.name: "compiled"}
    assert compiled.memory.outputs == 1024 * 2048 * 2
    assert len(compiled.hlo_proto) > 1000


def test_products_without_a_record_are_not_autotuned(h200: compiler.Target) -> None:
    compiled = compiler.compile(directions.forward(swiglu_mlp.apply, {"eps": 1e-6}), (MLP,), target=h200)
    gemms = [kernel.name for kernel in compiled.kernels if kernel.kind == "gemm"]
    assert gemms and {compiled.autotuning[name] for name in gemms} == {"not autotuned"}
    stages = {stage.split("/")[0] for kernel in compiled.kernels for stage in kernel.stages}
    assert stages == {"norm", "gate", "up", "act", "down", "residual"}


@pytest.mark.parametrize("faster", ["cublas", "triton"])
def test_predicted_times_choose_the_kernels_of_products(
    h200: compiler.Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faster: str
) -> None:
    monkeypatch.setattr(compiler, "_faster", {})
    times = {"cublas": 2.0, "triton": 2.0, faster: 1.0}

    def time_us(text: str) -> float:
        return times["cublas" if "__cublas" in text else "triton"]

    def compiled(target: compiler.Target, **options: Any) -> tuple[compiler.Compilation, set[str]]:
        made = compiler.compile(directions.forward(swiglu_mlp.apply, {"eps": 1e-6}), (MLP,), target=target, **options)
        return made, {made.autotuning[kernel.name] for kernel in made.kernels if kernel.kind == "gemm"}

    first, words = compiled(replace(h200, time_us=time_us), dump_to=tmp_path / "dump")
    assert words == {"predicted choice"} and ("__cublas" in first.hlo_text) == (faster == "cublas")
    assert set(first.autotuning.values()) <= {"predicted choice", "compiled", "not autotuned"}
    dumped = (tmp_path / "dump" / "optimized.hlo.txt").read_text()
    assert ("__cublas" in dumped) == (faster == "cublas")
    # Variants of a compile keep its choice.
    times = {"cublas": 1.0, "triton": 1.0, faster: 2.0}
    again, _ = compiled(replace(h200, time_us=time_us), options={"xla_gpu_graph_min_graph_size": 1})
    assert ("__cublas" in again.hlo_text) == (faster == "cublas")
    # Other predictions choose anew.
    other, _ = compiled(replace(h200, time_us=lambda text: time_us(text)))
    assert ("__cublas" in other.hlo_text) != (faster == "cublas")


def test_a_choice_of_the_caller_is_kept(h200: compiler.Target) -> None:
    def time_us(text: str) -> float:
        return 2.0 if "__cublas" in text else 1.0

    target = replace(h200, time_us=time_us)
    function, inputs = directions.forward(swiglu_mlp.apply, {"eps": 1e-6}), (MLP,)
    for options, products in (({"xla_gpu_enable_triton_gemm": False}, None), ({}, "cublas")):
        compiled = compiler.compile(function, inputs, target=replace(target, products=products), options=options)
        assert "__cublas" in compiled.hlo_text and "predicted choice" not in compiled.autotuning.values()


def test_a_product_that_triton_does_not_have_is_a_librarys(h200: compiler.Target) -> None:
    """8-bit floats: no time of XLA's Triton kernels for them is known."""
    target = replace(h200, time_us=lambda text: 2.0 if "__cublas" in text else 1.0)
    f8 = Struct((1024, 1024), jnp.float8_e4m3fn)
    compiled = compiler.compile(lambda a, b: jnp.matmul(a, b.T, preferred_element_type=BF16), (f8, f8), target=target)
    assert "__cublas" in compiled.hlo_text


def test_each_phase_of_gelu_is_one_kernel_without_copies(h200: compiler.Target) -> None:
    forward, backward = directions.train_phases(gelu.apply, {})
    first = compiler.compile(forward, (ROWS,), target=h200)
    second = compiler.compile(backward, first.output_structs[::-1], target=h200)
    assert [kernel.kind for kernel in first.kernels + second.kernels] == ["elementwise", "elementwise"]


@pytest.mark.parametrize(("precision", "tf32"), [("ieee", False), ("tf32", True)])
def test_precision_reaches_the_ptx(h200: compiler.Target, tmp_path: Path, precision: str, tf32: bool) -> None:
    inputs = {name: Struct((128, 128), jnp.float32) for name in "ab"}
    compiler.compile(
        lambda i: i["a"] @ i["b"],
        (inputs,),
        target=h200,
        matmul_precision=precision,
        dump_to=tmp_path / "dump",
    )
    ptx = [path.read_text() for path in (tmp_path / "dump" / "ptx").iterdir()]
    assert ptx and any("tf32" in text for text in ptx) is tf32


def _layers(x: jax.Array, weights: jax.Array) -> jax.Array:
    for weight in weights:
        x = x @ weight
    return x


# A block, a copy of an output, the indices of an argsort, and a slice that is a product's operand.
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (directions.forward(swiglu_mlp.apply, {"eps": 1e-6}), (MLP,)),
        (directions.train_phases(softmax.apply, {})[0], ({"x": Struct((3, 1), jnp.float32)},)),
        (jnp.argsort, (Struct((8192,), jnp.int32),)),
        (_layers, (Struct((1024, 1024), BF16), Struct((2, 1024, 1024), BF16))),
    ],
    ids=["mlp", "copy", "argsort", "slice"],
)
def test_unfused_gives_every_instruction_a_kernel(h200: compiler.Target, function: Any, args: Any) -> None:
    unfused = compiler.compile(function, args, target=h200, variant="unfused")
    assert {len(kernel.opcodes) for kernel in unfused.kernels} == {1}


@pytest.mark.parametrize("misspelt", ["priority-fusion", "multi_output_fusion", "triton-softmax-rewriter"])
def test_a_fusion_pass_left_on_is_an_error(
    h200: compiler.Target, monkeypatch: pytest.MonkeyPatch, misspelt: str
) -> None:
    passes = tuple(name + "x" if name == misspelt else name for name in variants.FUSION_PASSES)
    monkeypatch.setattr(variants, "FUSION_PASSES", passes)
    with pytest.raises(variants.FusionNotDisabled, match="hold several"):
        compiler.compile(directions.forward(softmax.apply, {}), (ROWS,), target=h200, variant="unfused")


def test_one_process_replays_one_set_of_results(
    h200: compiler.Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler, "_loaded_results", tmp_path / "other.textproto")
    with pytest.raises(RuntimeError, match="other.textproto"):
        compiler.compile(directions.forward(softmax.apply, {}), (ROWS,), target=h200)


_REPLAY = """
import sys
from pathlib import Path
from xlafuse.compile.environment import configure_environment
configure_environment(deviceless=True)
import jax, jax.numpy as jnp
from xlafuse.compile import compiler
from xlafuse.hlo.gpu_program import kernels, parse

config, results, golden = map(Path, sys.argv[1:])
target = compiler.Target(config.read_text(), results)

def mlp(x, w, wg, wu, wd):
    wide = x.astype(jnp.float32)
    h = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * w
    return x + (jax.nn.silu(h @ wg) * (h @ wu)) @ wd

def structs(rows):
    shapes = (rows, 2048), (2048,), (2048, 5632), (2048, 5632), (5632, 2048)
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

hit = compiler.compile(mlp, structs(4096), target=target, matmul_precision=None)
recorded = kernels(parse(golden.read_text()))
def compared(kernels):
    return [(k.name, k.kind, k.bytes_read, k.bytes_written, k.opcodes, k.ops) for k in kernels]
assert compared(hit.kernels) == compared(recorded), compared(hit.kernels)
assert hit.replay_miss is None
assert [hit.autotuning[k.name] for k in hit.kernels] == ["compiled"] * 3 + ["replayed"] * 4, hit.autotuning
miss = compiler.compile(mlp, structs(1024), target=target, matmul_precision=None)
assert "No cached config found" in miss.replay_miss
assert set(miss.autotuning.values()) == {"compiled", "not autotuned"}, miss.autotuning
"""


def test_replay_compiles_the_kernels_of_the_h200(
    h200: compiler.Target, data: Path, tmp_path: Path
) -> None:
    if jax.__version__ != "0.11.2":
        pytest.skip(f"the recorded results are jax 0.11.2's, this is {jax.__version__}")
    config = tmp_path / "config.pbtxt"
    config.write_text(h200.config_text)
    # In a separate process, because XLA keeps the results that it loaded.
    arguments = [str(config), str(data / "autotune-0.11.2.textproto"), str(data / "mlp_fwd.hlo.txt")]
    done = subprocess.run([sys.executable, "-c", _REPLAY, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_results_of_another_jax_are_refused(h200: compiler.Target, data: Path, tmp_path: Path) -> None:
    config, foreign = tmp_path / "config.pbtxt", tmp_path / "foreign.textproto"
    config.write_text(h200.config_text)
    foreign.write_text("results_of_another_format { }\n")
    arguments = [str(config), str(foreign), str(data / "mlp_fwd.hlo.txt")]
    done = subprocess.run([sys.executable, "-c", _REPLAY, *arguments], capture_output=True, text=True)
    assert "ValueError" in done.stderr and "foreign.textproto" in done.stderr
