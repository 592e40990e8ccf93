"""The process of the PyTorch pairs: it compiles and checks both functions of a case and, on a GPU, times them.

Each timed call replays one CUDA graph of the function, so that Python's time between two kernels does not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from xlafuse.compare import targets
from xlafuse.compare.base.host import gpu_present, installed
from xlafuse.compare.graph import store
from xlafuse.compare.graph.build.from_inductor import from_inductor
from xlafuse.compare.measure.rounds import rounds_of
from xlafuse.compare.workers import main as worker

from .case import Array, Case, difference

_CALLS_BEFORE = 3  # a capture; they do all one-time setup


class InductorPairs:
    """The PyTorch pairs, on this machine's GPU or for the default target."""

    def __init__(self) -> None:
        self._has_gpu = gpu_present()
        if not self._has_gpu:  # before torch is imported
            from xlafuse.triton_side.deviceless import for_target

            for_target.activate(targets.load(targets.DEFAULT).device_properties())
        import torch

        from .inductor_cases import CASES

        self._cases = {case.name: case for case in CASES}
        self._versions = installed("torch", "triton")
        self._name = torch.cuda.get_device_name() if self._has_gpu else targets.DEFAULT
        self._clock: Any = None
        if self._has_gpu:
            from xlafuse.compare.workers.pytorch.worker import TorchBackend, set_precision

            set_precision("ieee")
            self._backend = TorchBackend()
            self._clock = self._backend.clock()

    def names(self) -> list[str]:
        return list(self._cases)

    def environment(self) -> dict[str, Any]:
        return self._versions | {"device": self._name, "timer": self._clock.name if self._clock else None}

    def run(self, name: str) -> dict[str, Any]:
        """Return both graphs, the difference of the results, and the rounds if there is a GPU."""
        case = self._cases[name]
        if not self._has_gpu:
            graphs = {program: self._compile_for_target(case, program) for program in case.programs}
            arrays = _arrays(case.small_arrays, "cpu")
            results = [function(*arrays) for function, _ in case.programs.values()]
            return {"size": case.size, "graphs": graphs, **_difference(*results)}
        import torch

        arrays = _arrays(case.arrays, "cuda")
        made = {program: self._capture(case, program, arrays) for program in case.programs}
        calls = {program: replay for program, (_, replay, _) in made.items()}
        for call in calls.values():
            call()
        torch.cuda.synchronize()
        rounds = rounds_of(calls, self._clock, self._backend.flush_l2, self._backend.synchronize)
        return {
            "size": case.size,
            "graphs": {program: graph for program, (graph, _, _) in made.items()},
            **_difference(*(results for _, _, results in made.values())),
            "rounds": rounds,
        }

    def _compile_for_target(self, case: Case, program: str) -> Any:
        import torch._inductor.config as config

        from xlafuse.triton_side.deviceless.user_functions import TensorFactory, TensorSpec, compile_call

        function, options = case.programs[program]
        factory = TensorFactory()
        tensors = [factory.tensor(TensorSpec(shape, _strides(shape), dtype)) for shape, dtype in case.arrays]
        with config.patch(dict(options)):
            captured, _ = compile_call(function, tensors, {}, factory, train=False, products=case.products)
        return store.to_json(from_inductor(captured, target=self._name, versions=self._versions))

    def _capture(self, case: Case, program: str, arrays: list[Any]) -> tuple[Any, Callable[[], None], Any]:
        """Return the graph as JSON, the replay of a CUDA graph of the call, and the results that it writes."""
        import torch
        import torch._inductor.config as config

        from xlafuse.triton_side.inductor import compiler

        function, options = case.programs[program]
        torch.compiler.reset()  # both programs may be one function, compiled with other options
        compiled = compiler.compile(function, fullgraph=False)
        with config.patch(dict(options)), torch.no_grad():
            with compiler.capture() as captured:
                compiled(*arrays)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_CALLS_BEFORE):
                    compiled(*arrays)
            torch.cuda.synchronize()
            replayed = torch.cuda.CUDAGraph()
            with torch.cuda.graph(replayed, stream=stream):
                results = compiled(*arrays)
        graph = from_inductor(captured, target=self._name, versions=self._versions)
        return store.to_json(graph), replayed.replay, results


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[1], 1) if len(shape) == 2 else (1,)


def _arrays(arrays: tuple[Array, ...], device: str) -> list[Any]:
    import torch

    torch.manual_seed(0)
    return [torch.randn(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in arrays]


def _difference(unfused: Any, fused: Any) -> dict[str, float]:
    """Return the error of the results, and the largest allowed one."""
    import torch
    from torch.utils._pytree import tree_leaves

    pairs = list(zip(tree_leaves(unfused), tree_leaves(fused), strict=True))

    def error(a: Any, b: Any) -> float:
        a, b = a.float(), b.float()
        return float(((a - b).abs() / (b.abs() + b.square().mean().sqrt())).max())

    eps = max(torch.finfo(b.dtype).eps for _, b in pairs)
    return difference((error(a, b) for a, b in pairs), eps)


def methods() -> worker.Methods:
    pairs = InductorPairs()
    return {"names": pairs.names, "environment": pairs.environment, "run": pairs.run}


if __name__ == "__main__":
    sys.exit(worker.serve(methods))
