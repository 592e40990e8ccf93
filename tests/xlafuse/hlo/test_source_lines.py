"""Source operations: their stages under jax's transforms, compiled for an H200, and operations computed twice."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import ShapeDtypeStruct as Struct

from xlafuse.compile import compiler
from xlafuse.hlo import gpu_program

X, W, LAYERS = (Struct(shape, jnp.float32) for shape in ((256, 512), (512, 512), (4, 512, 512)))
STAGES = {"norm/scale", "project", "act"}


def _block(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("norm"), jax.named_scope("scale"):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    with jax.named_scope("project"):
        x = x @ w
    with jax.named_scope("act"):
        return jax.nn.silu(x)


def _scanned(block: Any) -> Any:
    return lambda x, layers: jax.lax.scan(lambda x, w: (block(x, w), x.sum()), x, layers)[0]


def _unrolled(x: jax.Array, layers: jax.Array) -> jax.Array:
    for layer in range(4):
        x = _block(x, layers[layer])
    return x


@jax.custom_vjp
def _custom(x: jax.Array, w: jax.Array) -> jax.Array:
    return _block(x, w)


def _custom_backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    with jax.named_scope("by_hand"):
        return gradient @ w.T, x.T @ gradient


_custom.defvjp(lambda x, w: (_block(x, w), (x, w)), _custom_backward)


class _Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(512, rngs=rngs)
        self.up = nnx.Linear(512, 512, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("norm"):
            x = self.norm(x)
        with jax.named_scope("up"):
            x = self.up(x)
        with jax.named_scope("act"):
            return nnx.gelu(x)


def _launches(
    target: compiler.Target, function: Any, *args: Any, gradient: bool = False
) -> tuple[gpu_program.Launch, ...]:
    def loss(*args: Any) -> jax.Array:
        return (function(*args) ** 2).sum()

    compiled = compiler.compile(jax.grad(loss, (0, 1)) if gradient else function, args, target=target)
    program = gpu_program.program(gpu_program.parse(compiled.hlo_text))
    assert not program.unresolved
    return program.launches


def _by_kind(launches: tuple[gpu_program.Launch, ...]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"forward": set(), "backward": set(), "again": set()}
    for op in (op for launch in launches for op in launch.source_ops if op.stage):
        assert not (op.backward and op.rematerialized)
        found["backward" if op.backward else "again" if op.rematerialized else "forward"].add(op.stage)
    return found


@pytest.mark.parametrize(
    ("function", "again"),
    [(_block, set()), (jax.checkpoint(_block), STAGES)],
    ids=["vjp", "remat"],
)
def test_stages_under_a_gradient(h200: compiler.Target, function: Any, again: set[str]) -> None:
    launches = _launches(h200, function, X, W, gradient=True)
    assert _by_kind(launches) == {"forward": STAGES, "backward": STAGES, "again": again}


@pytest.mark.parametrize(
    ("block", "again"), [(_block, set()), (jax.checkpoint(_block), STAGES)], ids=["scan", "scan of remat"]
)
def test_stages_in_a_scan(h200: compiler.Target, block: Any, again: set[str]) -> None:
    forward = _launches(h200, _scanned(block), X, LAYERS)
    assert _by_kind(forward) == {"forward": STAGES, "backward": set(), "again": set()}
    staged = [launch.kernel for launch in forward if launch.kernel.stages]
    assert {kernel.launches for kernel in staged} == {4}
    backward = _launches(h200, _scanned(block), X, LAYERS, gradient=True)
    assert _by_kind(backward) == {"forward": STAGES, "backward": STAGES, "again": again}


def test_stages_of_a_custom_gradient(h200: compiler.Target) -> None:
    found = _by_kind(_launches(h200, _custom, X, W, gradient=True))
    assert found == {"forward": STAGES, "backward": {"by_hand"}, "again": set()}


def test_stages_of_an_nnx_module(h200: compiler.Target) -> None:
    graph, state = nnx.split(_Mlp(nnx.Rngs(0)))
    structs = jax.tree.map(lambda leaf: Struct(leaf.shape, leaf.dtype), state)

    def call(x: jax.Array, state: Any) -> jax.Array:
        return nnx.merge(graph, state)(x)

    stages = {"norm", "up", "act"}
    assert _by_kind(_launches(h200, call, X, structs)) == {"forward": stages, "backward": set(), "again": set()}
    found = _by_kind(_launches(h200, call, X, structs, gradient=True))
    assert found["forward"] == stages and found["backward"] == stages


def _recomputed(launches: tuple[gpu_program.Launch, ...]) -> set[str]:
    counts = Counter(site for launch in launches for site in {op.site for op in launch.source_ops if op.site})
    return {site for site, count in counts.items() if count > 1}


def test_layers_in_a_python_loop_are_not_recomputation(h200: compiler.Target) -> None:
    launches = _launches(h200, _unrolled, X, LAYERS)
    products = [op for launch in launches for op in launch.source_ops if op.op == "dot_general"]
    assert len(products) >= 4 and len({(op.line, op.op) for op in products}) == 1
    assert not _recomputed(launches)


def test_without_fusion_nothing_is_recomputed(h200: compiler.Target) -> None:
    gradient = jax.grad(lambda x, w: _block(x, w).sum(), (0, 1))
    compiled = compiler.compile(gradient, (X, W), target=h200, variant="unfused")
    assert not _recomputed(gpu_program.program(gpu_program.parse(compiled.hlo_text)).launches)


# By hand.

KERNELS = """HloModule m
%first (p: f32[8]) -> (f32[8], f32[8]) {
  %p = f32[8]{0} parameter(0)
  %s = f32[8]{0} sine(%p), metadata={op_name="jit(f)/a/sin" source_file="f.py" source_line=1}
  %c = f32[8]{0} cosine(%s), metadata={op_name="jit(f)/a/cos" source_file="f.py" source_line=2}
  ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(%s, %c)
}
%second (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  OPERATION
  ROOT %n = f32[8]{0} negate(%s.clone)
}
ENTRY %main () -> f32[] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %f = (f32[8]{0}, f32[8]{0}) fusion(%x), kind=kLoop, calls=%first
  ROOT %g = f32[8]{0} fusion(OPERAND), kind=kLoop, calls=%second
}"""


@pytest.mark.parametrize(
    ("operation", "operand", "again"),
    [
        ("sine(%q)", "%x", True),  # the same operation on the same operand
        ("sine(%q)", "%f#1", False),  # the next iteration of a Python loop
    ],
)
def test_equal_sites_are_one_operation(operation: str, operand: str, again: bool) -> None:
    metadata = 'metadata={op_name="jit(f)/a/sin" source_file="f.py" source_line=1}'
    text = KERNELS.replace("OPERATION", f"%s.clone = f32[8]{{0}} {operation}, {metadata}").replace("OPERAND", operand)
    first, second = gpu_program.program(gpu_program.parse(text)).launches
    assert [op.op for op in first.source_ops] == ["sin", "cos"]
    assert [op.op for op in second.source_ops] == ["sin", "negate"]
    assert (first.source_ops[0].site == second.source_ops[0].site) is again
    assert second.source_ops[0].line == "f.py:1" and second.source_ops[1].site == ""


def _named(instructions: str) -> tuple[gpu_program.Launch, ...]:
    """Return the launches of a fusion; each line is "instruction|op_name|source line"."""
    lines = [line.strip().split("|") for line in instructions.strip().splitlines()]
    body = "\n".join(
        f'{text}, metadata={{op_name="{name}" source_file="f.py" source_line={line}}}' for text, name, line in lines
    )
    text = f"""HloModule m
%fused (p: f32[8,4]) -> f32[8,4] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  {body}
}}
ENTRY %main () -> f32[] {{
  %x = f32[8,4]{{1,0}} parameter(0), metadata={{op_name="x"}}
  ROOT %f = f32[8,4]{{1,0}} fusion(%x), kind=kLoop, calls=%fused
}}"""
    return gpu_program.program(gpu_program.parse(text)).launches


@pytest.mark.parametrize("mover", ["copy(%p)", "slice(%p), slice={[0:8], [0:4]}", "transpose(%p), dimensions={0,1}"])
def test_a_move_named_after_a_computation_does_not_compute_it(mover: str) -> None:
    moved = f"%c = f32[8,4]{{1,0}} {mover}|jit(f)/transpose(jvp(a))/div|1"
    (launch,) = _named(f"{moved}\nROOT %n = f32[8,4]{{1,0}} negate(%c)|jit(f)/b/neg|2")
    assert [(op.op, op.stage) for op in launch.source_ops] == [("neg", "b")]
    (alone,) = _named(f"ROOT {moved}")
    opcode = mover.partition("(")[0]
    assert alone.source_ops == (gpu_program.SourceOp(opcode, stage="a", line="f.py:1", backward=True),)


def test_a_concatenation_for_a_merged_product_belongs_to_no_stage() -> None:
    (launch,) = _named("ROOT %c = f32[16,4]{1,0} concatenate(%p, %p), dimensions={0}|jit(f)/norm/mul|1")
    assert launch.source_ops == (gpu_program.SourceOp("concatenate"),)


@pytest.mark.parametrize(
    ("name", "mover"),
    [("transpose", "transpose(%p), dimensions={0,1}"), ("unstack", "slice(%p), slice={[0:8], [0:4]}"),
     ("scatter", "dynamic-update-slice(%p, %p, %p, %p)")],
)
def test_a_move_of_the_users_program_keeps_its_name(name: str, mover: str) -> None:
    moved = f"%c = f32[8,4]{{1,0}} {mover}|jit(f)/a/{name}|1"
    (launch,) = _named(f"{moved}\nROOT %n = f32[8,4]{{1,0}} negate(%c)|jit(f)/b/neg|2")
    assert [(op.op, op.stage) for op in launch.source_ops] == [(name, "a"), ("neg", "b")]
    assert launch.source_ops[0].site


def test_a_result_read_by_a_second_kernel_is_the_same_operand() -> None:
    metadata = 'metadata={op_name="jit(f)/a/cos" source_file="f.py" source_line=2}'
    text = KERNELS.replace("OPERATION", f"%s.clone = f32[8]{{0}} cosine(%q), {metadata}").replace("OPERAND", "%f#0")
    first, second = gpu_program.program(gpu_program.parse(text)).launches
    assert first.source_ops[1].site == second.source_ops[0].site


def test_an_arguments_name_is_not_an_operation() -> None:
    text = """HloModule m
ENTRY %main () -> f32[] {
  %x = f32[8]{0} parameter(0), metadata={op_name="inputs[\\'x\\']"}
  ROOT %c = f32[8]{0} transpose(%x), dimensions={0}, metadata={op_name="inputs[\\'x\\']"}
}"""
    program = gpu_program.program(gpu_program.parse(text))
    (launch,) = program.launches
    assert launch.source_ops == (gpu_program.SourceOp("transpose"),)
    assert program.buffers[0].label == "inputs['x']"


@pytest.mark.parametrize(
    ("name", "rematerialized"),
    [("fusion.5.remat", True), ("dot.remat2.1", True), ("copy.remat_compressed", True), ("remat_fusion", False)],
)
def test_xlas_own_rematerialisation(name: str, rematerialized: bool) -> None:
    text = f"HloModule m\nENTRY %main () -> f32[] {{\n  %x = f32[8] parameter(0)\n  ROOT %{name} = f32[8] sine(%x)\n}}"
    (launch,) = gpu_program.program(gpu_program.parse(text)).launches
    assert [op.rematerialized for op in launch.source_ops] == [rematerialized]
