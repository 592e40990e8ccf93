"""Calibration of the workers' clocks: each times the same kernel, which waits for a millisecond of the GPU's own timer.

The wait takes as long at any clock rate, so a difference between two workers comes from their clocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from . import ptx_launch

if TYPE_CHECKING:
    from .clock import Clock

AGREEMENT = 0.01  # relative; beyond it no ratio is formed between two workers
_REPEATS = 20
_WAIT = """
    .reg .pred %waiting;
    .reg .u64 %begin, %now, %passed;
    mov.u64 %begin, %globaltimer;
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %waiting, %passed, 1000000;
    @%waiting bra AGAIN;
    ret;
"""


def measure(clock: Clock, synchronize: Callable[..., None]) -> float:
    """Return the median seconds of the waiting kernel by this worker's clock."""
    wait = partial(ptx_launch.launch, "xlafuse_calibration", _WAIT)
    wait()
    clock.start()
    for _ in range(_REPEATS):
        clock.time(wait, synchronize)
    return statistics.median(sample.device_time for sample in clock.collect())


def disagreement(clocks: Mapping[str, float]) -> float:
    """Return the largest relative difference between two workers' clocks; 0 for one worker."""
    return max(clocks.values()) / min(clocks.values()) - 1 if clocks else 0.0
