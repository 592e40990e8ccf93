"""Fusions that XLA's runtime runs as the copy of a slice, told from those for which it launches a kernel."""

import re
from pathlib import Path
from typing import Any

import pytest

from xlafuse.hlo import gpu_program

KNOWN = ', backend_config={"dynamic_slice_config":{"byte_offset":"0","byte_stride":"256","loop_index":"0"}}'
SLICE = ", dynamic_slice_sizes={1,64}"
BACK = "%last = s32[] constant(15)\n%back = s32[] subtract(%last, %i)\n"
UPDATE = f"ROOT %r = f32[16,64]{{1,0}} dynamic-update-slice(%p, %new, %back, %zero){KNOWN}"
MODULE = """HloModule m, is_scheduled=true

%body (p: f32[16,64], q: f32[16,64], u: f32[64], i: s32[], t: s32[16]) -> f32[] {{
%p = f32[16,64]{{1,0}} parameter(0)
%q = f32[16,64]{{1,0}} parameter(1)
%u = f32[64]{{0}} parameter(2)
%i = s32[] parameter(3)
%t = s32[16]{{0}} parameter(4)
%zero = s32[] constant(0)
{body}
}}

ENTRY %main (p: f32[16,64], q: f32[16,64], u: f32[64], i: s32[], t: s32[16]) -> f32[] {{
%p = f32[16,64]{{1,0}} parameter(0)
%q = f32[16,64]{{1,0}} parameter(1)
%u = f32[64]{{0}} parameter(2)
%i = s32[] parameter(3)
%t = s32[16]{{0}} parameter(4)
ROOT %f = {shape} fusion(%p, %q, %u, %i, %t), kind={kind}, calls=%body{config}
}}
"""


def _kind(body: str, kind: str = "kLoop", config: str = "") -> str:
    (shape,) = re.findall(r"ROOT %\w+ = (\S+)", body)
    module = gpu_program.parse(MODULE.format(body=body, shape=shape, kind=kind, config=config))
    assert not module.unparsed
    (kernel,) = gpu_program.kernels(module)
    return kernel.kind


def _slice(index: str, *, known: bool = True, of: str = "p") -> str:
    return f"f32[1,64]{{1,0}} dynamic-slice(%{of}, {index}, %zero){SLICE}{KNOWN if known else ''}"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        pytest.param(f"ROOT %r = {_slice('%i')}", "copy", id="counter"),
        pytest.param(f"{BACK}ROOT %r = {_slice('%back')}", "copy", id="linear in the counter"),
        pytest.param(
            f"{BACK}%s = {_slice('%back')}\nROOT %r = f32[64]{{0}} bitcast(%s)", "copy", id="bitcast of the result"
        ),
        pytest.param(f"{BACK}ROOT %r = {_slice('%back', known=False)}", "elementwise", id="from data"),
        pytest.param(
            "%one = s32[1]{0} dynamic-slice(%t, %i), dynamic_slice_sizes={1}" + KNOWN + "\n"
            f"%found = s32[] bitcast(%one)\n{BACK}%sum = s32[] add(%found, %back)\nROOT %r = {_slice('%sum')}",
            "elementwise", id="from a table",
        ),
        pytest.param(
            f"{BACK}%half = s32[] divide(%back, %i)\nROOT %r = {_slice('%half')}", "elementwise", id="by a quotient"
        ),
        pytest.param(
            f"{BACK}%cube = f32[4,4,64]{{2,1,0}} bitcast(%p)\n"
            "ROOT %r = f32[1,1,64]{2,1,0} dynamic-slice(%cube, %i, %back, %zero), dynamic_slice_sizes={1,1,64}" + KNOWN,
            "copy", id="two dynamic indices",
        ),
        pytest.param(
            f"{BACK}%s = {_slice('%back')}\nROOT %r = bf16[1,64]{{1,0}} convert(%s)", "elementwise", id="converted"
        ),
        pytest.param(
            f"{BACK}%n = f32[16,64]{{1,0}} negate(%p)\nROOT %r = {_slice('%back', of='n')}", "elementwise",
            id="of a result",
        ),
    ],
)
def test_a_slice_whose_offset_xla_knows_is_a_copy(body: str, kind: str) -> None:
    assert _kind(body) == kind


@pytest.mark.parametrize(
    ("update", "kind"),
    [
        pytest.param("%new = f32[1,64]{1,0} bitcast(%u)", "copy", id="by a parameter"),
        pytest.param("%n = f32[64]{0} negate(%u)\n%new = f32[1,64]{1,0} bitcast(%n)", "elementwise", id="by a result"),
        pytest.param(f"%new = {_slice('%i', of='q')}", "copy", id="by a slice"),
        pytest.param(f"%new = {_slice('%i', of='q', known=False)}", "elementwise", id="by a slice from data"),
        pytest.param("%new = f32[4,64]{1,0} slice(%q), slice={[3:7], [0:64]}", "copy", id="by rows"),
        pytest.param("%new = f32[4,64]{1,0} slice(%q), slice={[0:16:4], [0:64:1]}", "elementwise", id="by every 4th"),
        pytest.param("%new = f32[16,4]{1,0} slice(%q), slice={[0:16], [3:7]}", "elementwise", id="by columns"),
    ],
)
def test_an_update_in_place_by_an_array_in_memory_is_a_copy(update: str, kind: str) -> None:
    assert _kind(f"{update}\n{BACK}{UPDATE}") == kind
    data = UPDATE.removesuffix(KNOWN)
    assert _kind(f"{update}\n{BACK}{data}") == "elementwise"
    computed = UPDATE.replace("(%p,", "(%minus,")
    assert _kind(f"{update}\n%minus = f32[16,64]{{1,0}} negate(%p)\n{BACK}{computed}") == "elementwise"


def test_jax_010_marks_the_copy_of_a_slice_as_a_custom_fusion() -> None:
    body = f"{BACK}%s = {_slice('%back')}\nROOT %r = f32[1,64]{{1,0}} copy(%s)"
    config = ', backend_config={"fusion_backend_config":{"kind":"__custom_fusion",%s}}'
    marked = config % '"custom_fusion_config":{"name":"dynamic_slice_fusion","kernel_index":0}'
    assert _kind(body, "kCustom", marked) == "copy"
    assert _kind(body, "kCustom", config % '"block_level_fusion_config":{}') == "elementwise"
    assert _kind(body) == "elementwise"


def test_kinds_agree_with_the_thunks_of_a_compile_for_an_h200(h200: Any, tmp_path: Path) -> None:
    import jax.numpy as jnp
    from jax import Array, ShapeDtypeStruct, lax

    from xlafuse.compile import compiler

    def sliced(x: Array, w: Array, table: Array) -> tuple[Array, ...]:
        """Loops that take slices: at the counter, backward, at two indices, from data, and of columns."""

        def at(x: Array, *index: Array) -> Array:
            sizes = [1] * len(index) + [512, 512]
            return lax.dynamic_slice(x, (*index, 0, 0), sizes).reshape(512, 512)

        return tuple(
            lax.fori_loop(0, 4, lambda i, c, take=take: c @ take(i), w) for take in (
                lambda i: at(x, i), lambda i: at(x, 15 - i), lambda i: at(x.reshape(4, 4, 512, 512), i, 3 - i),
                lambda i: at(x, 15 - table[i]), lambda i: at(x, i * i + 1),
                lambda i: jnp.tile(lax.dynamic_slice(x, (0, 511 - i, 0), (16, 1, 512)).reshape(16, 512), (32, 1)),
            )
        )

    def updated(x: Array, w: Array, table: Array) -> tuple[Array, ...]:
        """Loops that update slices: with a product, backward, from data, with a result, and with slices."""

        def loop(new: Any, index: Any) -> Array:
            def step(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
                x, c = state
                c = c @ w
                return lax.dynamic_update_index_in_dim(x, new(i, c), index(i), 0), c

            return lax.fori_loop(0, 4, step, (x * 2, w))[0]

        return (
            loop(lambda i, c: c, lambda i: i), loop(lambda i, c: c, lambda i: 15 - i),
            loop(lambda i, c: c, lambda i: 15 - table[i]), loop(lambda i, c: jnp.tanh(c), lambda i: 15 - i),
            loop(lambda i, c: lax.dynamic_index_in_dim(x, 15 - i, keepdims=False), lambda i: i),
            loop(lambda i, c: x[3], lambda i: 15 - i),
        )

    shapes = (((16, 512, 512), jnp.float32), ((512, 512), jnp.float32), ((16,), jnp.int32))
    kinds = []
    for function in (sliced, updated):
        folder = tmp_path / function.__name__
        compiler.compile(function, [ShapeDtypeStruct(*shape) for shape in shapes], target=h200, dump_to=folder)
        thunks = re.findall(
            r'profile_annotation: "([^"]+)"(?:(?!thunk_kind).)*thunk_kind: "(\w+)"',
            (folder / "thunk_metadata.txt").read_text(), re.DOTALL,
        )
        for kernel in gpu_program.kernels(gpu_program.parse((folder / "optimized.hlo.txt").read_text())):
            if {"dynamic-slice", "dynamic-update-slice"} & set(kernel.opcodes):
                copied = (kernel.name, "kDynamicSliceFusion") in thunks
                assert copied == (kernel.kind == "copy"), kernel
                kinds.append((copied, kernel.opcodes[-1]))
    assert len(set(kinds)) >= 4  # slices and updates, as copies and as kernels
    assert len(kinds) >= 12
