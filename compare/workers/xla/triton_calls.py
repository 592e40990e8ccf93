"""Hand-written Triton kernels in an XLA program: the launches of a PyTorch function as custom calls of a JAX function.

    apply = launching("xlafuse.triton_side.kernels.rmsnorm:apply")
    jax.jit(apply)({"x": x, "weight": weight}, eps=1e-5)

A process that pretends to have the target's GPU (role `target`) records the function's kernel launches, with grids,
warps and stages, in forward and, for gradients, in backward. So no launcher is written twice, and this process imports
neither torch nor triton.

Each launch becomes XLA's own custom call for Triton, "__gpu$xla.gpu.triton", through jax.ffi. Up to jaxlib 0.10.2,
jax's Pallas lowers to the same call. XLA compiles the kernel from Triton's IR with its own Triton, also for a GPU that
is not there, and treats it as an opaque operation. The call carries the FLOPs and operations that the kernel declares
(xlafuse.hlo.custom_calls).

XLA gives such a kernel no scratch memory; a kernel that needs it would write to address 0. So tiles are read through
pointers, not tensor descriptors.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from xlafuse.hlo import custom_calls

from ...base import host
from ...base.worker_protocol import Skip
from ..client import Worker, WorkerDied, WorkerError, WorkerTimeout

Arrays = dict[str, jax.Array]
Plan = Mapping[str, Any]  # from compare.workers.pytorch.target.plan_launches


def launching(function: str, precision: str = "ieee") -> Callable[..., Arrays]:
    """Return a PyTorch function as a JAX function with the same contract, differentiable once in every input.

    function: "package.module:name". precision: of float32 products, "ieee" or "tf32". Tracing the JAX function raises
    compare.base.worker_protocol.Skip where the PyTorch function does more than launch Triton kernels.
    """

    def apply(inputs: Mapping[str, jax.Array], **attributes: Any) -> Arrays:
        specs = {name: [list(x.shape), x.dtype.name] for name, x in inputs.items()}
        plan = functools.partial(_plan, function, json.dumps(specs), json.dumps(attributes), precision)
        inference = plan(train=False)

        @jax.custom_vjp
        def call(inputs: Arrays) -> Arrays:
            buffers = _launched(inference["parts"]["forward"], _given(inference, inputs))
            return {name: buffers[number] for name, number in inference["outputs"].items()}

        def forward(inputs: Arrays) -> tuple[Arrays, dict[int, jax.Array]]:
            training = plan(train=True)
            buffers = _launched(training["parts"]["forward"], _given(training, inputs))
            needed = {number for launch in training["parts"]["backward"] for number in launch["reads"]} & set(buffers)
            outputs = {name: training["outputs"][name] for name in inference["outputs"]}
            return {name: buffers[n] for name, n in outputs.items()}, {n: buffers[n] for n in sorted(needed)}

        def backward(saved: dict[int, jax.Array], cotangents: Arrays) -> tuple[Arrays]:
            training = plan(train=True)
            given = _given(training, {f"d{name}": cotangent for name, cotangent in cotangents.items()})
            buffers = _launched(training["parts"]["backward"], saved | given)
            return ({name: buffers[training["outputs"][f"d{name}"]] for name in inputs},)

        call.defvjp(forward, backward)
        return call(dict(inputs))

    return apply


def _given(plan: Plan, arrays: Mapping[str, jax.Array]) -> dict[int, jax.Array]:
    return {plan["inputs"][name]: array for name, array in arrays.items()}


def _launched(launches: Sequence[Mapping[str, Any]], buffers: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
    """Add the launches to the program, in order, and return all buffers after them."""
    known = dict(buffers)
    for launch in launches:
        results = [jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for _, shape, dtype in launch["writes"]]
        x, y, z = launch["grid"]
        with set_xla_metadata(**{custom_calls.ATTRIBUTE: json.dumps(launch["declared"])}):
            written = jax.ffi.ffi_call("__gpu$xla.gpu.triton", results)(
                *(known[number] for number in launch["reads"]),
                name=launch["name"], ir=launch["ir"], grid_x=np.int32(x), grid_y=np.int32(y), grid_z=np.int32(z),
                num_warps=np.int32(launch["num_warps"]), num_stages=np.int32(launch["num_stages"]), debug=False,
            )
        known |= {number: array for (number, _, _), array in zip(launch["writes"], written, strict=True)}
    return known


@functools.cache
def _plan(function: str, specs: str, attributes: str, precision: str, *, train: bool) -> Plan:
    try:
        plan: Plan = _planner().ask(
            "launch_plan", function=function, inputs=json.loads(specs), attributes=json.loads(attributes), train=train,
            precision=precision,
        )
    except WorkerError as problem:
        if problem.kind == "skipped":
            raise Skip(problem.message) from problem
        raise
    except (WorkerDied, WorkerTimeout):
        _planner.cache_clear()
        raise
    return plan


@functools.cache
def _planner() -> Worker:
    """Start the `target` worker, which uses no GPU, writes to this process's log and ends with this process."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": ""}
    if not os.environ.get("XLAFUSE_TARGET"):
        gpu = host.gpus()[0]
        environment |= {"XLAFUSE_TARGET": gpu.name, "XLAFUSE_TARGET_PROPERTIES": json.dumps(gpu.properties)}
    worker = Worker("target", Path("/dev/stderr"), environment)
    atexit.register(worker.stop)
    worker.wait_ready()
    return worker
