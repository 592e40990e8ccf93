"""A target pack as the target of XLA's compiler."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from xlafuse.compile.compiler import Target
from xlafuse.hlo import gpu_program

from ... import targets
from ...base.worker_protocol import Skip
from ...graph.analyse.call_time import known_call_time
from ...graph.analyse.roofline import Ceilings
from ...graph.build.from_hlo import from_program
from ...predict.times import with_predictions


def xla_target(name: str, *, autotune: Path | None = None, devices: int = 1) -> Target:
    """Return the target of that name, with its recorded autotuning results for this jax.

    autotune: a folder whose results take precedence. devices: of a GPU target, how many the machine has.

    Raises Skip for an unknown name, for a GPU without a config for this jax, and for a TPU without libtpu.
    """
    pack, jax = targets.load(name), version("jax")
    if pack.tpu is not None:
        if importlib.util.find_spec("libtpu") is None:
            raise Skip(f'{name} needs libtpu, which has XLA for TPUs: pip install "jax[tpu]=={jax}"')
        return Target(str(pack.tpu["topology"]), devices=devices, platform="tpu")
    results = targets.autotune_results(autotune, jax) if autotune is not None else None
    return Target(
        pack.xla_config(jax), results or pack.xla_autotune_results(jax), devices=devices,
        time_us=_time_us(name) if targets.is_measured(name) else None,
    )


@cache
def _time_us(name: str) -> Callable[[str], float | None]:
    """Return a function that predicts a call's time in µs from the text of an optimized module."""
    ceilings = Ceilings.from_json(targets.load(name).ceilings())

    def time_us(text: str) -> float | None:
        program = gpu_program.program(gpu_program.parse(text))
        return known_call_time(with_predictions(from_program(program, target=name), ceilings))[0].us

    return time_us
