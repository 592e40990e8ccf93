"""The tuning worker: it finds the choices of a case, compiles candidates in parallel, and times them on its GPU.

Candidates compile in processes of their own, on fake tensors, which take no memory. Triton keeps their code on disk, so
the worker launches them without a compile.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from xlafuse.triton_side.configs import tuned
from xlafuse.triton_side.tuning import search, spaces, trials

from ...base import host
from ...numerics.reference import store_inputs
from ...spec.blocks import BLOCKS
from ...spec.case import TRANSPOSED, Case
from ...spec.tensor import Tensor
from .worker import TorchBackend, set_precision

ROUGH, ACCURATE = 5, 11  # timed calls
NOT_COMPILED = trials.Compiled((), 0, 0, "was not compiled in time")
CRASHED = trials.Compiled((), 0, 0, "crashes the compiler")
Tensors = Mapping[str, torch.Tensor]
_Key = tuple[str, frozenset[tuple[str, Any]]]


def methods() -> dict[str, Callable[..., Any]]:
    backend = TorchBackend()
    tuner = Tuner(backend)
    return {
        "gpu": gpu, "choices": tuner.choices, "compile": tuner.compile, "search": tuner.search,
        "device_works": backend.device_works,
    }


def gpu() -> dict[str, Any]:
    """Return the facts of this GPU that its table has, and the version of Triton."""
    found = tuned.gpu()
    assert found is not None, "tuning needs a GPU"
    facts = {"gpu": found.name, "capability": found.capability, "multiprocessors": found.multiprocessors}
    return facts | {"triton": triton.__version__}


class Tuner:
    """Holds the choices of the calls that were asked for, and what compiled for them."""

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend
        self._choices: dict[_Key, tuple[Case, str, spaces.Choice]] = {}
        self._compiled: dict[_Key, dict[Any, trials.Compiled]] = defaultdict(dict)
        self._drawn: tuple[Case, Tensors, Tensors] | None = None

    def choices(self, case: dict[str, Any], implementation: str) -> list[dict[str, Any]]:
        """Return the kernels and shape classes of the call's choices that no earlier call had."""
        spec, new = Case.from_json(case), []
        with trials.fake_tensors():
            for choice in trials.choices_in(fake_call(spec, implementation)):
                key = _key(choice.name, choice.shape_class)
                if key not in self._choices:
                    self._choices[key] = spec, implementation, choice
                    new.append({"kernel": choice.name, "shape_class": choice.shape_class})
        return new

    def compile(self, choices: list[dict[str, Any]], seconds: float) -> int:
        """Compile all candidates of these choices in parallel, for `seconds` at most, and return their number."""
        deadline = time.monotonic() + seconds
        left: dict[tuple[_Key, Any], list[Any]] = defaultdict(list)
        for each in choices:
            key = _key(each["kernel"], each["shape_class"])
            *_, choice = self._choices[key]
            for config in dict.fromkeys((trials.present(choice), *spaces.candidates(choice))):
                self._compiled[key][config] = NOT_COMPILED
                left[key, _without_programs(config)].append(config)
        count = sum(map(len, left.values()))
        for _ in range(2):  # a crash of the compiler ends the pool, and spares no task that is running in it
            if left and time.monotonic() < deadline:
                left = self._compile_some(left, deadline)
        if time.monotonic() < deadline:
            for (key, _), configs in left.items():
                self._compiled[key] |= dict.fromkeys(configs, CRASHED)
        return count

    def _compile_some(
        self, tasks: Mapping[tuple[_Key, Any], list[Any]], deadline: float
    ) -> dict[tuple[_Key, Any], list[Any]]:
        """Compile until the deadline, or until a compiler crashes; return the tasks that are left."""
        left = defaultdict(list, tasks)
        pool = ProcessPoolExecutor(min(host.usable_cores(), max(1, len(tasks))), multiprocessing.get_context("spawn"))
        try:
            futures = {
                pool.submit(compile_candidates, *self._choices[key], configs): (key, kind)
                for (key, kind), configs in tasks.items()
            }
            for future in as_completed(futures, max(0.0, deadline - time.monotonic())):
                key, kind = futures[future]
                self._compiled[key] |= zip(left[key, kind], future.result(), strict=True)
                del left[key, kind]
        except (BrokenProcessPool, TimeoutError):
            pass
        finally:
            pool.shutdown(cancel_futures=True)
        return left

    def search(self, kernel: str, shape_class: dict[str, Any]) -> dict[str, Any] | None:
        """Time the candidates of a choice; return None if too few were compiled in time.

        Else return {"case", "candidates", "dropped": problem -> number, "before", "by_rule", "before_us", "us",
        "config", "shared_bytes"}. config: None if the present one, `before`, stays. by_rule: it is the rule's.
        before_us: None if that one cannot run.
        """
        key = _key(kernel, shape_class)
        case, implementation, choice = self._choices[key]
        compiled = self._compiled.pop(key)
        present = trials.present(choice)
        if compiled[present] == NOT_COMPILED:
            return None
        compiled[present] = _as_replaced(compiled[present], compiled.values())
        usable = {config: each for config, each in compiled.items() if not each.problem}
        if not usable:
            raise RuntimeError(f"no configuration can be used: the present one {compiled[present].problem}")
        same = trials.same_in_all(usable.values())
        call = self._call(case, implementation)

        def timed(config: Any, accurate: bool) -> float:
            if config not in usable:  # the present one, chosen on a GPU with more shared memory
                return math.inf
            try:
                return self._seconds(trials.launches_with(call, choice, config, same), ACCURATE if accurate else ROUGH)
            except triton.OutOfResources:
                return math.inf
            except torch.AcceleratorError as error:
                raise RuntimeError(f"{config}: {error}") from error

        found = search.search(present, [config for config in usable if config != present], timed)
        if not math.isfinite(found.seconds):
            raise RuntimeError("no configuration could be launched")
        return {
            "case": case.id, "candidates": len(compiled),
            "dropped": Counter(each.problem for each in compiled.values() if each.problem),
            "before": asdict(present), "by_rule": present == choice.rule,
            "before_us": found.before * 1e6 if math.isfinite(found.before) else None,
            "us": found.seconds * 1e6, "config": asdict(found.config) if found.config != present else None,
            "shared_bytes": usable[found.config].shared_bytes,
        }

    def _seconds(self, launch: Callable[[], None], calls: int) -> float:
        """Return the median time in which the launches' kernels ran, each call from a cold L2, as in a run.

        Without CUPTI, the time from the first kernel to the last one's end.
        """
        clock, synchronize = self._backend.clock(), self._backend.synchronize
        assert clock is not None, "tuning needs a GPU"
        clock.start()
        for _ in range(calls):
            self._backend.flush_l2()
            clock.time(launch, synchronize)
        samples = clock.collect()
        return statistics.median(s.device_time if s.busy_time is None else s.busy_time for s in samples)

    def _call(self, case: Case, implementation: str) -> trials.Call:
        """Return the call on real tensors. Those of one case are kept."""
        if self._drawn is None or self._drawn[0] != case:
            self._drawn = None
            self._backend.release_memory(idle=True)
            with tempfile.TemporaryDirectory(prefix="xlafuse-tune-", dir=host.scratch_root()) as folder:
                path = Path(folder) / "0"
                store_inputs(case, 0, path)
                self._drawn = case, self._backend.inputs(path, case), self._backend.cotangents(path, case)
        _, inputs, cotangents = self._drawn
        set_precision(case.precision)
        return partial(_run, case, inputs, cotangents, implementation)


def compile_candidates(
    case: Case, implementation: str, choice: spaces.Choice, configs: Iterable[Any]
) -> list[trials.Compiled]:
    """Compile candidates in a process of the pool."""
    with trials.fake_tensors():
        call = fake_call(case, implementation)
        return [trials.compile_with(call, choice, config) for config in configs]


def fake_call(case: Case, implementation: str) -> trials.Call:
    """Return the call of an implementation in Triton on fake tensors. Call it within trials.fake_tensors()."""
    set_precision(case.precision)
    block = BLOCKS[case.block]
    inputs = {t.name: _fake(t, case, trained=case.differentiates and t.differentiable) for t in block.inputs}
    cotangents = {t.name: _fake(t, case) for t in block.outputs} if case.differentiates else {}
    return partial(_run, case, inputs, cotangents, implementation)


def _fake(tensor: Tensor, case: Case, trained: bool = False) -> torch.Tensor:
    shape, dtype = tensor.shape(case.sizes), getattr(torch, tensor.dtype_in(case))
    if case.layout == TRANSPOSED and len(shape) > 1:
        return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device="cuda").mT.requires_grad_(trained)
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=trained)


def _run(case: Case, inputs: Tensors, cotangents: Tensors, implementation: str) -> Any:
    """Call the implementation forward, and backward if there are cotangents, all in this thread."""
    block = BLOCKS[case.block]
    apply = block.implementation(implementation).load()
    with torch.set_grad_enabled(bool(cotangents)):
        outputs = apply(inputs, **block.attributes_of(case))
    if not cotangents:
        return outputs
    wanted = [x for x in inputs.values() if x.requires_grad]
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad([outputs[name] for name in cotangents], wanted, list(cotangents.values()))


def _as_replaced(present: trials.Compiled, compiled: Iterable[trials.Compiled]) -> trials.Compiled:
    """Return the present configuration with the shared memory of its launches, which the other candidates replace."""
    here, shared = tuned.gpu(), max(each.replaced_bytes for each in compiled)
    assert here is not None, "tuning needs a GPU"
    exceeds = "exceeds shared memory" if shared > here.shared_bytes else ""
    return replace(present, shared_bytes=shared, problem=present.problem or exceeds)


def _without_programs(config: Any) -> Any:
    """Return the same for configurations that differ only in the grid, so share their code."""
    return replace(config, programs=1) if hasattr(config, "programs") else config


def _key(kernel: str, shape_class: Mapping[str, Any]) -> _Key:
    return kernel, frozenset(shape_class.items())
