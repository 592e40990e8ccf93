"""Which kernels exchange data, and how long they run together with others."""

from __future__ import annotations

import pytest

from xlafuse.compare.base.exchange_kernels import moves_between_gpus
from xlafuse.compare.measure.clock import DeviceRecord
from xlafuse.compare.measure.overlap import Overlap, overlap, union


def record(name: str, start: float, end: float) -> DeviceRecord:
    return DeviceRecord(name, start, end)


@pytest.mark.parametrize(
    ("name", "exchanges"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", True),
        ("[memcpy peer]", True), ("[memcpy]", False),
        ("void stream_executor::gpu::RaggedAllToAllKernel<long>", True),
        ("gemm_fusion_dot_3", False), ("nvjet_hsh_256x128", False), ("input_reduce_fusion", False),
        ("triton_poi_fused_all_gather_into_tensor_mm_0", False),
    ],
)
def test_kernels_that_exchange_data(name: str, exchanges: bool) -> None:
    assert moves_between_gpus(name) == exchanges


def test_overlap_is_the_time_in_which_both_kinds_run() -> None:
    records = [
        record("ncclA", 0, 4), record("ncclB", 3, 6), record("gemm", 1, 2), record("gemm", 5, 9), record("k", 5, 7),
    ]
    assert overlap(records) == Overlap(communication=6, compute=5, both=2)
    assert overlap(records[2:]) == Overlap(0, 5, 0)
    assert overlap([]) == Overlap(0, 0, 0)


def test_a_union_covers_the_same_time() -> None:
    assert union([(4, 5), (0, 2), (1, 3), (3, 3.5)]) == [(0, 3.5), (4, 5)]
