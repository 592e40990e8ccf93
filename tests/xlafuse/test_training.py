"""A training step in JAX: AdamW against optax, and the variants that loop over layers or recompute them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlafuse.blocks import lm_step
from xlafuse.blocks.adamw import adamw
from xlafuse.compare.numerics import input_arrays
from xlafuse.compare.spec.blocks import BLOCKS

STEP = BLOCKS["lm_step"]
CASE = next(case for case in STEP.cases("check") if case.dtype == "float32")


def test_adamw_equals_optax() -> None:
    optax = pytest.importorskip("optax")
    settings = {"rate": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "decay": 0.1}
    optimizer = optax.adamw(1e-2, b1=0.9, b2=0.99, eps=1e-6, weight_decay=0.1)
    param, mu, nu = jax.random.normal(jax.random.key(0), 100), jnp.zeros(100), jnp.zeros(100)
    theirs, state = param, optimizer.init(param)
    for step in (1, 2, 3):
        gradient = jax.random.normal(jax.random.key(step), 100)
        updates, state = optimizer.update(gradient, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        param, mu, nu = adamw(param, gradient, mu, nu, jnp.int32(step), **settings)
    for ours, expected in ((param, theirs), (mu, state[0].mu), (nu, state[0].nu)):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-7)


STRUCTS = {t.name: jax.ShapeDtypeStruct(t.shape(CASE.sizes), t.dtype_in(CASE)) for t in STEP.inputs}


def traced(function: Any) -> Any:
    return jax.make_jaxpr(lambda inputs: function(inputs, **STEP.attributes_of(CASE)))(STRUCTS)


def compiled(function: Any) -> Any:
    return jax.jit(lambda inputs: function(inputs, **STEP.attributes_of(CASE))).lower(STRUCTS).compile()


def test_loops_and_recomputation_of_each_variant() -> None:
    """Scanned layers have one loop forward and one backward; other variants have none."""
    unrolled = [str(traced(function)) for function in (lm_step.apply, lm_step.apply_remat)]
    scanned = [str(traced(function)) for function in (lm_step.apply_scan, lm_step.apply_scan_remat)]
    assert [jaxpr.count("= scan[") for jaxpr in (*unrolled, *scanned)] == [0, 0, 2, 2]
    assert ["remat" in jaxpr for jaxpr in (*unrolled, *scanned)] == [False, True, False, True]


@pytest.mark.full
@pytest.mark.parametrize(
    ("plain", "again", "layers_written"),
    [(lm_step.apply, lm_step.apply_remat, CASE.sizes["layers"]), (lm_step.apply_scan, lm_step.apply_scan_remat, 1)],
    ids=["unrolled", "scanned"],
)
def test_xla_recomputes_a_rematerialised_layer(plain: Any, again: Any, layers_written: int) -> None:
    """Six of its seven products are computed again; no gradient needs the last. The step uses less memory."""
    once, twice = compiled(plain), compiled(again)
    products = [program.as_text().count(" dot(") for program in (once, twice)]
    assert products[1] - products[0] == 6 * layers_written
    memory = [program.memory_analysis().temp_size_in_bytes for program in (once, twice)]
    assert memory[1] < memory[0]


@pytest.mark.full
def test_other_labels_change_the_loss_every_parameter_and_its_moments() -> None:
    inputs = {t.name: jnp.asarray(input_arrays.draw(CASE, t, 0).astype(t.dtype_in(CASE))) for t in STEP.inputs}
    changed = inputs | {"labels": (inputs["labels"] + 1) % CASE.sizes["vocabulary"]}
    run = jax.jit(lambda inputs: lm_step.apply_scan(inputs, **STEP.attributes_of(CASE)))
    before, after = run(inputs), run(changed)
    assert before.keys() == {t.name for t in STEP.outputs}
    assert all((before[name] != after[name]).any() for name in before)
