"""The process that compiles users' PyTorch functions; see compare.workers.explaining."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.archive import portable_line
from ...base.host import installed
from ...graph.analyse import forced_fusion
from ...measure.clock import CuptiClock, cupti_missing
from ...measure.l2_flush import L2Flush
from ...measure.rounds import rounds_of
from .. import explaining

# 'torch.ops.aten._scaled_dot_product_flash_attention.default'
_ATTENTION = re.compile(r"aten\._scaled_dot_product_(\w+?)_attention")


def methods() -> dict[str, Callable[..., Any]]:
    return explaining.Service(TorchExplainer).methods()


class TorchExplainer:
    """Inductor as a compare.workers.explaining.Explainer, for this machine's GPU or the target in XLAFUSE_TARGET."""

    def __init__(self) -> None:
        os.environ.pop("TRITON_INTERPRET", None)  # it keeps Triton from compiling
        os.environ.pop("TORCH_COMPILE_DEBUG", None)  # it loads Dynamo before torch can pretend to have a GPU
        target = os.environ["XLAFUSE_TARGET"] or None
        if target is not None:  # before torch is imported
            from xlafuse.triton_side.deviceless import for_target

            from ... import targets

            for_target.activate(targets.load(target).device_properties())
        import torch

        from xlafuse.triton_side.inductor import _private

        self._settings = _private.all_settings()
        self._deviceless, self._target = target is not None, target or torch.cuda.get_device_name()

    def begin(self, request: explaining.Request) -> None:
        from xlafuse.triton_side.deviceless.user_functions import TensorFactory
        from xlafuse.triton_side.inductor import _private

        _private.restore_settings(self._settings)  # an earlier call may have changed them
        self._train, self._timed = request["grad"], request["timed"]
        self._calls: dict[str, Callable[[], Any]] = {}  # of the compiled functions, to be timed
        self._factory = TensorFactory()
        self._state: Mapping[str, Any] = request["state"]
        self._default: tuple[Any, Any] | None = None  # the last call's graph and program, unless kernels were forced

    def explain(self, call: Mapping[str, Any], dumps: Path) -> explaining.Answer:
        from xlafuse.triton_side.deviceless import user_functions
        from xlafuse.triton_side.inductor.compiler import NotForced

        from ...functions.parcel import unpack
        from ...graph.build.from_inductor import calls_in_order, from_inductor

        function, args, kwargs = unpack(call["parcel"], self._make)
        forced = self._forced(call["force"]) if call["force"] else None
        try:
            with _apply_state(self._state):
                captured, again = user_functions.compile_call(
                    function, args, kwargs, self._factory, train=self._train, products=call["products"],
                    settings=call["settings"], keep_compiled=self._timed, forced=forced,
                )
        except NotForced as problem:
            raise forced_fusion.NotForced(f"Inductor cannot fuse them: {problem}") from None
        if self._timed:  # it holds arrays on the GPU
            self._calls[call["name"]] = again
        captured.breaks = tuple(replace(cut, line=portable_line(cut.line)) for cut in captured.breaks)
        if captured.stopped is not None:
            captured.stopped = replace(captured.stopped, line=portable_line(captured.stopped.line))
        program = captured.program()
        graph = from_inductor(program, target=self._target, versions=installed("torch", "triton"))
        notes = [*(f"{call['name']}: {cut}" for cut in captured.breaks), *self._assumed(call["name"], captured)]
        if forced is None:
            self._default = self._default if call["settings"] else (graph, program)
            return explaining.Answer(graph, notes)
        assert graph.kernels is not None
        kernels = list(graph.kernels)
        calls = calls_in_order(program)
        at = next(at for at, call in enumerate(calls) if forced.first | forced.second <= call.operations)
        kernels[at] = replace(kernels[at], facts={**kernels[at].facts, forced_fusion.FORCED: True})
        code = next(each.code for each in captured.graphs if each.part == forced.part)
        check = {"code": code, "kernel": calls[at].kernel.name}
        return explaining.Answer(replace(graph, kernels=tuple(kernels)), notes, check)

    def _forced(self, text: str) -> Any:
        """Return the two kernels of the default compile. Raises UsageError and NotForced."""
        from xlafuse.triton_side.inductor.compiler import Forced

        from ...graph.build.from_inductor import calls_in_order

        assert self._default is not None
        graph, program = self._default
        indices = forced_fusion.pair(graph, text)
        part = graph.kernels[indices[0]].phase
        if sum(each.part == part for each in program.graphs) > 1:
            raise forced_fusion.NotForced(
                "graph breaks cut the function, and --force takes one that Inductor compiles as one graph"
            )
        calls = calls_in_order(program)
        for index in indices:
            if not calls[index].operations:
                name = graph.kernels[index].name
                raise forced_fusion.NotForced(f"{name} is a library's call, into which Inductor fuses nothing")
        return Forced(part, *(calls[index].operations for index in indices))

    def time(self) -> dict[str, list[dict[str, Any]]]:
        """Return rounds of each call, taken in turns."""
        import torch

        from .worker import EventClock

        clock = EventClock() if cupti_missing() else CuptiClock()
        flush_l2 = L2Flush(lambda n: torch.ones(n, device="cuda"), torch.Tensor.sum)
        with _apply_state(self._state):
            return rounds_of(self._calls, clock, flush_l2, lambda results=None: torch.cuda.synchronize())

    def _make(self, like: Any) -> Any:
        from xlafuse.triton_side.deviceless.user_functions import TensorSpec

        stride = like.stride or _contiguous(like.shape)
        return self._factory.tensor(
            TensorSpec(like.shape, stride, like.dtype, like.requires_grad, like.is_parameter)
        )

    def _assumed(self, name: str, captured: Any) -> list[str]:
        chosen = {match[1] for kernel in captured.kernels if (match := _ATTENTION.search(kernel.name))}
        if not chosen or not self._deviceless:
            return []
        return [
            f"{name}: without a GPU, scaled_dot_product_attention is assumed to run {' and '.join(sorted(chosen))}; "
            "torch.nn.attention.sdpa_kernel fixes the choice",
        ]


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])


def _apply_state(state: Mapping[str, Any]) -> Any:
    """Apply the caller's settings that change the compiled code; return its autocast context."""
    import contextlib

    import torch

    torch.set_default_dtype(getattr(torch, state.get("default_dtype", "float32")))
    torch.set_float32_matmul_precision(state.get("matmul_precision", "highest"))
    torch.use_deterministic_algorithms(state.get("deterministic", False))
    for kind, enabled in state.get("attention", {}).items():
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(enabled)
    autocast = state.get("autocast")
    return torch.autocast("cuda", dtype=getattr(torch, autocast)) if autocast else contextlib.nullcontext()
