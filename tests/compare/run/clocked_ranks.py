"""A rank's worker on the CPU with a simulated CUPTI clock: `clocked_ranks.py xla-ranks`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from xlafuse.compare.base.paths import PACKAGE
from xlafuse.compare.measure.clock import CallTrace, CuptiClock, DeviceRecord, Sample, TracedRecord, sample_of
from xlafuse.compare.workers import main


class Simulated(CuptiClock):
    """Each call takes a microsecond of exchange and two of compute, which begin together."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def start(self) -> None:
        self.samples = []

    def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
        synchronize()
        result = call()
        synchronize(result)
        self.samples.append(sample_of([DeviceRecord("nccl", 0, 1e-6), DeviceRecord("gemm", 0, 2e-6)]))
        return result

    def collect(self, *, going_on: bool = False) -> list[Sample]:
        return self.samples

    def trace(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> tuple[Any, CallTrace]:
        synchronize()
        result = call()
        synchronize(result)
        return result, CallTrace(1e-3, (), (TracedRecord("gemm", 0.0, 1e-3),), began=5)


def methods() -> main.Methods:
    role = sys.argv[1]
    ranks = import_module(main.PROGRAMS[role], PACKAGE)
    backend = ranks.XlaRankBackend if role == "xla-ranks" else ranks.TorchRankBackend
    backend.clock = lambda self: Simulated()
    backend.flush_l2 = property(lambda self: lambda: None, lambda self, flush: None)
    served: main.Methods = ranks.methods()
    return served


if __name__ == "__main__":
    sys.exit(main.serve(methods))
