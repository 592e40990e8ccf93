"""What a fusion graph adds up to: launches, bytes, the fewest bytes there could be, and times that follow from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..model import Access, FusionGraph, Kernel, Part, SourceOp
from ..operations import MOVEMENT, PRODUCTS, REDUCTIONS, is_product, token, tokens
from .roofline import Ceilings, floor_us, product_dtype, recoverable_us


@dataclass(frozen=True)
class Tally:
    """A sum of what is known. unknown: how many terms are not in it."""

    value: float = 0
    unknown: int = 0

    @property
    def exact(self) -> float | None:
        """The sum, None unless it is whole."""
        return None if self.unknown else self.value


@dataclass(frozen=True)
class Recomputed:
    """One operation of the program in several kernels (launch indices)."""

    op: SourceOp
    kernels: tuple[int, ...]


@dataclass(frozen=True)
class Totals:
    """kernels: launch sites, None for a graph of operations alone, each of which then counts as unknown.

    moved: bytes of one call. compulsory: fewest bytes each part must move (see `compulsory_traffic`). gemm_barrier: the
    fewest where each product's result goes through memory; None where a kernel holds several products or attention,
    whose results stay on chip. floor_us: what the kernels take at least, one by one; None without ceilings.
    block_floor_us: what the block takes at least, max(compulsory / bandwidth, declared FLOPs / rate) by part, None
    where nobody declares its FLOPs. device_time_us: None where nothing was measured. recoverable_us: measured time
    above what the kernels take at least, one by one, of those where both are known; a kernel below its floor (it read
    from cache) counts zero; None without ceilings or any measured time. below_floor: launch indices of those that are
    clearly below.
    """

    kernels: int | None
    moved: Tally
    compulsory: Mapping[str, int]
    gemm_barrier: int | None
    floor_us: Tally | None = None
    block_floor_us: float | None = None
    device_time_us: Tally | None = None
    recoverable_us: Tally | None = None
    below_floor: tuple[int, ...] = ()

    @property
    def fusion_efficiency(self) -> float | None:
        """Compulsory bytes over bytes moved; None where the latter are not all known, or none."""
        moved = self.moved.exact
        return sum(self.compulsory.values()) / moved if moved else None


def totals(
    graph: FusionGraph,
    *,
    bytes_compulsory: Mapping[str, int] | None = None,
    flops_declared: Mapping[str, float] | None = None,
    ceilings: Ceilings | None = None,
    precision: str | None = None,
) -> Totals:
    """The sums of one graph.

    bytes_compulsory, flops_declared: by part, where somebody knows better than the graph (`Block.bytes_compulsory`,
    `Block.part_flops`). precision: "ieee" or "tf32", of float32 products; without it the faster one sets the floor.
    """
    kernels = graph.kernels or ()
    missing = len(graph.operations) if graph.kernels is None else 0
    own = compulsory_traffic(graph)
    compulsory: Mapping[str, int] = {part: read + written for part, (read, written) in own.items()}
    if bytes_compulsory is not None:
        compulsory = bytes_compulsory
    floors = None if ceilings is None else [floor_us(graph, kernel, ceilings, precision) for kernel in kernels]
    times = [kernel.device_time_us for kernel in kernels]
    measured = any(time is not None for time in times)
    return Totals(
        kernels=None if graph.kernels is None else len(kernels),
        moved=Tally(sum(map(known_bytes, kernels)), tally(map(bytes_moved, kernels), missing).unknown),
        compulsory=compulsory,
        gemm_barrier=None if any(map(_chained, kernels)) else sum(compulsory.values()) + _barrier_bytes(graph),
        floor_us=None if floors is None else tally(floors, missing),
        block_floor_us=_block_floor(graph, own, compulsory, flops_declared, ceilings, precision),
        device_time_us=tally(times) if measured else None,
        recoverable_us=None if floors is None or not measured else tally(map(recoverable_us, times, floors)),
        below_floor=tuple(i for i, pair in enumerate(zip(times, floors or (), strict=False)) if _below(*pair)),
    )


def bytes_moved(kernel: Kernel) -> int | None:
    """Bytes that all launches of one call read and write."""
    read, written = kernel.bytes_read, kernel.bytes_written
    return None if read is None or written is None or kernel.launches is None else (read + written) * kernel.launches


def known_bytes(kernel: Kernel) -> int:
    """Of what all launches read and write, as much as is known; one launch where their number is not."""
    accesses = (*(kernel.inputs or ()), *(kernel.outputs or ()))
    return sum(access.bytes or 0 for access in accesses) * (1 if kernel.launches is None else kernel.launches)


def compulsory_traffic(graph: FusionGraph) -> dict[Part, tuple[int, int]]:
    """By part, the fewest bytes that must be read and written, as far as the graph alone can tell.

    Forward reads each input that it uses and writes each output. Backward reads the cotangents and those of forward's
    inputs and outputs that its kernels use, and writes the gradients. What it reads of residuals it must get somehow:
    from them, or by computing them again from the inputs that they derive from, of which the smaller counts. A buffer
    of which only a part is used (a gather, an update in place) counts that part.
    """
    result: dict[Part, tuple[int, int]] = {}
    parts: tuple[Part, ...] = ("forward", "backward")
    for part in parts:
        indices = [i for i, kernel in enumerate(graph.kernels or ()) if kernel.part == part]
        if not indices:
            continue
        reads, writes = _accessed(graph, indices, "inputs"), _accessed(graph, indices, "outputs")
        outside = {
            name for name in reads
            if graph.buffer[name].role in ("input", "constant")
            or (graph.buffer[name].role == "output" and name not in writes)
        }
        read = sum(reads[name] for name in outside)
        if part == "backward":
            read += _residual_bytes(graph, reads, outside)
        written = sum(size for name, size in writes.items() if graph.buffer[name].role in ("input", "output"))
        result[part] = read, written
    return result


def recomputed(graph: FusionGraph) -> tuple[Recomputed, ...]:
    """Operations (sites) that several kernels compute, in order of appearance.

    Not what only carries an operation's name (a broadcast of its operand in a kernel of its own), and not those that a
    kernel leaves unfinished for the next: a sum or product in two steps, and what the second step merely repeats (all
    that it reads is what the first wrote, and it has no operation of its own). Nor a product's name in a kernel that
    computes none: it sums what a product left in parts (split-K).
    """
    # A gradient is another operation than the one it is the gradient of, though both come from one place.
    holders: dict[tuple[str, bool], dict[int, SourceOp]] = defaultdict(dict)
    for index, kernel in enumerate(graph.kernels or ()):
        for op in kernel.source_ops:
            if not op.site or (token(op.op) in PRODUCTS and not _multiplies(kernel)):
                continue
            if kernel.kind != "copy" or token(op.op) in MOVEMENT:
                holders[op.site, op.backward].setdefault(index, op)
    found = []
    for held in holders.values():
        op = next(iter(held.values()))
        computing: list[int] = []
        for index in held:
            if not any(_finishes(graph, earlier, index, op) for earlier in computing):
                computing.append(index)
        if len(computing) > 1:
            found.append(Recomputed(op, tuple(computing)))
    return tuple(found)


def _finishes(graph: FusionGraph, earlier: int, later: int, op: SourceOp) -> bool:
    """Whether kernel `later` takes up what `earlier` made of `op` instead of computing it again."""
    assert graph.kernels is not None
    first, second = graph.kernels[earlier], graph.kernels[later]
    written = {access.buffer for access in first.outputs or ()}
    read = {access.buffer for access in second.inputs or ()}
    if not written & read:
        return False
    if token(op.op) in REDUCTIONS | PRODUCTS:
        return True
    # It reads the very result: what it computes is another operation of the same place (two products of one line).
    if len(written) == 1 and first.source_ops[-1].site == op.site:
        return True
    return read <= written and {o.site for o in second.source_ops} <= {o.site for o in first.source_ops}


def tally(terms: Iterable[float | None], unknown: int = 0) -> Tally:
    """The sum of the terms that are known, and how many are not (with `unknown` more)."""
    listed = list(terms)
    known = [term for term in listed if term is not None]
    return Tally(sum(known), unknown + len(listed) - len(known))


_CLEARLY = 0.95  # of a floor: what is nearer may be the spread of the measurements


def _below(time: float | None, floor: float | None) -> bool:
    return time is not None and floor is not None and time < _CLEARLY * floor


def _multiplies(kernel: Kernel) -> bool:
    return is_product(kernel) or kernel.kind in ("attention", "library", "custom")


def _chained(kernel: Kernel) -> bool:
    """Whether a product's result stays in the kernel for another product."""
    found = tokens(kernel)
    return kernel.kind == "attention" or "attention" in found or (
        _multiplies(kernel) and sum(name in PRODUCTS for name in found) > 1
    )


def _accesses(graph: FusionGraph, indices: Iterable[int], side: str) -> Iterator[tuple[Kernel, Access]]:
    for index in indices:
        kernel = (graph.kernels or ())[index]
        for access in getattr(kernel, side) or ():
            yield kernel, access


def _accessed(graph: FusionGraph, indices: Iterable[int], side: str) -> dict[str, int]:
    """Buffer -> bytes of it that these kernels touch, which is never more than all of it."""
    result: dict[str, int] = {}
    for kernel, access in _accesses(graph, indices, side):
        whole = graph.buffer[access.buffer].bytes
        known = access.bytes is not None and kernel.launches is not None
        touched = (access.bytes or 0) * (kernel.launches or 0) if known else whole
        result[access.buffer] = min(whole, result.get(access.buffer, 0) + touched)
    return result


def _residual_bytes(graph: FusionGraph, reads: Mapping[str, int], outside: set[str]) -> int:
    residuals = [name for name in reads if graph.buffer[name].role == "saved"]
    as_saved = sum(reads[name] for name in residuals)
    if not all(graph.producers.get(name) for name in residuals):
        return as_saved  # the graph does not show what they were computed from
    sources = {
        name for name in _ancestors(graph, residuals)
        if graph.buffer[name].role in ("input", "constant") and name not in outside
    }
    return min(as_saved, sum(graph.buffer[name].bytes for name in sources))


def _ancestors(graph: FusionGraph, names: Iterable[str]) -> set[str]:
    """Buffers that the contents of these depend on."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        for index in graph.producers.get(pending.pop(), ()):
            for access in (graph.kernels or ())[index].inputs or ():
                if access.buffer not in found:
                    found.add(access.buffer)
                    pending.append(access.buffer)
    return found


def _barrier_bytes(graph: FusionGraph) -> int:
    """What products add to the compulsory bytes: a result that another product needs is written once and read once,
    and read once more in backward if that needs it. What leads only to outputs counts as absorbed by the product."""
    total = 0
    for index, kernel in enumerate(graph.kernels or ()):
        if not is_product(kernel):
            continue
        for access in kernel.outputs or ():
            buffer = graph.buffer[access.buffer]
            parts = _parts_that_need(graph, index, access.buffer)
            size = min(buffer.bytes, (access.bytes or buffer.bytes) * (kernel.launches or 1))
            total += size * (len(parts) + (1 if parts and buffer.role != "output" else 0))
    return total


def _parts_that_need(graph: FusionGraph, producer: int, name: str) -> set[Part]:
    """Parts in which the buffer, or what other kernels than products make of it, goes into a product, or from forward
    into backward."""
    assert graph.kernels is not None
    own = graph.kernels[producer].part
    needed: set[Part] = set()
    seen, pending = {name}, [name]
    while pending:
        for index in graph.consumers.get(pending.pop(), ()):
            kernel = graph.kernels[index]
            if kernel.part != own or is_product(kernel):
                needed.add(kernel.part)
                continue
            for access in kernel.outputs or ():
                if access.buffer not in seen:
                    seen.add(access.buffer)
                    pending.append(access.buffer)
    return needed


def _block_floor(
    graph: FusionGraph,
    own: Mapping[Part, tuple[int, int]],
    compulsory: Mapping[str, int],
    flops: Mapping[str, float] | None,
    ceilings: Ceilings | None,
    precision: str | None,
) -> float | None:
    """None where the FLOPs of a part are not declared: an implementation may compute more than it must."""
    if ceilings is None or flops is None or not own or any(part not in flops for part in own):
        return None
    seconds = 0.0
    for part, (read, written) in own.items():
        kernels = [kernel for kernel in graph.kernels or () if kernel.part == part]
        heaviest = max(kernels, key=lambda k: (_multiplies(k), (k.flops or 0.0) * (k.launches or 1)))
        rate = ceilings.rate(product_dtype(graph, heaviest), precision)
        memory = compulsory.get(part, read + written) / ceilings.bandwidth(read, written)
        seconds += max(memory, flops[part] / rate if rate else 0.0)
    return seconds * 1e6
