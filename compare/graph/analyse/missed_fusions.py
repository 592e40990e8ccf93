"""The missed fusions of a graph, ranked by what each would save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..alike import work_of
from ..buffer_edges import BufferEdge, buffer_edges, bytes_passed, connected, reads_of, written_for
from ..formats import microseconds
from ..model import FusionGraph, Reason
from .products import split_products
from .roofline import Ceilings
from .traffic_time import traffic_us

# How much of a price forcing the fusion saved, by whether the price is predicted: the middle 80% of 19 forced cases lie
# between the numbers. They round those of docs/missed-fusions.json, of whose 20 cases one does not count.
PRICE_ERRORS = {
    True: "forcing a fusion saved 0.76 to 1.19 times its price from predicted times (~)",
    False: "forcing a fusion saved 0.82 to 1.43 times its price from bytes and launches",
}


@dataclass(frozen=True)
class Price:
    """The saving of one call if kernels were one kernel.

    bytes: of buffers that only these kernels write and read, and of repeated reads.
    buffers: those buffers; of one fused kernel, the largest saving first.
    launches: of the kernels that vanish.
    us: the share that the bytes have of the kernels' predicted times (traffic_time.py), else bytes over a copy's
        bandwidth, and the device time of an empty kernel for each launch; None without ceilings.
    predicted: `us` is of predicted times.
    """

    bytes: int
    buffers: tuple[str, ...]
    launches: int
    us: float | None
    predicted: bool = False

    @property
    def time(self) -> str:
        """The saving in words, with the mark of predicted times; "" without ceilings."""
        return "" if self.us is None else f"{'~' if self.predicted else ''}{microseconds(self.us)}"


def price_error(prices: Iterable[Price]) -> str:
    """Return how right prices like these are; "" where none has a time."""
    found = [PRICE_ERRORS[kind] for kind in sorted({price.predicted for price in prices if price.us is not None})]
    where = "median 1, 10% to 90% of 19 cases on NVIDIA H200: docs/fusion-graph.md"
    return f"{'; '.join(found)} ({where})" if found else ""


@dataclass(frozen=True)
class MissedFusion:
    """Two kernels that are not one, and the saving if they were."""

    reason: Reason
    price: Price


def missed(graph: FusionGraph) -> list[Reason]:
    """Return the graph's reasons, without those between a split-K product and the kernels that add up its partial sums.

    The compiler split one kernel into these.
    """
    kernels = graph.kernels or ()
    split = {(kernels[each.product].name, kernels[each.sums].name) for each in split_products(graph)}
    return [reason for reason in graph.reasons if (reason.producer, reason.consumer) not in split]


def ranked(graph: FusionGraph, ceilings: Ceilings | None) -> list[MissedFusion]:
    """Return the missed fusions with their prices, the largest first.

    Each price is that of one fusion alone: prices of fusions that share a kernel do not add up (see `together`). A
    price is an estimate. It assumes that the fused kernel moves its bytes as fast as the two kernels.
    Reasons that save no bytes, or an unknown number, are left out.

    Raises ValueError for a bandwidth that is not positive.
    """
    pricing = _Pricing(graph, ceilings)
    found = [MissedFusion(reason, pricing.of(reason)) for reason in missed(graph) if reason.bytes_saved]
    return sorted(
        (one for one in found if one.price.bytes), key=lambda one: (one.price.us or 0.0, one.price.bytes), reverse=True
    )


@dataclass(frozen=True)
class AlikeFusions:
    """Missed fusions of the same work, such as one in each layer. price: of all of them, each alone."""

    fusions: tuple[MissedFusion, ...]

    @property
    def first(self) -> MissedFusion:
        return self.fusions[0]

    @property
    def price(self) -> Price:
        prices = [fusion.price for fusion in self.fusions]
        return _sum(prices, self.first.price.buffers)


def _sum(prices: Sequence[Price], buffers: tuple[str, ...]) -> Price:
    times = [price.us for price in prices if price.us is not None]
    return Price(
        sum(price.bytes for price in prices), buffers, sum(price.launches for price in prices),
        sum(times) if len(times) == len(prices) else None, any(price.predicted for price in prices),
    )


def folded(graph: FusionGraph, fusions: Sequence[MissedFusion]) -> list[AlikeFusions]:
    """Return ranked fusions with those of the same work as one, the largest saving of all together first."""
    alike: dict[object, list[MissedFusion]] = {}
    for fusion in fusions:
        reason = fusion.reason
        ends = (graph.named.get(name, ()) for name in (reason.producer, reason.consumer))
        work = tuple(work_of(graph, indices[0]) if len(indices) == 1 else indices for indices in ends)
        alike.setdefault((work, reason.code, reason.origin, reason.line, fusion.price.bytes), []).append(fusion)
    found = [AlikeFusions(tuple(same)) for same in alike.values()]
    return sorted(found, key=lambda same: (same.price.us or 0.0, same.price.bytes), reverse=True)


def price(graph: FusionGraph, ceilings: Ceilings | None, members: Collection[int]) -> Price:
    """Return the price of the kernels with these launch indices as one. Raises as `ranked` does."""
    return _Pricing(graph, ceilings).fused(set(members))


def at_rates(graph: FusionGraph, ceilings: Ceilings | None, size: int, launches: int) -> Price:
    """Return the price of bytes and launches. Raises as `ranked` does."""
    return _Pricing(graph, ceilings).price(size, (), launches)


def together(graph: FusionGraph, ceilings: Ceilings | None) -> Price:
    """Return the price of all ranked fusions at once: a repeated read, a buffer or a launch counts once.

    Kernels that fusions connect become one kernel. Reasons whose names lead to no two kernels are left out.

    Raises ValueError for a bandwidth that is not positive.
    """
    pricing = _Pricing(graph, ceilings)
    pairs = (pricing.kernels_of(one.reason) for one in ranked(graph, ceilings))
    prices = [pricing.fused(group) for group in connected(pair for pair in pairs if pair is not None)]
    buffers = tuple(dict.fromkeys(name for price in prices for name in price.buffers))
    return _sum(prices, buffers) if prices else pricing.price(0, (), 0)


@dataclass(frozen=True)
class _Pricing:
    graph: FusionGraph
    ceilings: Ceilings | None

    def __post_init__(self) -> None:
        if self.ceilings is not None and not (bandwidth := self.ceilings.bandwidth(1, 1)) > 0:
            raise ValueError(f"bandwidth must be positive, got {bandwidth}; a target's is in its measured ceilings")

    def of(self, reason: Reason) -> Price:
        """Return the price of one fusion; that of its `bytes_saved` where its names lead to no two kernels."""
        pair = self.kernels_of(reason)
        return self.price(reason.bytes_saved or 0, (), 0) if pair is None else self.fused(set(pair))

    def price(self, size: int, buffers: tuple[str, ...], launches: int) -> Price:
        if self.ceilings is None:
            return Price(size, buffers, launches, None)
        us = size / self.ceilings.bandwidth(1, 1) * 1e6 + launches * (self.ceilings.launch_us or 0.0)
        return Price(size, buffers, launches, us)

    def _of_kernels(self, price: Price, traffic: Mapping[int, int]) -> Price:
        """Return the price with the time that kernels need for these bytes, by launch index, where it is predicted."""
        us, predicted = (0.0, False) if self.ceilings is None else traffic_us(self.graph, traffic, self.ceilings)
        return replace(price, us=us, predicted=True) if predicted else price

    def kernels_of(self, reason: Reason) -> tuple[int, int] | None:
        """Return the launch indices of the two kernels; None where a name has no kernel, or several."""
        first, second = (self.graph.named.get(name, ()) for name in (reason.producer, reason.consumer))
        return (first[0], second[0]) if len(first) == len(second) == 1 and first != second else None

    @cached_property
    def _sources(self) -> Mapping[tuple[str, int], frozenset[int | None]]:
        """By buffer and reader, the kernels that wrote what the reader reads; None for what an input had before."""
        found: dict[tuple[str, int], set[int | None]] = {}
        for buffer in self.graph.buffers:
            for edge in buffer_edges(self.graph, buffer):
                if edge.reader is not None:
                    found.setdefault((buffer.name, edge.reader), set()).add(edge.writer)
        return {read: frozenset(writers) for read, writers in found.items()}

    def fused(self, members: set[int]) -> Price:
        """Return the price of fusing these kernels into one."""
        kernels = self.graph.kernels or ()
        # By version of a buffer. If members wrote it, only the reads of a loop's later iterations are here.
        reads: dict[tuple[str, frozenset[int | None]], dict[int, tuple[int, int]]] = {}
        saved: Counter[str] = Counter()
        traffic: Counter[int] = Counter()  # the same bytes, by kernel
        inner: dict[tuple[str, int], None] = {}  # buffers and their writers
        for index in sorted(members):
            for access in kernels[index].inputs or ():
                name, count = access.buffer, kernels[index].certain_launches
                if access.bytes is None or (name, index) not in self._sources:
                    continue
                sources = self._sources[name, index]
                if writers := [writer for writer in sources if writer is not None and writer in members]:
                    inner |= dict.fromkeys((name, writer) for writer in writers)
                    passed = sum(bytes_passed(self.graph, BufferEdge(writer, index), name) or 0 for writer in writers)
                    saved[name] += min(access.bytes * count, passed)
                    traffic[index] += min(access.bytes * count, passed)
                    count -= max(reads_of(self.graph, name, writer, index) for writer in writers)
                same = reads.setdefault((name, sources), {})
                if count > 0:
                    same[index] = access.bytes, count
        for (name, _), sizes in reads.items():
            saved[name] += (repeated := self._repeated(name, list(sizes.values())))
            for index, (size, times) in reversed(sizes.items()):  # the first kernel still reads it
                traffic[index] += min(repeated, size * times)
                repeated -= min(repeated, size * times)
        for name, writer in inner:
            readers = members.intersection(self.graph.consumers[name])
            written = written_for(self.graph, name, writer, readers) or 0
            saved[name] += written
            traffic[writer] += written
        counts = [kernels[index].certain_launches for index in members]
        buffers = tuple(name for name, size in saved.most_common() if size)
        return self._of_kernels(self.price(saved.total(), buffers, sum(counts) - max(counts)), traffic)

    def _repeated(self, name: str, sizes: list[tuple[int, int]]) -> int:
        """Return the bytes that several of these reads have for certain in common; two halves may be different ones."""
        each = [size for size, _ in sizes]
        whole = self.graph.buffer[name].bytes  # 0: not known
        return max(0, sum(each) - max(whole, *each)) * min(n for _, n in sizes) if whole and len(each) > 1 else 0
