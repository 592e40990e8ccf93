"""Do the workers' clocks agree? Each times the same kernel, which waits for a millisecond of the GPU's own timer.

The wait is not work, so that it takes as long at any clock rate: what differs between two workers is how they time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from . import ptx_launch

if TYPE_CHECKING:
    from .clock import Clock

AGREEMENT = 0.01  # relative; of more, nothing of one worker is held against another's
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
    """Median seconds of the waiting kernel by this worker's clock."""
    wait = partial(ptx_launch.launch, "xlafuse_calibration", _WAIT)
    wait()
    clock.start()
    for _ in range(_REPEATS):
        clock.time(wait, synchronize)
    return statistics.median(sample.device_time for sample in clock.collect())


def disagreement(clocks: Mapping[str, float]) -> float:
    """The largest relative difference between two workers' clocks; 0 for one."""
    return max(clocks.values()) / min(clocks.values()) - 1 if clocks else 0.0
