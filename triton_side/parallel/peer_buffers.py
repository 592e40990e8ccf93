"""Memory that other ranks read and write, and exchanges through it that run while kernels compute.

    exchange = buffers.exchange("gather")
    exchange.send(peer, rows)
    exchange.expect({peer: [Incoming(...)]})
    exchange.start()
    rows, = exchange.receive(peer)

A kernel may also write the rows to send, into `outbox`. `complete` says that all rows to send are there; `expect` says
so, too, if `complete` has not. Kernels launched between `complete` and `receive` run while the rows move, and kernels
after `receive` see the peer's rows.

Copy engines move the rows on a stream of their own, so they take no multiprocessor from the kernels. With `put`, the
sender writes them into the receiver's memory; otherwise the receiver reads them from the sender's. A receiver computes
with the rows of one rank while those of the next arrive.

Each exchange of a rank has a number n, the same on all ranks. On its copying stream a rank

1. waits for the kernels before `complete`,
2. with `put`, writes its rows to each peer,
3. writes n into a word of each peer's memory, and waits until each peer has written n here,
4. without `put`, reads the rows of each peer; with `put`, copies those with `into` out of the region.

Each rank's memory has REGIONS regions, and exchange n uses region n mod REGIONS. A peer that has written n - 1 here has
read what exchange n - 2 offered, because both are on its copying stream. So this rank fills a region after it has
passed exchange n - REGIONS + 1. A peer writes into a region of this rank in exchange n after this rank's n - 1. So
with `put`, rows that lie in the region must be read by kernels launched before `complete` of exchange n + REGIONS - 1.

A CUDA graph repeats the same numbers in each replay, so its exchanges have memory of their own (`RepeatedExchanges`),
and step 3 has a word for each exchange and peer: a rank writes 1 into the peer's word, waits for 1 in its own, and sets
that to 0. Each replay ends with one exchange more, which moves nothing. A rank begins it after its last kernel, so
behind it all ranks have read all regions of this replay, and the next replay may begin with the first region. A peer
writes a word again one replay later, after the exchange that followed, and this rank has set the word to 0 before it
announced that exchange. So no 1 is lost.

On a CPU, files that all ranks map replace symmetric memory, and the same steps run one after the other.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xlafuse.triton_side.calls.stages import recording, stage
from xlafuse.triton_side.parallel import symmetric_memory
from xlafuse.triton_side.parallel.copies import copy, wait_for_ones, wait_until_at_least
from xlafuse.triton_side.parallel.ranks import Ranks

REGIONS = 4
REPEATED = 16  # exchanges of a CUDA graph at most, with the one that ends it
ALIGNMENT = 256  # bytes; TMA needs 16
WORD = 4  # bytes of a flag
SECONDS = 60.0  # that a rank on a CPU waits for another
NUMBERS = 1 << 16  # of exchanges, written to GPU memory at once


@torch.library.custom_op("xlafuse::exchange", mutates_args=("to",))
def recorded_copy(to: Tensor, of: Tensor) -> None:
    """Copy as an operation of PyTorch, which triton_side.calls.dispatch records as a kernel of kind "collective"."""
    to.copy_(of, non_blocking=True)


@dataclass(frozen=True)
class Incoming:
    """A tensor that a peer sends.

    at: its first byte in the peer's region, if the peer offers one tensor to all; None for the peer's place for us.
    into: contiguous memory of this rank for it, also of its host. It was allocated before `complete`, or by `allocate`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    at: int | None = None
    into: Tensor | None = None


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


class _SharedFiles:
    """Memory of ranks on one CPU: a mapped file each."""

    def __init__(self, size: int, ranks: Ranks) -> None:
        made = [tempfile.mkdtemp(prefix="peer_buffers-") if ranks.rank == 0 else None]
        dist.broadcast_object_list(made, src=0, group=ranks.group)
        folder = Path(str(made[0]))
        files = [folder / str(rank) for rank in range(ranks.count)]
        with files[ranks.rank].open("wb") as file:
            file.truncate(size)
        dist.barrier(group=ranks.group)
        self.of_rank = [torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8) for file in files]
        dist.barrier(group=ranks.group)
        if ranks.rank == 0:
            shutil.rmtree(folder)


class _SymmetricMemory:
    """Memory of ranks on GPUs of one host, each with access to the others'."""

    def __init__(self, size: int, ranks: Ranks) -> None:
        self.of_rank, self.handle = symmetric_memory.symmetric_buffer(size, ranks.group)
        self.of_rank[ranks.rank].zero_()
        torch.cuda.synchronize()
        dist.barrier(group=ranks.group)


class PeerBuffers:
    """The memory of all ranks for exchanges of at most `size` bytes for each peer.

    put: senders write; otherwise receivers read. overlap: copies run at the same time as kernels; otherwise between
    them.
    """

    def __init__(self, size: int, ranks: Ranks, device: torch.device, put: bool, overlap: bool) -> None:
        self.ranks, self.put, self.on_gpu = ranks, put, device.type == "cuda"
        self.device, self.overlap = device, overlap
        self.peers = [(ranks.rank + step) % ranks.count for step in range(1, ranks.count)]
        self.place_bytes = aligned(size)
        self.region_bytes = self.place_bytes * max(1, ranks.count - 1)
        self.flags_at = REGIONS * self.region_bytes
        total = self.flags_at + aligned(WORD * ranks.count * (1 + REPEATED))
        self.memory = (_SymmetricMemory if self.on_gpu else _SharedFiles)(total, ranks)
        self._base = [memory.data_ptr() for memory in self.memory.of_rank]
        self._on_host: dict[tuple[str, int, int], list[Tensor]] = {}
        self.number = 0
        self.done_events: dict[int, Any] = {}  # of the last exchanges
        self.numbers, self.first_number = torch.empty(0), 0
        self.repeats, self.one = False, torch.ones(1, dtype=torch.int32, device=device)
        self.stream = torch.cuda.Stream(priority=-1) if self.on_gpu and overlap else None

    def exchange(self, stage: str) -> Exchange:
        """Return the next exchange, of a stage of the block. Every rank calls this at the same point.

        Raises:
            RuntimeError: the exchange that used the region before has not started, or a CUDA graph is being captured
                outside of `RepeatedExchanges`, and would not wait for the peers when it is replayed.
        """
        if not self.repeats and self.on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("exchanges are captured in a call within RepeatedExchanges.captured")
        self.number += 1
        if not self.repeats and self.number >= self.first_number + len(self.numbers) - REGIONS:
            self._refill_numbers()
        passed = self.number - REGIONS + 1
        if passed > 0 and passed not in self.done_events:
            raise RuntimeError(f"exchange {passed} was opened but not started, so the memory of the next one is in use")
        if (event := self.done_events.get(passed)) is not None:
            torch.cuda.current_stream().wait_event(event)
        return Exchange(self, self.number, stage)

    def offset_of(self, owner: int, other: int) -> int:
        """Return the first byte, in a region of rank `owner`, of the place for another rank."""
        return ((other - owner) % self.ranks.count - 1) * self.place_bytes

    def address(self, number: int, rank: int, at: int, size: int) -> int:
        """Return the address of bytes in a rank's region for an exchange; if ranks do not communicate, in its own."""
        if at + size > self.region_bytes:
            raise ValueError(f"an exchange of {size} bytes at {at} exceeds the region of {self.region_bytes} bytes")
        owner = rank if self.ranks.communicate else self.ranks.rank
        return self._base[owner] + number % REGIONS * self.region_bytes + at

    def view(self, number: int, rank: int, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the bytes at `address` as a tensor."""
        owner, size = rank if self.ranks.communicate else self.ranks.rank, bytes_of(shape, dtype)
        start = self.address(number, owner, at, size) - self._base[owner]
        return self.memory.of_rank[owner][start : start + size].view(dtype).view(*shape)

    def move(self, copying: Any, tensor: Tensor, number: int, rank: int, at: int, *, send: bool = False) -> None:
        """Copy bytes of a rank's region for an exchange to a contiguous tensor, or the other way, on a stream."""
        address = self.address(number, rank, at, tensor.nbytes)
        if recording():
            region = self.view(number, rank, at, tensor.shape, tensor.dtype)
            with contextlib.nullcontext() if copying is None else torch.cuda.stream(copying):
                if rank == self.ranks.rank:
                    tensor.copy_(region, non_blocking=True)  # what a peer put there; it crosses no link
                else:
                    recorded_copy(*((region, tensor) if send else (tensor, region)))
            return
        to, of = (address, tensor.data_ptr()) if send else (tensor.data_ptr(), address)
        copy(None if copying is None else copying.cuda_stream, to, of, tensor.nbytes)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for tensors that arrive, which the copying stream may write at once.

        It is that stream's: memory of the current one could be written only after all kernels launched so far. The
        current stream waits for copies that were queued before, so callers allocate before they start these.
        """
        if self.stream is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        current = torch.cuda.current_stream()
        with torch.cuda.stream(self.stream):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        current.wait_stream(self.stream)
        tensor.record_stream(current)
        return tensor

    def on_host(self, use: str, rows: int, columns: int) -> list[Tensor]:
        """Return rows of int32 in the host's memory, the same ones for each call of one use."""
        key = use, rows, columns
        if key not in self._on_host:
            memory = torch.empty(rows, columns, dtype=torch.int32, pin_memory=self.on_gpu)
            self._on_host[key] = list(memory)
        return self._on_host[key]

    def copying_stream(self) -> Any:
        """Return the stream that copies: one of its own, or the current one to copy between kernels; None on a CPU."""
        return self.stream or (torch.cuda.current_stream() if self.on_gpu else None)

    def meet(self, number: int, stream: int | None) -> None:
        """Tell every peer that this rank is at an exchange, and wait until every peer has told it."""
        if not self.ranks.communicate:
            return
        rank, told = self.ranks.rank, self.one.data_ptr()
        if not self.repeats:
            told = self.numbers.data_ptr() + WORD * (number - self.first_number)
        for peer in self.peers:
            copy(stream, self._word(number, peer, rank), told, WORD)
        words = [self._word(number, rank, peer) for peer in self.peers]
        if stream is None:
            for peer, word in zip(self.peers, words, strict=True):
                self._wait_on_cpu(peer, word, number)
        elif self.repeats:
            wait_for_ones(stream, words)
        else:
            for word in words:
                wait_until_at_least(stream, word, number)

    def _word(self, number: int, owner: int, other: int) -> int:
        """Return the address of a rank's word in which another one announces an exchange."""
        assert number <= REPEATED or not self.repeats, f"a CUDA graph has at most {REPEATED - 1} exchanges"
        row = number if self.repeats else 0
        return self._base[owner] + self.flags_at + WORD * (row * self.ranks.count + other)

    def _wait_on_cpu(self, peer: int, word: int, number: int) -> None:
        at = word - self._base[self.ranks.rank]
        value = self.memory.of_rank[self.ranks.rank][at : at + WORD].view(torch.int32)
        give_up = time.monotonic() + SECONDS
        while int(value) < (1 if self.repeats else number):
            if time.monotonic() > give_up:
                raise TimeoutError(
                    f"rank {self.ranks.rank} waited {SECONDS:.0f} s for exchange {number} of rank {peer}, whose word "
                    f"is {int(value)}; all ranks must call the same functions in the same order"
                )
            time.sleep(1e-4)
        if self.repeats:
            value.zero_()

    def begin_repeated(self) -> None:
        """Begin a call whose exchanges a CUDA graph repeats. The copying stream is captured from here on, too."""
        self.repeats, self.number, self.done_events = True, 0, {}
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def end_repeated(self) -> None:
        """Wait at the end of such a call until all ranks have read what this one offered, and join the streams."""
        copying = self.copying_stream()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        self.meet(self.number + 1, None if copying is None else copying.cuda_stream)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _refill_numbers(self) -> None:
        """Provide the next numbers in GPU memory, from where a copy engine writes them to the peers."""
        if self.on_gpu:
            torch.cuda.synchronize()  # copies may still read the last ones
        self.first_number = self.number - REGIONS  # an exchange that was opened before may start later
        self.numbers = torch.arange(self.first_number, self.number + NUMBERS, dtype=torch.int32, device=self.device)
        if self.on_gpu:
            torch.cuda.synchronize()


class Exchange:
    """One exchange; see the module."""

    def __init__(self, buffers: PeerBuffers, number: int, stage: str) -> None:
        self.buffers, self.number, self.stage = buffers, number, stage
        self.sent: dict[int, list[Tensor]] = {peer: [] for peer in buffers.peers}
        self.filled = dict.fromkeys(buffers.peers, 0)
        self.incoming: Mapping[int, Sequence[Incoming]] = {}
        self.ready: Any = None
        self.arrived: dict[int, Any] = {}
        self.received: dict[int, list[Tensor]] = {}

    def outbox(self, peer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor to the peer, which a kernel fills before `complete`, or `expect` without it."""
        if self.buffers.put:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.buffers.device)
        else:
            own = self.buffers.ranks.rank
            at = self.buffers.offset_of(own, peer) + self.filled[peer]
            tensor = self.buffers.view(self.number, own, at, shape, dtype)
            self.filled[peer] += aligned(bytes_of(shape, dtype))
        self.sent[peer].append(tensor)
        return tensor

    def send(self, peer: int, tensor: Tensor) -> None:
        """Send a contiguous tensor that exists already. It must not change before the exchange is over."""
        if self.buffers.put:
            self.sent[peer].append(tensor)
        else:
            self.outbox(peer, tensor.shape, tensor.dtype).copy_(tensor)

    def offer(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory at a byte of this rank's region, of which each peer reads its part; only without `put`."""
        return self.buffers.view(self.number, self.buffers.ranks.rank, at, shape, dtype)

    def complete(self) -> None:
        """Declare that kernels launched before fill all tensors to send."""
        if self.buffers.stream is not None:
            self.ready = torch.cuda.current_stream().record_event()

    def expect(self, incoming: Mapping[int, Sequence[Incoming]]) -> Exchange:
        """Declare the tensors that each peer sends here, in its order."""
        assert set(incoming) == set(self.buffers.peers), "an exchange receives from every peer"
        self.incoming = incoming
        for peer in incoming:
            self.received[peer] = self._memory_for(peer)
        if self.ready is None:
            self.complete()
        return self

    def start(self) -> None:
        """Begin to move the tensors. Exchanges start in the order in which they were opened."""
        with stage(self.stage):
            self._start(self.buffers.copying_stream())

    def _start(self, copying: Any) -> None:
        buffers, own, number = self.buffers, self.buffers.ranks.rank, self.number
        if self.ready is not None:
            copying.wait_event(self.ready)
        if buffers.put:
            for peer, tensors in self.sent.items():
                at = buffers.offset_of(peer, own)
                for tensor in tensors:
                    buffers.move(copying, tensor, number, peer, at, send=True)
                    at += aligned(tensor.nbytes)
        buffers.meet(number, None if copying is None else copying.cuda_stream)
        over = None
        for peer, expected in self.incoming.items():
            owner, at = (own, buffers.offset_of(own, peer)) if buffers.put else (peer, buffers.offset_of(peer, own))
            for each, tensor in zip(expected, self.received[peer], strict=True):
                if not buffers.put or each.into is not None:
                    first = at if buffers.put or each.at is None else each.at
                    buffers.move(copying, tensor, number, owner, first)
                at += aligned(tensor.nbytes)
            over = self.arrived[peer] = None if copying is None else copying.record_event()
        if over is None and copying is not None:
            over = copying.record_event()
        buffers.done_events[number] = over
        buffers.done_events.pop(number - REGIONS, None)

    def _memory_for(self, peer: int) -> list[Tensor]:
        buffers, tensors = self.buffers, []
        at = buffers.offset_of(buffers.ranks.rank, peer)
        for each in self.incoming[peer]:
            if each.into is not None:
                tensors.append(each.into)
            elif buffers.put:
                tensors.append(buffers.view(self.number, buffers.ranks.rank, at, each.shape, each.dtype))
            else:
                tensors.append(buffers.allocate(each.shape, each.dtype))
            at += aligned(tensors[-1].nbytes)
        return tensors

    def receive(self, peer: int) -> list[Tensor]:
        """Make later kernels wait for the peer's tensors, and return these; those with `into` lie there."""
        if self.arrived[peer] is not None:
            torch.cuda.current_stream().wait_event(self.arrived[peer])
        if self.buffers.put:
            assert self.buffers.number < self.number + REGIONS - 1, "a peer may write again what this exchange received"
        self.sent[peer] = []
        return self.received[peer]

    def wait_on_host(self) -> None:
        """Wait until all tensors are there, and kernels before `complete` have ended."""
        if (over := self.buffers.done_events[self.number]) is not None:
            over.synchronize()


class RepeatedExchanges:
    """The exchanges of a call that a CUDA graph repeats, in memory that no other call uses.

        exchanges = RepeatedExchanges()
        with exchanges.first():
            call()  # makes the memory
        with torch.cuda.graph(graph), exchanges.captured():
            call()

    All ranks do so at the same point. On a CPU, each call within `captured` is a replay.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[Any, ...], PeerBuffers] = {}

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Make a call's memory. At the end, all ranks have ended the call, so that none replays while another is in it.
        """
        with _buffers_in(self.buffers):
            yield
        for buffers in self.buffers.values():
            if buffers.on_gpu:
                torch.cuda.synchronize()
            dist.barrier(group=buffers.ranks.group)

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        with _buffers_in(self.buffers):
            for buffers in self.buffers.values():
                buffers.begin_repeated()
            yield
            for buffers in self.buffers.values():
                buffers.end_repeated()


_BUFFERS: dict[tuple[Any, ...], PeerBuffers] = {}
_buffers = _BUFFERS  # of the calls that run now


@contextlib.contextmanager
def _buffers_in(used: dict[tuple[Any, ...], PeerBuffers]) -> Iterator[None]:
    global _buffers
    _buffers = used
    try:
        yield
    finally:
        _buffers = _BUFFERS


def peer_buffers(use: str, size: int, ranks: Ranks, device: torch.device, put: bool, overlap: bool) -> PeerBuffers:
    """Return the buffers of one use, made at the first call for this size by all ranks together."""
    key = (use, aligned(size), ranks.rank, ranks.count, id(ranks.group), ranks.communicate, device, put, overlap)
    if key not in _buffers:
        _buffers[key] = PeerBuffers(size, ranks, device, put, overlap)
    return _buffers[key]
