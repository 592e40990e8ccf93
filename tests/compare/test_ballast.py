"""Peak memory by ballast, on a model of XLA's allocator: best fit, blocks given away whole, regions that double."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compare import PROJECT
from compare.workers import ballast
from compare.workers.ballast import LEAST_PIECE, ROUNDING, held, peak, piece_sizes, pieces, rounded, sizes_to_come, worn

MIB = 1 << 20


class Block:
    """Gives its memory back when nobody refers to it any more, as a jax.Array does."""

    def __init__(self, allocator: Allocator, start: int, size: int) -> None:
        self._allocator, self.start, self.size = allocator, start, size

    def __del__(self) -> None:
        self._allocator.give_back(self.start, self.size)


class Allocator:
    """tsl::BFCAllocator, as far as its statistics go."""

    def __init__(self, limit: int = 1 << 36) -> None:
        self.limit, self.region = limit, 2 * MIB
        self.free_chunks: dict[int, int] = {}  # start -> size
        self.starts: set[int] = set()  # of regions, which never become one
        self.in_use = self.peak = self.pool = 0
        self.free_bytes = limit

    def statistics(self) -> dict[str, int] | None:
        return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak, "pool_bytes": self.pool}

    def free(self) -> int:
        return self.free_bytes - self.pool

    def hold(self, size: int) -> Block:
        size = rounded(size)
        fitting = [(have, start) for start, have in self.free_chunks.items() if have >= size]
        if not fitting:
            self._grow(size)
            return self.hold(size)
        have, start = min(fitting)
        del self.free_chunks[start]
        if have >= 2 * size or have - size >= 128 * MIB:
            self.free_chunks[start + size] = have - size
            have = size
        self.in_use += have
        self.peak = max(self.peak, self.in_use)
        return Block(self, start, have)

    def _grow(self, size: int) -> None:
        increased = False
        while self.region < size:
            self.region, increased = 2 * self.region, True
        if self.pool + size > self.limit:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        region = min(self.region, self.limit - self.pool)
        self.free_chunks[self.pool] = region
        self.starts.add(self.pool)
        self.pool += region
        if not increased:
            self.region *= 2

    def give_back(self, start: int, size: int) -> None:
        self.in_use -= size
        after = self.free_chunks.pop(start + size, None) if start + size not in self.starts else None
        size += after or 0
        for before, have in self.free_chunks.items():
            if before + have == start and start not in self.starts:
                self.free_chunks[before] = have + size
                return
        self.free_chunks[start] = size


def call_of(allocator: Allocator, outputs: list[int], temporary: int) -> Callable[[], None]:
    def call() -> None:
        kept = [allocator.hold(size) for size in outputs]
        kept.append(allocator.hold(temporary))
        del kept

    return call


def test_the_peak_grows_by_what_the_call_needs() -> None:
    allocator = Allocator()
    inputs = allocator.hold(64 * MIB)
    earlier = allocator.hold(500 * MIB)  # a peak that no call of ours reaches
    del earlier
    found = peak(allocator, call_of(allocator, [32 * MIB, 1000], 8 * MIB), [32 * MIB, 1000, 8 * MIB])
    assert found.bytes == 40 * MIB + 1024 and found.planned == 40 * MIB + 1000 and found.reason is None
    assert allocator.in_use == inputs.size  # the ballast is given back


def test_more_than_the_plan_is_seen() -> None:
    allocator = Allocator()
    found = peak(allocator, call_of(allocator, [4 * MIB], 64 * MIB), [4 * MIB])
    assert found.bytes == 68 * MIB and found.planned == 4 * MIB


def test_a_block_given_away_whole_does_not_count_twice() -> None:
    allocator = Allocator()
    walls = [allocator.hold(5 * MIB) for _ in range(3)]
    block = allocator.hold(8 * MIB)
    assert block.size == 11 * MIB  # what the walls left of a region of 16
    del block
    assert peak(allocator, call_of(allocator, [8 * MIB], 0), [8 * MIB]).bytes == 8 * MIB
    del walls


sizes = st.integers(1, 64 * MIB)


@settings(max_examples=100)
@given(st.lists(st.tuples(sizes, st.booleans()), max_size=12), st.lists(sizes, min_size=1, max_size=4))
def test_never_less_than_the_call_needs(history: list[tuple[int, bool]], outputs: list[int]) -> None:
    allocator = Allocator()
    kept, dropped = [], []
    for size, keep in history:
        (kept if keep else dropped).append(allocator.hold(size))
    dropped.clear()
    found = peak(allocator, call_of(allocator, outputs, ROUNDING), [*outputs, ROUNDING])
    needed = sum(map(rounded, outputs)) + ROUNDING
    assert found.bytes is not None and needed <= found.bytes < 2 * needed
    assert allocator.in_use == sum(block.size for block in kept)


@given(st.integers(0, 1 << 40))
def test_ballast_comes_in_few_sizes(size: int) -> None:
    found = pieces(size)
    assert size <= sum(found) <= max(size * 9 / 8, size + LEAST_PIECE) and len(found) <= 5
    assert all(piece.bit_count() == 1 and piece >= LEAST_PIECE for piece in found)
    assert {*found} <= {*piece_sizes(size)}


def test_sizes_of_a_device() -> None:
    assert piece_sizes(3 * MIB) == [MIB, 2 * MIB] and piece_sizes(1000) == [MIB] and piece_sizes(0) == []
    assert piece_sizes(75 << 30)[-1] == 1 << 36


def test_sizes_of_what_comes_next() -> None:
    allocator = Allocator()
    assert sizes_to_come(allocator) == []
    allocator.hold(4 * MIB)  # and given back: the peak stays
    assert sizes_to_come(allocator) == piece_sizes(8 * MIB) == [MIB, 2 * MIB, 4 * MIB, 8 * MIB]


AHEAD = """
from compare.workers import xla
from compare.workers.ballast import pieces

xla._Memory.statistics = lambda self: {"peak_bytes_in_use": 4 << 20}
side = xla.XlaSide()
side.get_ready()
ready = xla._filler.cache_info().misses
memory = xla._Memory(side._device)
blocks = [memory.hold(piece) for piece in (*pieces(5 << 20), *pieces(333_333))]
side.get_ready()
print(ready, xla._filler.cache_info().misses, all(bool((block == 0xFF).all()) for block in blocks))
"""


def test_what_holds_ballast_is_compiled_ahead() -> None:
    """In an XLA worker's first check, beside other lanes, as compiling it took longer than a round on an H200."""
    pytest.importorskip("jax")
    done = subprocess.run([sys.executable, "-c", AHEAD], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "4", "True"]  # 1 to 8 MiB


def test_each_measurement_raises_the_peak_until_the_process_is_worn() -> None:
    allocator = Allocator()
    allocator.free_bytes = 4 << 30
    call = call_of(allocator, [100 * MIB], 0)
    count = 0
    while not worn(allocator):
        assert peak(allocator, call, [100 * MIB]).bytes == 100 * MIB
        count += 1
    assert count > 1 and allocator.peak > (4 << 30) // 8


def test_what_cannot_be_measured_has_a_reason_and_no_number() -> None:
    allocator = Allocator()
    earlier = allocator.hold(1000 * MIB)
    del earlier
    call = call_of(allocator, [900 * MIB], 0)
    allocator.free_bytes = allocator.pool + 1000 * MIB
    found = peak(allocator, call, [900 * MIB])
    assert found.bytes is None and found.planned == 900 * MIB
    assert found.reason and "2.0 GB of ballast and call could make XLA take 2.0 GB more" in found.reason
    assert found.reason.endswith("of which 1.0 GB is free and half of that may be used")

    full = Allocator(limit=64 * MIB)
    full.free_bytes = 1 << 40
    found = peak(full, call_of(full, [100 * MIB], 0), [1 * MIB])
    assert found.bytes is None and found.reason and "does not hold the call beside the ballast" in found.reason

    class Mute(Allocator):
        def statistics(self) -> dict[str, int] | None:
            return None

    found = peak(Mute(), lambda: None, [1])
    assert (found.bytes, found.reason) == (None, "JAX has no memory statistics of this device")


def test_a_call_that_the_allocator_does_not_see_has_no_number() -> None:
    found = peak(Allocator(), lambda: None, [1000])
    assert (found.bytes, found.planned, found.reason) == (None, 1000, "XLA's allocator counted nothing of the call")


def test_an_error_of_the_call_is_the_calls() -> None:
    def broken() -> None:
        raise RuntimeError("INTERNAL: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        peak(Allocator(), broken, [1])


def test_who_else_allocates_is_noticed() -> None:
    class Shared(Allocator):
        def hold(self, size: int) -> Block:
            block = super().hold(size)
            self.in_use -= 512  # somebody else gave memory back
            return block

    allocator = Shared()
    allocator.peak = 4096
    found = ballast.peak(allocator, lambda: None, [1])
    assert found.bytes is None and found.reason and "something else" in found.reason


def test_what_is_held_is_what_the_allocator_has_though_nothing_uses_it() -> None:
    memory = Allocator()
    assert held(memory) == 0
    block = memory.hold(100 * MIB)
    pool = memory.pool
    assert pool >= 100 * MIB
    del block
    assert memory.in_use == 0 and held(memory) == pool
