"""A target pack as the target of XLA's compiler."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

from xlafuse.compile.compiler import Target

from ... import targets
from ...base.worker_protocol import Skip


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
    return Target(pack.xla_config(jax), results or pack.xla_autotune_results(jax), devices=devices)
