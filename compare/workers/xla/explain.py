"""The process that compiles users' JAX functions; see compare.workers.explaining."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...base.host import installed
from ...graph.analyse import forced_fusion
from ...graph.model import FusionGraph, Phase
from ...measure.clock import CuptiClock, cupti_missing
from ...measure.l2_flush import L2Flush
from ...measure.rounds import rounds_of
from .. import explaining

_NO_CUDNN = "cuDNN not found"
_CUB_SIZE = re.compile(r"CUB scratch size.*num_items=(\d+)", re.DOTALL)
_CUB_ALONE = {"xla_gpu_deviceless_cub_mode": "DEVICELESS_CUB_NO_FALLBACK"}
_BOOLEANS = {"true": True, "false": False}  # XLA takes these words in XLA_FLAGS, but not from jax


def methods() -> dict[str, Callable[..., Any]]:
    return explaining.Service(XlaExplainer).methods()


class XlaExplainer:
    """XLA as a compare.workers.explaining.Explainer, for this machine's GPU or the target in XLAFUSE_TARGET."""

    def __init__(self) -> None:
        from xlafuse.compile.environment import configure_environment

        from ... import targets

        target = self._target_name = os.environ["XLAFUSE_TARGET"] or None
        configure_environment(deviceless=target is not None, tpu=targets.is_tpu(target), constants_as_inputs=True)
        import jax

        # HLO names source files by their full path, and files of installed packages relative to site-packages.
        jax.config.update("jax_hlo_source_file_canonicalization_regex", r"^.*/site-packages/")
        self._settings = dict(jax.config.values)
        self._versions = installed("jax", "jaxlib")
        self._target = target or jax.devices()[0].device_kind

    def begin(self, request: explaining.Request) -> None:
        import jax

        from .target import xla_target

        jax.clear_caches()
        for option, value in (self._settings | request["state"]).items():
            if jax.config.values[option] != value:  # an earlier call may have changed it
                jax.config.update(option, value)
        self._grad, self._timed, self._elsewhere = request["grad"], request["timed"], request["elsewhere"]
        self._calls: dict[str, Callable[[], Any]] = {}  # of the compiled functions, to be timed
        self._default: tuple[Any, Mapping[str, str]] | None = None  # graph, and HLO by phase
        self._xla_target = None
        if self._target_name is not None:
            autotune = None if request["autotune"] is None else Path(request["autotune"])
            self._xla_target = xla_target(self._target_name, autotune=autotune, devices=request["devices"])

    def explain(self, call: Mapping[str, Any], dumps: Path) -> explaining.Answer:
        try:
            return self._explain(call, dumps)
        except RuntimeError as problem:
            if call["force"] and type(problem).__name__ == "JaxRuntimeError":
                first = str(problem).partition("\n")[0][:300]
                raise forced_fusion.NotForced(f"XLA does not compile them as one kernel: {first}") from problem
            if _NO_CUDNN not in str(problem):
                raise
            raise RuntimeError(
                f"cuDNN's attention is compiled by cuDNN, which is missing: {sys.executable} -m pip install "
                "nvidia-cudnn-cu13"
            ) from problem
        except ValueError as problem:
            if "incompatible devices" not in str(problem) or self._xla_target is None:
                raise
            raise ValueError(
                f"the function's mesh and its arguments are on different devices; devices=N (--devices N) makes the "
                f"mesh of N GPUs of the {self._target}"
            ) from problem

    def _explain(self, call: Mapping[str, Any], dumps: Path) -> explaining.Answer:
        from xlafuse.compile import random_calls, user_functions

        target = self._xla_target
        if call["products"] is not None:
            assert target is not None
            target = replace(target, autotune_results=None, products=call["products"])
        several = target if target is not None and target.devices > 1 else None
        with user_functions.having_devices_of(several):  # meshes are made of them when the user's module is imported
            call, function, args, kwargs = self._received(call)
        if "stablehlo" in call:
            compiled = user_functions.compile_stablehlo(call["stablehlo"], target=target, dump_to=dumps)
            return explaining.Answer(self._graph(compiled, dumps))
        options = {name: _BOOLEANS.get(text.lower(), text) for name, text in call["settings"].items()}
        forced = self._forced(call["force"]) if call["force"] else None
        edits: dict[str, Any] = {} if forced is None else {forced.phase: forced.edit}
        if self._grad:
            forward, backward = user_functions.compile_phases(
                function, args, kwargs, target=target, dump_to=dumps, options=options, edits=edits
            )
            if self._timed:
                assert forward.executable and backward.executable
                _, inputs = user_functions.bind(function, args, kwargs)
                self._calls[call["name"]] = partial(
                    random_calls.step_of, forward.executable, backward.executable, inputs
                )
            held = dict.fromkeys((*forward.closed_over, *backward.closed_over))
            graph = self._joined(forward, backward, dumps)
            again: Callable[..., Any] = partial(user_functions.compile_phases, function, args, kwargs, target=target)
            notes = _closed_over(call["name"], tuple(held))
            notes += self._sorted_by_cub(call["name"], graph, again, options)
            texts = {"forward": forward.hlo_text, "backward": backward.hlo_text}
            return self._answer(call, graph, notes, texts, forced)
        compiled = user_functions.compile_call(
            function, args, kwargs, target=target, dump_to=dumps, options=options, edit=edits.get("forward")
        )
        if self._timed:
            assert compiled.compiled
            self._calls[call["name"]] = partial(random_calls.call_of, compiled.compiled)
        graph = self._graph(compiled, dumps)
        again = partial(user_functions.compile_call, function, args, kwargs, target=target)
        notes = _closed_over(call["name"], compiled.closed_over)
        notes += self._sorted_by_cub(call["name"], graph, again, options)
        return self._answer(call, graph, notes, {"forward": compiled.hlo_text}, forced)

    def _forced(self, text: str) -> _Forced:
        """Return the two kernels of the default compile. Raises UsageError and NotForced."""
        from xlafuse.hlo.gpu_program import parse

        assert self._default is not None
        graph, texts = self._default
        kernels = [graph.kernels[index] for index in forced_fusion.pair(graph, text)]
        if self._target.startswith("tpu"):
            raise forced_fusion.NotForced("XLA's compile for TPUs takes no edits")
        first, second = (_instruction(kernel.name) for kernel in kernels)
        return _Forced(kernels[0].phase, parse(texts[kernels[0].phase]).name, first, second)

    def _answer(
        self, call: Mapping[str, Any], graph: FusionGraph, notes: list[str], texts: Mapping[str, str],
        forced: _Forced | None,
    ) -> explaining.Answer:
        if forced is None:
            self._default = self._default if call["settings"] else (graph, texts)
            return explaining.Answer(graph, notes)
        from xlafuse.compile.forced_fusion import NAME, NotChecked, error

        kernels = tuple(
            replace(kernel, provenance="not autotuned", facts={**kernel.facts, forced_fusion.FORCED: True})
            if _instruction(kernel.name) == NAME else kernel
            for kernel in graph.kernels or ()
        )
        if kernels == graph.kernels:
            raise forced_fusion.NotForced("XLA did not compile the edited module")
        # XLA gave reasons for kernels that are one now.
        known = tuple(reason for reason in graph.reasons if reason.producer or reason.consumer)
        graph = replace(graph, kernels=kernels, reasons=known)
        try:
            worst, dtype = error(*forced.edited)
        except NotChecked as problem:
            return explaining.Answer(graph, [*notes, f"{call['name']}: not checked on the CPU: {problem}"])
        return explaining.Answer(graph, notes, {"error": worst, "dtype": dtype})

    def _sorted_by_cub(
        self, name: str, graph: FusionGraph, compile_again: Callable[..., Any], options: Mapping[str, Any]
    ) -> list[str]:
        """Return a note if XLA takes CUB for one of the graph's sorts where it has the device, else nothing.

        CUB's scratch size needs a device. XLA sorts by its own kernels where it does not know the size. Without this
        fallback the compile fails at the first sort that it would give to CUB.
        """
        if self._xla_target is None or not any("sort_launches" in each.facts for each in graph.kernels or ()):
            return []
        try:
            compile_again(options={**options, **_CUB_ALONE})
        except RuntimeError as problem:
            found = _CUB_SIZE.search(str(problem))
            if found is None:
                return []
            return [
                f"{name}: on a GPU, XLA sorts {int(found[1]):,} elements by CUB, not by the kernels shown. "
                "CUB's scratch size needs the device, so this compile kept XLA's own sort"
            ]
        return []

    def _received(self, call: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any, Any, Any]:
        """Return the call with its function, args and kwargs, where it is no StableHLO. Raises NotReceived."""
        from ...functions.parcel import unpack

        try:
            if "again" in call:
                call = {**call, **pickle.loads(call["again"])()}
            if "stablehlo" in call:
                return call, None, None, None
            args, kwargs = unpack(call["arguments"], _struct)
            return call, unpack(call["function"], _struct), args, kwargs
        except (Exception, SystemExit) as problem:
            if not self._elsewhere:
                raise
            raise explaining.NotReceived(f"{type(problem).__name__}: {problem}") from problem

    def time(self) -> dict[str, list[dict[str, Any]]]:
        """Return rounds of each call, taken in turns. Raises NotTimed without CUPTI."""
        import jax
        import jax.numpy as jnp

        if missing := cupti_missing():
            raise explaining.NotTimed(missing)
        sum_all = jax.jit(jnp.sum)
        flush_l2 = L2Flush(lambda n: jnp.ones(n, jnp.float32), lambda x: sum_all(x).block_until_ready())
        calls = {name: make() for name, make in self._calls.items()}
        return rounds_of(calls, CuptiClock(), flush_l2, lambda results=None: jax.block_until_ready(results))

    def _joined(self, forward: Any, backward: Any, dumps: Path) -> Any:
        import jax

        from . import fusion_graph

        outputs = len(jax.tree.leaves(forward.output_structs[0]))
        return fusion_graph.of_halves(
            forward, backward, dumps, outputs=outputs, target=self._target, versions=self._versions
        )

    def _graph(self, compiled: Any, dumps: Path) -> Any:
        from . import fusion_graph

        return fusion_graph.of_module(compiled, dumps, target=self._target, versions=self._versions)[0]


@dataclass
class _Forced:
    """Two instructions of a module that are to be one. edited: the module in which one calls the two, and the other."""

    phase: Phase
    module: str
    first: str
    second: str
    edited: tuple[bytes, bytes] = (b"", b"")

    def edit(self, module: bytes) -> bytes | None:
        from xlafuse.compile.forced_fusion import fuse

        pair = self.module, self.first, self.second
        before, after = (fuse(module, *pair, nested=nested) for nested in (True, False))
        if before is not None and after is not None:
            self.edited = before, after
        return after


def _instruction(kernel: str) -> str:
    """Return the HLO instruction of a kernel's name in the graph: "backward/fusion.1~2" is "fusion.1"."""
    return re.sub(r"^(backward/)+", "", kernel).partition("~")[0]


def _closed_over(name: str, arrays: tuple[tuple[tuple[int, ...], str], ...]) -> list[str]:
    if not arrays:
        return []
    shown = ", ".join(f"{d}{list(s)}" for s, d in arrays[:4]) + (", ..." if len(arrays) > 4 else "")
    return [f"{name} closes over arrays ({shown}): they are shown as inputs; under jax.jit they are constants"]


def _struct(like: Any) -> Any:
    import jax

    from xlafuse.compile import random_calls

    if like.is_key:
        implementation = random_calls.key_implementation(like.dtype)
        key = jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
        return jax.ShapeDtypeStruct(like.shape, key.dtype)
    dtype = jax.numpy.dtype(like.dtype)
    return jax.ShapeDtypeStruct(like.shape, dtype, weak_type=like.weak_type, sharding=like.sharding)
