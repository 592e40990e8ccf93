"""Measure the host time of a hand-written Triton call for each block, at small shapes where host time dominates.

    python tools/benchmarks/host_cost.py [BLOCK ...] [--repeats N] [--profile]

On an NVIDIA GPU the calls run one after the other, with one wait at the end. Without a GPU, kernels are compiled for an
H200 and not launched (tested with triton 3.6 and 3.7). A call is then Python, PyTorch and Triton up to the driver, on
CPU tensors. Its results are wrong, and PyTorch's own operations count with their CPU time.

A row has the number of Triton kernels that a call launches, the time of the call, and the time of one of its launches
alone. The last two columns are the same times if Triton makes every launch in its own way, without
triton_side/calls/direct_launch.py. Each time is the best of N averages over 10 ms. `--profile` prints where the time of
a call goes.
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

from xlafuse.compare.numerics.reference import store_inputs
from xlafuse.compare.spec.block import Block
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.workers.pytorch.worker import TorchBackend

SECONDS = 0.01  # of an average; many short ones, because other processes slow some of them
SMALL = 64 << 20  # bytes of inputs


def _skip_launches() -> None:
    """Let Triton compile kernels without a GPU, and launch none."""
    from triton.compiler.compiler import CompiledKernel

    _compile_for_an_h200()
    CompiledKernel._init_handles = lambda kernel: None
    CompiledKernel.function = None
    CompiledKernel.run = property(lambda kernel: lambda *arguments: None)


def _compile_for_an_h200() -> None:
    """Make Triton's driver name an H200, and hand-written launchers accept CPU tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from xlafuse.triton_side.calls import direct_launch
    from xlafuse.triton_side.kernels.shared import launch

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    driver.set_active(Driver())
    direct_launch.current_device = lambda: 0
    direct_launch.is_on_gpu = lambda tensor: True
    launch.INTERPRETED = True
    launch.INTERPRETED_MULTIPROCESSORS = 132


def smallest(block: Block) -> list[Case]:
    """Return the forward and train cases of the smallest check shape above those that a CPU checks.

    A block without such a shape has its largest check shape, in bfloat16. There are none if its inputs take more than
    SMALL bytes.
    """

    def input_bytes(case: Case) -> int:
        return sum(tensor.bytes(case) for tensor in block.inputs)

    tiny, cases = block.cpu_check_cases(), [case for case in block.cases("check") if case.direction != "joint"]
    larger = [case for case in cases if case not in tiny]
    if not larger:
        larger = [max((case for case in cases if case.dtype == "bfloat16"), key=input_bytes)]
    chosen = min(larger, key=input_bytes)
    if input_bytes(chosen) > SMALL:
        return []
    return [case for case in cases if (case.name, case.dtype) == (chosen.name, chosen.dtype)]


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


def triton_launch(kernel: Any, grid: Any) -> Callable[..., Any]:
    from triton.runtime.jit import JITFunction

    return JITFunction.__getitem__(kernel, grid)


def seconds(call: Callable[[], Any], count: int) -> float:
    """Return the seconds per call of `count` consecutive calls."""
    started = time.perf_counter()
    for _ in range(count):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def best(call: Callable[[], Any], repeats: int) -> float:
    """Return the microseconds of a call: the best of `repeats` averages."""
    count = max(3, int(SECONDS / seconds(call, 1)))
    return min(seconds(call, count) for _ in range(repeats)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", nargs="*", metavar="BLOCK", help=f"of {', '.join(BLOCKS)}; all if none is named")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="averages, of which the best counts")
    parser.add_argument("--profile", action="store_true", help="where the time goes, too")
    options = parser.parse_args()
    if unknown := [name for name in options.blocks if name not in BLOCKS]:
        parser.error(f"no block {unknown[0]!r}: choose from {', '.join(BLOCKS)}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set, under which kernels are not launched: unset it")
    if not torch.cuda.is_available():
        _skip_launches()  # before kernels are imported, which fixes INTERPRETED
    backend = TorchBackend()
    print(f"{'':82}{'us, by Triton':>20}")
    print(f"{'case':50}{'launches':>8}{'us a call':>11}{'us a launch':>13}{'a call':>10}{'a launch':>10}")
    for name in options.blocks or BLOCKS:
        cases = smallest(BLOCKS[name])
        if not cases:
            print(f"{name:50}no small shape")
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                _report(case.id, call_of(case, backend, Path(folder) / "0"), options.repeats, options.profile)


def _report(case: str, call: Callable[[], Any], repeats: int, profiled: bool) -> None:
    from xlafuse.triton_side.calls import replay

    call()  # compiles
    launches = replay.launches_of(call)

    def launch_all() -> None:
        for launch in launches:
            launch()

    def times() -> tuple[float, float]:
        return best(call, repeats), best(launch_all, repeats) / max(1, len(launches))

    took, launching = times()
    with replay.launched_by(triton_launch):
        by_triton = times()
    numbers = f"{took:>11.1f}{launching:>13.1f}{by_triton[0]:>10.1f}{by_triton[1]:>10.1f}"
    print(f"{case:50}{len(launches):>8}{numbers}", flush=True)
    if profiled:
        with cProfile.Profile() as profile:
            seconds(call, max(3, int(SECONDS * 1e6 / took)))
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
