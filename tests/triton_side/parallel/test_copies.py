"""Copies by address, and waits of a stream."""

import ctypes
import time

import pytest

torch = pytest.importorskip("torch")

from xlafuse.triton_side.parallel import copies  # noqa: E402


def test_bytes_are_copied_between_addresses_of_the_cpu() -> None:
    source, target = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    copies.copy(None, target[2:].data_ptr(), source.data_ptr(), 3 * 8)
    assert target.tolist() == [0, 0, 0, 1, 2, 0, 0, 0]


@pytest.mark.gpu
def test_a_stream_copies_between_memories_and_waits_for_a_word() -> None:
    stream = torch.cuda.Stream()
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    source = torch.arange(1 << 20, device="cuda")
    target, on_host = torch.zeros_like(source), torch.zeros(4, dtype=torch.int64, pin_memory=True)
    torch.cuda.synchronize()
    copies.wait_until_at_least(stream.cuda_stream, word.data_ptr(), 7)
    copies.copy(stream.cuda_stream, target.data_ptr(), source.data_ptr(), source.nbytes)
    copies.copy(stream.cuda_stream, on_host.data_ptr(), source[5:].data_ptr(), on_host.nbytes)
    copies.copy(stream.cuda_stream, target.data_ptr(), source.data_ptr(), 0)
    over = stream.record_event()
    assert not over.query() and on_host.tolist() == [0] * 4
    word.fill_(7)
    over.synchronize()
    assert torch.equal(target, source) and on_host.tolist() == [5, 6, 7, 8]


def test_a_wait_for_ones_is_a_memory_operation_of_the_driver() -> None:
    """cuda.h: a union of 48 bytes, with the address at 8, the value at 16 and the flags at 24."""
    operation = copies._MemoryOperation
    assert ctypes.sizeof(operation) == 48
    assert [getattr(operation, name).offset for name in ("address", "value", "flags")] == [8, 16, 24]


@pytest.mark.gpu
def test_each_replay_of_a_graph_waits_for_a_new_one_while_its_kernels_run() -> None:
    words = torch.zeros(2, dtype=torch.int32, device="cuda")
    counter, copied = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    source = torch.full((1,), 5.0, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        side.wait_stream(torch.cuda.current_stream())
        copies.wait_for_ones(side.cuda_stream, [words.data_ptr(), words[1:].data_ptr()])
        copies.copy(side.cuda_stream, copied.data_ptr(), source.data_ptr(), 4)
        counter += 1
        torch.cuda.current_stream().wait_stream(side)
    others = torch.cuda.Stream()
    for replay in (1, 2, 3):
        copied.zero_()
        torch.cuda.synchronize()
        graph.replay()
        over = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(others):
            words[:1].fill_(1)
            others.synchronize()
            time.sleep(0.05)
            ran, arrived = counter.clone(), copied.clone()
            others.synchronize()
            assert not over.query() and ran.item() == replay and arrived.item() == 0
            words[1:].fill_(1)
        over.synchronize()
        assert copied.item() == 5 and words.tolist() == [0, 0]
