"""Peak memory of one call of an XLA program, by its allocator's own statistics.

XLA's allocator (tsl::BFCAllocator) never forgets its peak. So memory is held as ballast, enough for the bytes in use to
equal the peak; then the peak grows by exactly what the call needs. The allocator gives a free block away whole where it
is less than twice as large as what is asked for, so that a call can be given more than it needs. The blocks that it was
given are then held, too, and the call is repeated in others; the smallest growth stands.

Ballast may make the allocator take more of the GPU's memory, by regions that double and are never given back, while the
other worker needs memory, too: where it might take more than half of what is free, there is no measurement. As each one
raises the peak by what it found, a process is `worn` after many, and a run goes on with a fresh one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from compare.subject import Peak

ROUNDING = 256  # bytes; of every block
LEAST_PIECE = 1 << 20  # bytes of ballast; more than is missing is no worse, and there are fewer sizes to compile
TRIES = 5


class Memory(Protocol):
    """A device's memory, through XLA's allocator."""

    def statistics(self) -> Mapping[str, int] | None:
        """jax.Device.memory_stats()."""
        ...

    def free(self) -> int:
        """Bytes of the device that nobody has."""
        ...

    def hold(self, size: int) -> Any:
        """A block that lives as long as what is returned. Raises RuntimeError with RESOURCE_EXHAUSTED for none."""
        ...


def peak(memory: Memory, call: Callable[[], None], blocks: Sequence[int]) -> Peak:
    """Of `call`, which waits until the device is done. blocks: bytes of each block that the compiler plans for it."""
    planned = sum(blocks)
    smallest: int | None = None
    reason: str | None = None
    held: list[Any] = []
    try:
        for _ in range(TRIES):
            if reason := _refusal(memory, planned):
                break
            held += [memory.hold(size) for size in pieces(_missing(memory))]
            level = _peak_bytes(memory)
            if _missing(memory):
                reason = "XLA's allocator was used by something else meanwhile"
                break
            call()
            growth = _peak_bytes(memory) - level
            if planned and not growth:
                reason = "XLA's allocator counted nothing of the call"
                break
            smallest = growth if smallest is None else min(smallest, growth)
            if growth <= sum(map(rounded, blocks)):
                break
            held += [memory.hold(size) for size in blocks]
    except RuntimeError as problem:
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        reason = "the GPU's memory does not hold the call beside the ballast that measures it"
    return Peak(smallest, planned, None if smallest is not None else reason)


def worn(memory: Memory) -> bool:
    """Whether the peak has grown so far that ballast for it may soon be refused: to an eighth of what is free or taken
    (on an H200 a quick run's 40th measurement met a peak of 35 GB, and was)."""
    found = memory.statistics()
    if found is None:
        return False
    return found.get("peak_bytes_in_use", -1) > (memory.free() + held(memory)) // 8


def held(memory: Memory) -> int:
    """Bytes of the device that XLA's allocator has, whether it uses them or not; it gives none back."""
    found = memory.statistics() or {}
    return max(found.get("pool_bytes", 0), found.get("bytes_in_use", 0))


def rounded(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING


def sizes_to_come(memory: Memory) -> list[int]:
    """Of the pieces of the next ballast, and of those after it until the peak has doubled."""
    found = memory.statistics()
    return [] if found is None else piece_sizes(2 * found.get("peak_bytes_in_use", -1))


def piece_sizes(most: int) -> list[int]:
    """All that `pieces` of up to `most` bytes may have."""
    return [1 << bit for bit in range(LEAST_PIECE.bit_length() - 1, max(pieces(most), default=0).bit_length())]


def pieces(size: int) -> list[int]:
    """Powers of two that sum to `size`, or to an eighth more, or to one LEAST_PIECE more: XLA compiles the filling of
    each size anew."""
    unit = max(LEAST_PIECE, 1 << max(0, size.bit_length() - 4))
    count = -(-size // unit)
    return [unit << bit for bit in range(count.bit_length()) if count >> bit & 1]


def _refusal(memory: Memory, planned: int) -> str | None:
    """Why no ballast may be held, or None."""
    found = memory.statistics()
    if found is None or found.get("peak_bytes_in_use", -1) < found.get("bytes_in_use", 0):  # -1: not counted
        return "JAX has no memory statistics of this device"
    pool = held(memory)
    needed = found["peak_bytes_in_use"] - found["bytes_in_use"] + planned
    if needed <= (pool - found["bytes_in_use"]) // 2:
        return None  # the pool has it, in pieces as large as are asked for, unless it is in shreds
    grows = max(pool, needed)
    free = memory.free()
    if grows > free // 2:
        return (
            f"{needed / 1e9:.1f} GB of ballast and call could make XLA take {grows / 1e9:.1f} GB more of the GPU's "
            f"memory, of which {free / 1e9:.1f} GB is free and half of that may be used"
        )
    return None


def _missing(memory: Memory) -> int:
    found = memory.statistics() or {}
    return int(found["peak_bytes_in_use"] - found["bytes_in_use"])


def _peak_bytes(memory: Memory) -> int:
    return int((memory.statistics() or {})["peak_bytes_in_use"])
