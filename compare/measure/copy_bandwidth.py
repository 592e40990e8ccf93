"""The copy kernel that `doctor --clock` times in every framework's process.

Its PTX and its memory come from the CUDA driver, so that two workers run identical code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from . import ptx_launch
from .clock import Clock

BYTES = 128 << 20  # of the base copy: 60 us on an H200
_BLOCKS, _THREADS, _VECTOR = 1056, 512, 16
# A grid-stride loop over 16-byte vectors: p0 source, p1 destination, p2 how many.
_COPY = """
    .reg .pred %more;
    .reg .u32 %t, %b, %nt, %nb, %first, %step, %v0, %v1, %v2, %v3;
    .reg .u64 %i, %s, %n, %src, %dst, %offset, %from, %to;
    ld.param.u64 %src, [p0];
    ld.param.u64 %dst, [p1];
    ld.param.u64 %n, [p2];
    mov.u32 %t, %tid.x;
    mov.u32 %b, %ctaid.x;
    mov.u32 %nt, %ntid.x;
    mov.u32 %nb, %nctaid.x;
    mad.lo.u32 %first, %b, %nt, %t;
    mul.lo.u32 %step, %nb, %nt;
    cvt.u64.u32 %i, %first;
    cvt.u64.u32 %s, %step;
AGAIN:
    setp.lt.u64 %more, %i, %n;
    @!%more bra DONE;
    shl.b64 %offset, %i, 4;
    add.u64 %from, %src, %offset;
    add.u64 %to, %dst, %offset;
    ld.global.v4.u32 {%v0, %v1, %v2, %v3}, [%from];
    st.global.v4.u32 [%to], {%v0, %v1, %v2, %v3};
    add.u64 %i, %i, %s;
    bra AGAIN;
DONE:
    ret;
"""


def measure(
    clock: Clock, synchronize: Callable[..., None], flush_l2: Callable[[], object], slower: float, samples: int
) -> list[float]:
    """Return the device seconds of each of `samples` copies of `1 + slower` times BYTES, from a cold L2."""
    source, destination = _buffers()
    vectors = int(BYTES * (1 + slower)) // _VECTOR

    def copy() -> None:
        ptx_launch.launch("xlafuse_stream", _COPY, (source, destination, vectors), blocks=_BLOCKS, threads=_THREADS)

    copy()
    clock.start()
    for _ in range(samples):
        flush_l2()
        clock.time(copy, synchronize)
    return [sample.device_time for sample in clock.collect()]


@cache
def _buffers() -> tuple[int, int]:
    """Return the addresses of source and destination, allocated once a process."""
    return ptx_launch.allocate(2 * BYTES), ptx_launch.allocate(2 * BYTES)
