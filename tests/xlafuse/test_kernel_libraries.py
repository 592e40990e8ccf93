"""Blocks by tokamax and by the examples of jax, compiled for an H200."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compile import compiler, directions

needs_tokamax = pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")
needs_jax_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax's examples need jax 0.11")


Arrays = dict[str, jax.ShapeDtypeStruct]


def of_block(library: str, block: str) -> tuple[Any, Arrays, Arrays]:
    """Return a library's function of a block, its inputs and its outputs."""
    spec = BLOCKS[block]
    case = next(c for c in spec.cases("quick") if c.dtype == "bfloat16")
    inputs, outputs = (
        {t.name: jax.ShapeDtypeStruct(t.shape(case.sizes), jnp.dtype(t.dtype_in(case))) for t in tensors}
        for tensors in (spec.inputs, spec.outputs)
    )
    function = getattr(importlib.import_module(f"xlafuse.library.{library}"), block)
    return functools.partial(function, **spec.attributes_of(case)), inputs, outputs


def own_kernels(compilation: compiler.Compilation) -> int:
    return sum(kernel.runtime_name.endswith("mosaic_gpu_kernel") for kernel in compilation.kernels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "block", "kernels"),
    [
        pytest.param("tokamax", "attention", 1, marks=needs_tokamax),
        pytest.param("tokamax", "moe", 3, marks=needs_tokamax),
        pytest.param("tokamax", "swiglu_mlp", 1, marks=needs_tokamax),
        pytest.param("pallas_examples", "matmul", 1, marks=needs_jax_11),
        pytest.param("pallas_examples", "moe", 3, marks=needs_jax_11),
    ],
)
def test_its_own_kernels_compile_for_an_h200(
    library: str, block: str, kernels: int, h200: compiler.Target
) -> None:
    apply, inputs, _ = of_block(library, block)
    assert own_kernels(compiler.compile(directions.forward(apply, {}), [inputs], target=h200)) == kernels


@pytest.mark.slow
@needs_tokamax
def test_the_gradient_of_attention_has_its_own_kernels(h200: compiler.Target) -> None:
    apply, inputs, outputs = of_block("tokamax", "attention")
    save, differentiate = directions.train_phases(apply, {})
    saved = compiler.compile(save, [inputs], target=h200)
    last = compiler.compile(differentiate, [saved.output_structs[1], outputs], target=h200)
    assert (own_kernels(saved), own_kernels(last)) == (1, 2)
