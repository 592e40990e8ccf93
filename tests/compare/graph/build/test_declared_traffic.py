"""Declared bytes equal the bytes that ncu measures on the memory bus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from xlafuse.compare.graph.join.kernel_records import assign
from xlafuse.compare.measure.clock import DeviceRecord
from xlafuse.compare.run import ncu
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.spec.implementation import Implementation

L2_BYTES = 60 << 20  # of an H200; what a kernel wrote last may still lie there
LARGE = 8 * L2_BYTES  # each array's bytes at least, so that a cache can hide little
SIZES = {
    "vector_add": {"elements": 272 << 20},
    "gelu": {"rows": 19_456, "columns": 14_336},
    "swiglu": {"rows": 19_456, "columns": 14_336},
    "geglu": {"rows": 19_456, "columns": 14_336},
    "bias_gelu": {"rows": 17 << 10, "columns": 16384},
    "softmax": {"rows": 272 << 10, "columns": 1024},
    "rmsnorm": {"rows": 68 << 10, "columns": 4096},
    "layernorm": {"rows": 68 << 10, "columns": 4096},
}
# Each hand-written kernel declares its bytes, so all blocks are here. One reader gets the bytes of compiled kernels, so
# a block of each kind is enough (elementwise, sums of columns, of rows, and of both).
OF_COMPILERS = {"swiglu", "bias_gelu", "softmax", "layernorm"}
# Two blocks for each test, because each test starts workers.
TOGETHER = [
    ("xla", "swiglu", "bias_gelu"), ("xla", "softmax", "layernorm"), ("torch", "vector_add", "gelu"),
    ("torch", "swiglu", "geglu"), ("torch", "bias_gelu", "softmax"), ("torch", "rmsnorm", "layernorm"),
]
# Known differences of declared and measured bytes: (implementation, kernel's name, side) -> cause.
EXCEPTIONS: dict[tuple[str, str, str], str] = {}


def of_block(framework: str, name: str) -> Iterator[tuple[Case, Implementation]]:
    block = BLOCKS[name]
    compiler = "xla" if framework == "xla" else "inductor"
    counted = {compiler} if name in OF_COMPILERS else set()
    if framework == "torch":
        counted |= {"triton", "cuda"}
    for direction in block.directions:
        case = Case(name, "large", SIZES[name], "bfloat16", direction)
        yield from ((case, i) for i in block.implementations if i.name in counted)


def measured(framework: str, blocks: Sequence[str]) -> Iterator[tuple[str, str, int, str, int, int]]:
    """Yield (implementation, kernel, launches, side, declared, measured) of every kernel."""
    work = [each for block in blocks for each in of_block(framework, block)]
    for number, found in ncu.measure(work):
        case, implementation = work[number]
        assert isinstance(found, ncu.Profiled), (case.id, implementation.name, found.reason)
        assert found.graph and found.graph.kernels
        ran = {
            part: [DeviceRecord(launch.name, i, i + 1) for i, launch in enumerate(launches)]
            for part, launches in found.launches.items()
        }
        joined, leftover = assign(found.graph, ran)
        assert not leftover, (case.id, implementation.name, [record.name for record in leftover])
        for index, records in joined.items():
            kernel = found.graph.kernels[index]
            launches = [found.launches[kernel.phase][int(record.start)] for record in records]
            name = f"{case.id}/{kernel.name}"
            sides = (
                ("read", kernel.bytes_read, sum(launch.dram_read for launch in launches)),
                ("written", kernel.bytes_written, sum(launch.dram_written for launch in launches)),
            )
            for side, declared, counted in sides:
                assert declared is not None, (implementation.name, name)
                yield implementation.name, name, len(records), side, declared, counted


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(ncu.ncu_missing() is not None, reason=str(ncu.ncu_missing()))
@pytest.mark.parametrize("together", TOGETHER, ids="-".join)
def test_measured_bytes_equal_declared_bytes(together: tuple[str, ...]) -> None:
    """Measured bytes lie within 5% of the declared ones.

    ncu also counts the traffic of other processes on the GPU: vector_add's 0.57 GB were once 0.75 GB, next to thirteen
    other test processes. So excessive counts are measured again, and the smaller count stands.
    """
    framework, *blocks = together
    least: dict[tuple[str, str, str], int] = {}
    for _ in range(2):
        wrong, seen = [], set()
        for implementation, kernel, launches, side, declared, counted in measured(framework, blocks):
            print(f"{implementation:9} {kernel:90} {launches} {side:8} {declared:>14,} {counted:>14,}")
            slack = 0.05 * declared + (L2_BYTES if side == "written" or declared < LARGE else 0)
            seen.add((kernel.partition("/")[0], implementation))
            key = implementation, kernel, side
            counted = least[key] = min(counted, least.get(key, counted))
            if abs(counted - declared) > slack and key not in EXCEPTIONS:
                wrong.append((*key, declared, counted))
        if not any(counted > declared for *_, declared, counted in wrong):
            break
    assert seen == {(case.block, i.name) for block in blocks for case, i in of_block(framework, block)}
    assert not wrong


def test_the_cases_exceed_l2() -> None:
    for name, sizes in SIZES.items():
        case = replace(next(iter(BLOCKS[name].cases("full"))), sizes=sizes, dtype="bfloat16")
        assert BLOCKS[name].inputs[0].elements(case.sizes) * 2 >= LARGE


def test_every_hand_written_kernel_and_compiler_is_measured() -> None:
    names = [(framework, name) for framework, *blocks in TOGETHER for name in blocks]
    counted = {(i.name, name) for framework, name in names for _, i in of_block(framework, name)}
    written = {(i.name, n) for n in SIZES for i in BLOCKS[n].implementations if i.name in ("triton", "cuda")}
    assert counted == written | {(compiler, name) for compiler in ("xla", "inductor") for name in OF_COMPILERS}
    assert len(names) == len(set(names)) and {name for _, name in names} == set(SIZES)
