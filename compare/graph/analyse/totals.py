"""The totals of a fusion graph: launches, declared and compulsory bytes, and roofline times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..model import PHASES, FusionGraph, Kernel, Phase, PredictedTime, SourceOp
from ..operations import MOVEMENT, PRODUCTS, REDUCTIONS, is_product, may_multiply, token, tokens
from .roofline import Ceilings, product_rate, recoverable_us, roofline_time_us


@dataclass(frozen=True)
class Tally:
    """A sum of the known terms. unknown: the number of terms that are missing from it."""

    value: float = 0
    unknown: int = 0

    @property
    def exact(self) -> float | None:
        """The sum; None where terms are missing."""
        return None if self.unknown else self.value

    def in_words(self, wording: Callable[[float], str]) -> str:
        """Return the sum as `wording` writes it, and how many terms are missing."""
        return f"at least {wording(self.value)} ({self.unknown:,} unknown)" if self.unknown else wording(self.value)


@dataclass(frozen=True)
class Recomputed:
    """One operation of the program that several kernels compute. kernels: launch indices."""

    op: SourceOp
    kernels: tuple[int, ...]


@dataclass(frozen=True)
class Totals:
    """The totals of one graph.

    kernels: launch sites; None for a graph of operations only, each of which counts as unknown in the sums. So does
        each thing that could not be read.
    declared: bytes that the kernels of one call read and write, by the compiler's own account.
    compulsory: by phase, the fewest bytes that must move (`compulsory_traffic`).
    open_ended: compulsory and gemm_barrier may be more, because a branch or a loop whose length depends on data may
        touch more.
    gemm_barrier: the fewest bytes if the result of each product goes through memory; None where one kernel holds
        several products or an attention, whose results stay on chip.
    roofline_time_us: the sum of the kernels' roofline times; None without ceilings.
    block_roofline_time_us: the roofline time of the whole block: for each phase max(compulsory bytes / bandwidth,
        declared FLOPs / rate). None where FLOPs are not declared.
    device_time_us: the sum of measured times; None where no kernel was measured.
    recoverable_us: measured time above the roofline times, over kernels where both are known. A kernel below its
        roofline time (it read from cache) counts zero. None without ceilings or measured times.
    below_roofline: launch indices of kernels that are clearly below their roofline time.
    """

    kernels: int | None
    declared: Tally
    compulsory: Mapping[str, int]
    gemm_barrier: int | None
    open_ended: bool = False
    roofline_time_us: Tally | None = None
    block_roofline_time_us: float | None = None
    device_time_us: Tally | None = None
    recoverable_us: Tally | None = None
    below_roofline: tuple[int, ...] = ()

    @property
    def fusion_efficiency(self) -> float | None:
        """Compulsory over declared bytes; None where declared bytes are unknown or zero."""
        declared = self.declared.exact
        return sum(self.compulsory.values()) / declared if declared else None

    @property
    def compulsory_tally(self) -> Tally:
        """The compulsory bytes of all phases."""
        return Tally(sum(self.compulsory.values()), int(self.open_ended))


def totals(
    graph: FusionGraph,
    *,
    bytes_compulsory: Mapping[str, int] | None = None,
    flops_declared: Mapping[str, float] | None = None,
    ceilings: Ceilings | None = None,
) -> Totals:
    """Return the totals of one graph.

    bytes_compulsory, flops_declared: by phase, where the block declares them (`Block.bytes_compulsory`,
    `Block.phase_flops`); they replace what the graph alone can tell.
    """
    kernels = graph.kernels or ()
    missing = len(graph.operations) if graph.kernels is None else len(graph.unparsed)
    own = compulsory_traffic(graph)
    compulsory: Mapping[str, int] = {phase: read + written for phase, (read, written) in own.items()}
    if bytes_compulsory is not None:
        compulsory = bytes_compulsory
    rooflines = None if ceilings is None else [roofline_time_us(graph, kernel, ceilings) for kernel in kernels]
    times = [kernel.device_time_us for kernel in kernels]
    measured = any(time is not None for time in times)
    return Totals(
        kernels=None if graph.kernels is None else len(kernels),
        declared=Tally(
            fewest((kernel, _known_bytes(kernel)) for kernel in kernels),
            tally(map(declared_bytes, kernels), missing).unknown,
        ),
        compulsory=compulsory,
        gemm_barrier=None if any(map(_chained, kernels)) else sum(compulsory.values()) + _barrier_bytes(graph),
        open_ended=bytes_compulsory is None and any(k.launches is None and not k.least_launches for k in kernels),
        roofline_time_us=None if rooflines is None else tally(rooflines, missing),
        block_roofline_time_us=_block_roofline_time(graph, own, compulsory, flops_declared, ceilings),
        device_time_us=tally(times) if measured else None,
        recoverable_us=None if rooflines is None or not measured else tally(map(recoverable_us, times, rooflines)),
        below_roofline=tuple(i for i, pair in enumerate(zip(times, rooflines or (), strict=False)) if _below(*pair)),
    )


def declared_bytes(kernel: Kernel) -> int | None:
    """Return the bytes that all launches of one call read and write; None where one is unknown."""
    read, written = kernel.bytes_read, kernel.bytes_written
    return None if read is None or written is None or kernel.launches is None else (read + written) * kernel.launches


def known_declared_bytes(kernel: Kernel) -> int:
    """Return the known part of the declared bytes, at the fewest launches where their number depends on data."""
    return _known_bytes(kernel) * kernel.certain_launches


def _known_bytes(kernel: Kernel) -> int:
    """Return the known bytes that one launch reads and writes."""
    return sum(access.bytes or 0 for access in (*(kernel.inputs or ()), *(kernel.outputs or ())))


def fewest(amounts: Iterable[tuple[Kernel, int]]) -> int:
    """Return the least sum over all launches, where each conditional takes its cheapest branch.

    amounts: of one launch of each kernel.
    """
    sums: Counter[tuple[Any, ...]] = Counter()  # by the branches around the kernels
    for kernel, amount in amounts:
        around = tuple(((kernel.phase, name), index, of) for name, index, of in kernel.facts.get("branches", ()))
        sums[around] += amount * (kernel.facts.get("launches_if_taken", 0) if around else kernel.certain_launches)
    for depth in range(max(map(len, sums), default=0), 0, -1):
        costs: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for around in [around for around in sums if len(around) == depth]:
            conditional, _, of = around[-1]
            costs[around[:-1], conditional, of].append(sums.pop(around))
        for (outer, _, of), branches in costs.items():
            sums[outer] += min(branches) if len(branches) == of else 0  # a branch without kernels costs nothing
    return sums[()]


def compulsory_traffic(graph: FusionGraph) -> dict[Phase, tuple[int, int]]:
    """Return, by phase, the fewest bytes that must be read and written, as far as the graph alone can tell.

    A buffer counts its elements, without a layout's padding.

    Forward reads each input that it uses and writes each output. Backward reads the cotangents and those inputs and
    outputs of forward that its kernels use, and writes the gradients. Residuals count the smaller of two amounts: their
    own bytes, or those of the inputs from which backward could compute them again. A partly used buffer (a gather, an
    update in place) counts the used part. A conditional counts, for each buffer, the branch that touches least of it.
    """
    result: dict[Phase, tuple[int, int]] = {}
    for phase in PHASES:
        indices = [i for i, kernel in enumerate(graph.kernels or ()) if kernel.phase == phase]
        if not indices:
            continue
        reads, writes = _accessed(graph, indices, "inputs"), _accessed(graph, indices, "outputs")
        outside = {
            name for name in reads
            if graph.buffer[name].role in ("input", "constant")
            or (graph.buffer[name].role == "output" and name not in writes)
        }
        read = sum(reads[name] for name in outside)
        if phase == "backward":
            read += _residual_bytes(graph, reads, outside)
        written = sum(size for name, size in writes.items() if graph.buffer[name].role in ("input", "output"))
        result[phase] = read, written
    return result


def recomputed(graph: FusionGraph) -> tuple[Recomputed, ...]:
    """Return the operations (sites) that several kernels compute, in order of appearance.

    These do not count:
    - a kernel that only carries the operation's name (a broadcast of its operand);
    - a sum or product in two steps, where the second kernel finishes the first one's work;
    - a second kernel that reads only the first one's results and has no operation of its own;
    - a product's name in a kernel without a product: it adds up the partial sums of a split-K product.
    """
    # A gradient is an operation of its own, though it has the site of its forward operation.
    holders: dict[tuple[str, bool], dict[int, SourceOp]] = defaultdict(dict)
    for index, kernel in enumerate(graph.kernels or ()):
        for op in kernel.source_ops:
            if not op.site or (token(op.op) in PRODUCTS and not may_multiply(kernel)):
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


def repeated(graph: FusionGraph) -> set[tuple[int, str, bool]]:
    """Return (launch index, site, backward) of every operation that an earlier kernel already computed."""
    return {(index, again.op.site, again.op.backward) for again in recomputed(graph) for index in again.kernels[1:]}


def _finishes(graph: FusionGraph, earlier: int, later: int, op: SourceOp) -> bool:
    """Return whether kernel `later` continues from the result of `earlier` instead of computing `op` again."""
    assert graph.kernels is not None
    first, second = graph.kernels[earlier], graph.kernels[later]
    written = {access.buffer for access in first.outputs or ()}
    read = {access.buffer for access in second.inputs or ()}
    if not written & read:
        return False
    if token(op.op) in REDUCTIONS | PRODUCTS:
        return True
    # It reads the result of `op`, so it computes another operation of that site (two products of one line).
    if len(written) == 1 and first.source_ops[-1].site == op.site:
        return True
    return read <= written and {o.site for o in second.source_ops} <= {o.site for o in first.source_ops}


def tally(terms: Iterable[float | None], unknown: int = 0) -> Tally:
    """Return the sum of the known terms and the number of unknown ones, plus `unknown` more."""
    listed = list(terms)
    known = [term for term in listed if term is not None]
    return Tally(sum(known), unknown + len(listed) - len(known))


def predicted_sum(kernels: Iterable[Kernel]) -> PredictedTime:
    """Return the sum of the kernels' predicted times, without the gaps between them.

    Its ends are the sums of the kernels' ends: kernels of one call may err alike. A kernel without a prediction leaves
    the sum without one.
    """
    times = [kernel.predicted or PredictedTime(reason="nothing was predicted") for kernel in kernels]
    if reasons := dict.fromkeys(time.reason for time in times if time.us is None):
        return PredictedTime(reason="; ".join(reasons))
    return PredictedTime(*(sum(getattr(time, end) for time in times) for end in ("us", "low_us", "high_us")))


def difference(more: Tally | None, less: Tally | None) -> float | None:
    """Return by how much one sum is more than another; None where a term is missing."""
    if more is None or less is None or more.exact is None or less.exact is None:
        return None
    return more.exact - less.exact


_CLEARLY = 0.95  # of the roofline time; a smaller distance may be the spread of the measurements


def _below(time: float | None, roofline: float | None) -> bool:
    return time is not None and roofline is not None and time < _CLEARLY * roofline


def _chained(kernel: Kernel) -> bool:
    """Return whether a product's result stays in the kernel for another product."""
    found = tokens(kernel)
    return kernel.kind == "attention" or "attention" in found or (
        may_multiply(kernel) and sum(name in PRODUCTS for name in found) > 1
    )


def _accessed(graph: FusionGraph, indices: Iterable[int], side: str) -> dict[str, int]:
    """Return, by buffer, the bytes that these kernels touch, at most all of the buffer."""
    touched: dict[str, list[tuple[Kernel, int]]] = defaultdict(list)
    for kernel in ((graph.kernels or ())[index] for index in indices):
        for access in getattr(kernel, side) or ():
            size = _elements(graph, access.buffer) if access.bytes is None else access.bytes
            touched[access.buffer].append((kernel, size))
    return {name: min(_elements(graph, name), fewest(amounts)) for name, amounts in touched.items()}


def _residual_bytes(graph: FusionGraph, reads: Mapping[str, int], outside: set[str]) -> int:
    residuals = [name for name in reads if graph.buffer[name].role == "saved"]
    as_saved = sum(reads[name] for name in residuals)
    if not all(graph.producers.get(name) for name in residuals):
        return as_saved  # the graph does not show their sources
    sources = {
        name for name in _ancestors(graph, residuals)
        if graph.buffer[name].role in ("input", "constant") and name not in outside
    }
    return min(as_saved, sum(_elements(graph, name) for name in sources))


def _elements(graph: FusionGraph, name: str) -> int:
    """Return the bytes of a buffer without padding."""
    return graph.buffer[name].bytes - graph.buffer[name].padding


def _ancestors(graph: FusionGraph, names: Iterable[str]) -> set[str]:
    """Return the buffers that the contents of these depend on."""
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
    """Return the bytes that products add to the compulsory bytes.

    A result that another product needs is written once and read once, and read once more if backward needs it. A result
    that leads only to outputs adds nothing: its consumers could run inside the product's kernel.
    """
    total = 0
    for index, kernel in enumerate(graph.kernels or ()):
        if not is_product(kernel):
            continue
        for access in kernel.outputs or ():
            buffer = graph.buffer[access.buffer]
            phases = _phases_that_need(graph, index, access.buffer)
            whole = _elements(graph, access.buffer)
            touched = whole if access.bytes is None else access.bytes
            size = min(whole, touched * kernel.certain_launches)
            total += size * (len(phases) + (1 if phases and buffer.role != "output" else 0))
    return total


def _phases_that_need(graph: FusionGraph, producer: int, name: str) -> set[Phase]:
    """Return the phases in which a product, or backward, reads the buffer or what is computed from it."""
    assert graph.kernels is not None
    own = graph.kernels[producer].phase
    needed: set[Phase] = set()
    seen, pending = {name}, [name]
    while pending:
        for index in graph.consumers.get(pending.pop(), ()):
            kernel = graph.kernels[index]
            if kernel.phase != own or is_product(kernel):
                needed.add(kernel.phase)
                continue
            for access in kernel.outputs or ():
                if access.buffer not in seen:
                    seen.add(access.buffer)
                    pending.append(access.buffer)
    return needed


def _block_roofline_time(
    graph: FusionGraph,
    own: Mapping[Phase, tuple[int, int]],
    compulsory: Mapping[str, int],
    flops: Mapping[str, float] | None,
    ceilings: Ceilings | None,
) -> float | None:
    """Return the roofline time of the whole block, or None where a phase's FLOPs are not declared.

    The graph's own FLOPs do not serve: an implementation may compute more than the block needs.
    """
    if ceilings is None or flops is None or not own or any(phase not in flops for phase in own):
        return None
    seconds = 0.0
    for phase, (read, written) in own.items():
        kernels = [kernel for kernel in graph.kernels or () if kernel.phase == phase]
        heaviest = max(kernels, key=lambda k: (may_multiply(k), (k.flops or 0.0) * (k.launches or 1)))
        rate = product_rate(graph, heaviest, ceilings.rate)
        memory = compulsory.get(phase, read + written) / ceilings.bandwidth(read, written)
        seconds += max(memory, flops[phase] / rate if rate else 0.0)
    return seconds * 1e6
