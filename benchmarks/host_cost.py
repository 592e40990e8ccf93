"""What a call of hand-written Triton costs the host, block by block: small shapes, where it is what a call takes.

    python benchmarks/host_cost.py [BLOCK ...] [--profile]

On an NVIDIA GPU calls are made one after the other, and waited for at the end. Without one, kernels are compiled for an
H200 and their launches left out (tested with triton 3.6 and 3.7), so a call is Python, PyTorch and Triton up to the
driver, on tensors of the CPU: what it computes is not right, and operations of PyTorch's own count as what they take
there; `lm_step`, which has no small shape, is left out. Of each call the fastest of fifty repeats, as it is known;
`--profile` prints where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare.blocks import BLOCKS  # noqa: E402
from compare.spec import Block, Case  # noqa: E402
from compare.workers.pytorch import TorchSide, _set_precision  # noqa: E402
from compare.workers.reference import store_inputs  # noqa: E402

SECONDS, REPEATS = 0.01, 50  # short and many: what else runs on the machine slows some of them
SMALL = 64 << 20  # bytes of inputs


class Launches:
    """Counts launches, and where there is no GPU makes none of them."""

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
    """Triton's driver names the target, and hand-written launchers take tensors of the CPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from triton_side.kernels import _launch

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    driver.set_active(Driver())
    _launch.INTERPRETED = True
    _launch.INTERPRETED_MULTIPROCESSORS = 132


def smallest(block: Block) -> list[Case]:
    """Every direction of the block's smallest shape of more than one row, where it is small."""

    def input_bytes(case: Case) -> int:
        return sum(tensor.bytes(case) for tensor in block.inputs)

    cases = [case for case in block.cases("quick") if not case.name.startswith("one-")]
    least = min(cases, key=input_bytes)
    return [case for case in cases if case.name == least.name and input_bytes(least) <= SMALL]


def calls(side: TorchSide, case: Case, folder: Path) -> dict[str, Callable[[], Any]]:
    """A call of each part of the hand-written implementation."""
    block = BLOCKS[case.block]
    store_inputs(case, 0, folder)
    inputs, cotangents = side.inputs(folder, case), side.cotangents(folder, case)
    _set_precision(case.precision)
    program = side._program(case, block.implementation("triton").load(), block.attributes_of(case))
    found: dict[str, Callable[[], Any]] = {case.direction: lambda: program.forward(inputs)}
    if program.backward is None:
        return found
    backward = program.backward
    return found | {"train, both parts": lambda: backward(program.forward(inputs)[1], cotangents)}


def seconds(call: Callable[[], Any], count: int) -> float:
    """Of one call, of so many in a row."""
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
    launches, side = Launches(), TorchSide()
    print(f"{'case':38}{'part':20}{'launches':>8}{'us a call':>12}{'us a launch':>14}")
    for name in options.blocks or BLOCKS:
        for case in smallest(BLOCKS[name]):
            with tempfile.TemporaryDirectory() as folder:
                for part, call in calls(side, case, Path(folder) / "0").items():
                    _report(f"{name}/{case.name}", part, call, launches, options.profile)


def _report(case: str, part: str, call: Callable[[], Any], launches: Launches, profiled: bool) -> None:
    call()  # compiles
    launches.count = 0
    count = max(3, int(SECONDS / seconds(call, 1)))
    each = launches.count
    took = min(seconds(call, count) for _ in range(REPEATS)) * 1e6
    print(f"{case:38}{part:20}{each:>8}{took:>12.1f}{took / max(1, each):>14.1f}", flush=True)
    if profiled:
        with cProfile.Profile() as profile:
            seconds(call, count)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
