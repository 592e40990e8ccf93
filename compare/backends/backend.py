"""A backend: how the implementations of one compiler are compiled, run and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Backend:
    """How the implementations of one compiler are compiled, run and checked.

    Code of workers is named ".workers.module:function", relative to compare, so that reading this table imports no
    framework.

    name: as records and graphs have it, under `compiler`.
    label: as `doctor` shows it.
    family: the name of the backend that this one is a variant of, or its own name.
    worker: the role of the worker that runs it on this machine's GPU or CPU, "xla" or "torch".
    prepare: a function of that worker; it compiles one case and returns a compare.measure.worker_backend.Program, with
        the graph that its compiler's graph builder makes.
    target_worker: the role of the worker that compiles for a GPU that is not there; None where none can.
    compile_for_target: a function of that worker; it returns the compile time and the fusion graph.
    cpu_check_worker: the role of the worker that checks numbers on a CPU; None for code that only a GPU runs.
    options: what distinguishes it from its family, read by `prepare` and `compile_for_target`.
    autotunes_for_minutes: it times candidate kernels before its first call, minutes a case. XLA's autotuning takes
        seconds and does not count.
    prebuilt: it launches prebuilt kernels, so there is nothing to compile for a target.
    hand_written: a person chose what computes each product; its graph names the language of each.
    spans_gpus: its programs run on several GPUs, in a process of `worker` for each.
    replays_graphs: it replays the calls of its family's implementation from CUDA graphs, so its kernels are the same.
    gpu_only: why only a GPU runs its code, as the end of "tpu-v5e is not a GPU: ..."; None for code that XLA compiles
        for a TPU, too.
    requires: what must be installed besides the worker's framework: "triton", "nvrtc", "g++", "launch planning".
    """

    name: str
    label: str
    family: str
    worker: str
    prepare: str
    target_worker: str | None
    compile_for_target: str | None
    cpu_check_worker: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    autotunes_for_minutes: bool = False
    prebuilt: bool = False
    hand_written: bool = False
    replays_graphs: bool = False
    gpu_only: str | None = None
    spans_gpus: bool = False
    requires: tuple[str, ...] = ()
