"""A rank's XLA worker: one of several JAX processes, each with a GPU, or a CPU where there is none."""

from __future__ import annotations

from .worker import XlaBackend  # it sets XLA's environment, which jax reads when it is imported

# isort: split
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from xlafuse.compile import compiler
from xlafuse.hlo import link_traffic
from xlafuse.parallel import program as parallel

from ...base import host
from ...base.worker_protocol import Skip
from ...measure.clock import CuptiClock, cupti_missing
from ...measure.rank_measurement import RankProgram, with_alone
from ...measure.worker_backend import Arrays, Program
from ...numerics import input_arrays
from ...spec.blocks import BLOCKS
from ...spec.case import Case
from ...spec.implementation import Implementation
from ..rank_group import rank_of_environment
from ..service import Service
from . import prepare as one_gpu
from .rank_programs import flags_of, program_of, spec_of


def methods() -> dict[str, Callable[..., Any]]:
    rank, coordinator = rank_of_environment()
    on_gpu = host.gpu_present()
    if not on_gpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator, num_processes=rank.count, process_id=rank.number,
        local_device_ids=[rank.number] if on_gpu else None,
    )
    return Service(XlaRankBackend(), partial(RankProgram, rank=rank)).methods()


class XlaRankBackend(XlaBackend):
    """JAX with arrays over the GPUs of all ranks. This process holds its slices of them."""

    def __init__(self) -> None:
        super().__init__(jax.local_devices()[0])
        self.mesh = parallel.mesh_of(jax.devices())

    def environment(self) -> dict[str, Any]:
        found = host.versions(("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda13-plugin"))
        return {"device": self.device, "devices": jax.device_count(), **found}

    def clock(self) -> CuptiClock | None:
        return CuptiClock(peer_copies=True) if self.has_gpu and not cupti_missing() else None

    def build(
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, autotune: bool = True
    ) -> Program:
        return with_alone(partial(self._compiled, case, implementation, folder), dumps)

    def _compiled(
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, *, communicate: bool
    ) -> Program:
        """Raises Skip where the program has no form without exchanges and was asked for it."""
        inputs = self.inputs(folder, case)
        if not communicate and implementation.backend.options.get("partitioned"):
            raise Skip("XLA's partitioner adds its exchanges, so there is no program without them")
        compiled = compiler.compile(
            program_of(case, implementation, self.mesh, communicate), [inputs],
            matmul_precision="tf32" if case.precision == "tf32" else "ieee", dump_to=dumps / "forward",
            options=flags_of(case, implementation),
        )
        halves = {"forward": compiled}
        program = one_gpu.program_of_halves(halves, dumps, has_gpu=self.has_gpu)
        program.sent = link_traffic.sent(compiled.hlo_text)
        if communicate:
            program.graph = one_gpu.graph_of_halves(halves, dumps, name=implementation.name, target="")
        return program

    def local(self, array: Any) -> Any:
        (shard,) = array.addressable_shards
        return np.asarray(shard.data).astype(np.float32 if array.dtype.itemsize < 4 else array.dtype)

    def changed_inputs(self, inputs: Arrays, folder: Path, case: Case) -> list[str]:
        return []  # the arrays that a program gets are the only copy on the GPU

    def _on_device(self, file: Path, name: str, dtype: str) -> jax.Array:
        """Return the whole array over all ranks; this process reads its slice."""
        stored = np.load(file, mmap_mode="r")
        typed = stored.view(jax.numpy.dtype(dtype)) if dtype in input_arrays.BITS else stored
        sharding = NamedSharding(self.mesh, self._specs[name])
        return jax.make_array_from_callback(
            typed.shape, sharding, lambda index: np.ascontiguousarray(typed[index])
        )

    def inputs(self, folder: Path, case: Case) -> Arrays:
        block = BLOCKS[case.block]
        self._specs = {t.name: spec_of(t) for t in (*block.inputs, *block.outputs)}
        return super().inputs(folder, case)
