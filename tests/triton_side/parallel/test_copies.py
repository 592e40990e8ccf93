"""Copies by address, and waits of a stream."""

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
