"""Measure the host time of a hand-written Triton call for each block, at small shapes where host time dominates.

    python tools/benchmarks/host_cost.py [BLOCK ...] [--profile]

On an NVIDIA GPU the calls run one after the other, with one wait at the end. Without a GPU, kernels are compiled for an
H200 and not launched (tested with triton 3.6 and 3.7). A call is then Python, PyTorch and Triton up to the driver, on
CPU tensors. Its results are wrong, and PyTorch's own operations count with their CPU time, in the last column, too.
The table shows the best of fifty averages over 10 ms. `lm_step` has no small shape and is left out. `--profile` prints
where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compare.numerics.reference import store_inputs
from compare.spec.block import Block
from compare.spec.blocks import BLOCKS
from compare.spec.case import Case
from compare.workers.pytorch.worker import TorchBackend

SECONDS, REPEATS = 0.01, 50  # many short ones, because other processes slow some of them
SMALL = 64 << 20  # bytes of inputs


class Launches:
    """Counts launches, and skips them if there is no GPU."""

    def __init__(self) -> None:
        from triton.compiler.compiler import CompiledKernel

        self.count = 0
        if not torch.cuda.is_available():
            _compile_for_an_h200()
            CompiledKernel._init_handles = lambda kernel: None
            CompiledKernel.function = None
            CompiledKernel.run = property(lambda kernel: self._launch)
            return
        launch = CompiledKernel.run.fget

        def counted(kernel: CompiledKernel) -> Any:
            self.count += 1
            return launch(kernel)

        CompiledKernel.run = property(counted)

    def _launch(self, *arguments: Any) -> None:
        self.count += 1


def _compile_for_an_h200() -> None:
    """Make Triton's driver name an H200, and hand-written launchers accept CPU tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from triton_side.kernels.shared import launch

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    driver.set_active(Driver())
    launch.INTERPRETED = True
    launch.INTERPRETED_MULTIPROCESSORS = 132


def smallest(block: Block) -> list[Case]:
    """Return the forward and train cases of the smallest check shape above those that a CPU checks.

    There are none if its inputs take more than SMALL bytes.
    """

    def input_bytes(case: Case) -> int:
        return sum(tensor.bytes(case) for tensor in block.inputs)

    tiny = block.cpu_check_cases()
    cases = [case for case in block.cases("check") if case.direction != "joint" and case not in tiny]
    if not cases:
        return []
    smallest_case = min(cases, key=input_bytes)
    if input_bytes(smallest_case) > SMALL:
        return []
    return [case for case in cases if case.name == smallest_case.name]


def call_of(case: Case, backend: TorchBackend, folder: Path) -> Callable[[], Any]:
    """Return the hand-written implementation's forward pass, or for `train` forward and backward."""
    block = BLOCKS[case.block]
    store_inputs(case, 0, folder)
    inputs, cotangents = backend.inputs(folder, case), backend.cotangents(folder, case)
    apply = partial(block.implementation("triton").load(), **block.attributes_of(case))
    trained = [tensor for tensor in inputs.values() if tensor.requires_grad]

    def step() -> Any:
        outputs = apply(inputs)
        return torch.autograd.grad([outputs[name] for name in cotangents], trained, list(cotangents.values()))

    return step if cotangents else partial(apply, inputs)


def seconds(call: Callable[[], Any], count: int) -> float:
    """Return the seconds per call of `count` consecutive calls."""
    started = time.perf_counter()
    for _ in range(count):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", nargs="*", metavar="BLOCK", help=f"of {', '.join(BLOCKS)}; all if none is named")
    parser.add_argument("--profile", action="store_true", help="where the time goes, too")
    options = parser.parse_args()
    if unknown := [name for name in options.blocks if name not in BLOCKS]:
        parser.error(f"no block {unknown[0]!r}: choose from {', '.join(BLOCKS)}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set, under which kernels are not launched: unset it")
    launches, backend = Launches(), TorchBackend()  # in this order: importing kernels fixes INTERPRETED
    print(f"{'case':50}{'launches':>8}{'us a call':>12}{'us a launch':>14}")
    for name in options.blocks or BLOCKS:
        cases = smallest(BLOCKS[name])
        if not cases:
            print(f"{name:50}no small shape")
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                _report(case.id, call_of(case, backend, Path(folder) / "0"), launches, options.profile)


def _report(case: str, call: Callable[[], Any], launches: Launches, profiled: bool) -> None:
    call()  # compiles
    launches.count = 0
    count = max(3, int(SECONDS / seconds(call, 1)))
    each = launches.count
    took = min(seconds(call, count) for _ in range(REPEATS)) * 1e6
    print(f"{case:50}{each:>8}{took:>12.1f}{took / max(1, each):>14.1f}", flush=True)
    if profiled:
        with cProfile.Profile() as profile:
            seconds(call, count)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
