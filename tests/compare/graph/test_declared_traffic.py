"""The bytes that graphs declare are those that cross the memory bus, as the GPU counts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from compare import traffic
from compare.blocks import BLOCKS
from compare.clock import DeviceRecord
from compare.graph.join import assign
from compare.spec import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(traffic.ncu_missing() is not None, reason=str(traffic.ncu_missing())),
]

L2_BYTES = 60 << 20  # of an H200; what a kernel wrote last may still lie there
# Each array is at least 16 times the L2, so that a cache can hide little.
SIZES = {
    "vector_add": {"elements": 544 << 20},
    "gelu": {"rows": 38_912, "columns": 14_336},
    "swiglu": {"rows": 38_912, "columns": 14_336},
    "geglu": {"rows": 38_912, "columns": 14_336},
    "bias_gelu": {"rows": 34 << 10, "columns": 16384},
    "softmax": {"rows": 544 << 10, "columns": 1024},
    "rmsnorm": {"rows": 136 << 10, "columns": 4096},
}
IMPLEMENTATIONS = {"xla": ("xla",), "torch": ("inductor", "triton", "cuda")}
# What is declared and what is moved differ for a known cause: (implementation, kernel's name, buffer side) -> cause.
EXCEPTIONS: dict[tuple[str, str, str], str] = {}


def measured(framework: str) -> Iterator[tuple[str, str, int, str, int, int]]:
    """(implementation, kernel, launches, side, declared, counted) of every kernel that moves 16 L2s or more."""
    work = []
    for block in map(BLOCKS.__getitem__, SIZES):
        for direction in block.directions:
            case = Case(block.name, "large", SIZES[block.name], "bfloat16", direction)
            names = {i.name for i in block.implementations}
            work += [(case, block.implementation(n)) for n in IMPLEMENTATIONS[framework] if n in names]
    for number, found in traffic.measure(work):
        case, implementation = work[number]
        assert isinstance(found, traffic.Profiled), (case.id, implementation.name, found.reason)
        assert found.graph and found.graph.kernels
        ran = {
            part: [DeviceRecord(launch.name, i, i + 1) for i, launch in enumerate(launches)]
            for part, launches in found.launches.items()
        }
        joined, leftover = assign(found.graph, ran)
        assert not leftover, (case.id, implementation.name, [record.name for record in leftover])
        for index, records in joined.items():
            kernel = found.graph.kernels[index]
            launches = [found.launches[kernel.part][int(record.start)] for record in records]
            name = f"{case.id}/{kernel.name}"
            sides = (
                ("read", kernel.bytes_read, sum(launch.dram_read for launch in launches)),
                ("written", kernel.bytes_written, sum(launch.dram_written for launch in launches)),
            )
            for side, declared, counted in sides:
                assert declared is not None, (implementation.name, name)
                yield implementation.name, name, len(records), side, declared, counted


@pytest.mark.parametrize("framework", IMPLEMENTATIONS)
def test_counted_bytes_are_the_declared_ones(framework: str) -> None:
    wrong, seen = [], 0
    for implementation, kernel, launches, side, declared, counted in measured(framework):
        print(f"{implementation:9} {kernel:90} {launches} {side:8} {declared:>14,} {counted:>14,}")
        slack = 0.05 * declared + (L2_BYTES if side == "written" or declared < 16 * L2_BYTES else 0)
        seen += 1
        if abs(counted - declared) > slack and (implementation, kernel, side) not in EXCEPTIONS:
            wrong.append((implementation, kernel, side, declared, counted))
    assert seen and not wrong


def test_the_cases_are_as_large_as_they_must_be() -> None:
    for name, sizes in SIZES.items():
        case = replace(next(iter(BLOCKS[name].cases("full"))), sizes=sizes, dtype="bfloat16")
        assert BLOCKS[name].inputs[0].elements(case.sizes) * 2 >= 16 * L2_BYTES
