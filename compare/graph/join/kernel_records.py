"""The join of a graph's kernels with the records of what a GPU ran in one call. Each record goes to one kernel.

    graph, leftover = join(graph, {"forward": records})

Records are kernels, copies and memsets in the order in which they ran (compare.measure.clock.DeviceRecord). Compiled
kernels are known by name. A library call runs kernels that the library chooses: one main kernel, with memsets, copies
and helpers around it. Both sequences are in launch order, so the join is their cheapest monotone alignment. A record
without a kernel is left over, and so is one that only a guess could place. Eager PyTorch needs no such search, because
a device has already told which kernels each operation launches.

XLA runs one compiled kernel for all equal fusions of a module, under the first one's name. Such a record is joined by
its place, if both kernels have one kind and move equal bytes. CUPTI also reports about 1% of XLA's kernels under the
name of an earlier module's kernel: 8 of 791 on an H200 (jax 0.11.2, cupti-python 13.0.1), while XLA's list of thunks
has the right names. These are joined by their place, too. `facts["ran_as"]` has the reported name in both cases.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from ...backends import worker_of
from ...base.exchange_kernels import PEER_COPY, moves_between_gpus
from ..model import FusionGraph, Kernel
from .measured import measured
from .sequence_alignment import Fit, Slot, align_sequences

MEMSET, MEMCPY = "[memset]", "[memcpy]"

# Kernels that a library launches before and after its main kernel.
BEFORE = re.compile(
    r"\[mem(set|cpy)\]|dot_do_o|prepare_varlen|bwd_preprocess|prepare_grouped_gemm|philox::unpack", re.I
)
AFTER = re.compile(
    r"splitK_?reduce|execute_split_k|convert_d[qk]|matmul_dq|fmha_(reduce_head|dbias)|lean_reduction|splitkv_combine"
    r"|reduce_1Block|bwd_postprocess|bwd_convert", re.I,
)
# A library's product that is split along the summed dimension, and the kernel that adds up its partial sums.
SPLIT_K = re.compile(r"splitK_?reduce|execute_split_k|nvjet\w*_splitK", re.I)
GEMM = re.compile(r"nvjet|gemm|cutlass|gemv|cublas|^sm\d+_xmma|splitK|\bdot_kernel", re.I)
ATTENTION = re.compile(r"flash|fmha|sdpa|attention|cudnn", re.I)
LIBRARY = re.compile(r"^(_ZN|void )?.*(at6native|at::native|cudnn|cub|thrust)|_GLOBAL__N|flash|fmha|^nccl", re.I)
# Names that XLA gives to kernels of fusions, and of single operations that it wraps into one.
XLA = re.compile(r"^(wrapped|loop|input|gemm|transpose|concatenate|scatter)_\w+$|^fusion(_\d+)?$|fusion(_\d+)?$")

# Library calls with several main kernels: torch._inductor.kernel.mm_plus_mm is two products.
MAIN_KERNELS = {"extern_kernels._mm_plus_mm": 2}
# Library calls whose sizes set the number of main kernels: the passes of a radix sort, with memsets between them.
ANY_NUMBER = re.compile(r"\baten\.(sort|topk)\b|\bcub_sort")


class Record(Protocol):
    """One kernel, copy or memset that the GPU ran; times in seconds.

    It may also have `bytes`, and fields of `xlafuse.compare.graph.model.Launch`.
    """

    @property
    def name(self) -> str: ...

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


def duration_us(record: Record) -> float:
    return (record.end - record.start) * 1e6


def join(graph: FusionGraph, records: Mapping[str, Sequence[Record]]) -> tuple[FusionGraph, tuple[Record, ...]]:
    """Return the graph with `device_time_us`, `launch` and the `runtime_name` of library calls, and leftover records.

    records: of one call, by phase; kernels in a loop repeat in order. Join each phase once: afterwards library calls
    have names, and their helpers no longer match. Raises ValueError if the graph has no kernels (give `from_eager` the
    kernels of each operation instead).
    """
    joined, leftover = assign(graph, records)
    kernels = tuple(
        _with_time(kernel, joined[index]) if index in joined else kernel
        for index, kernel in enumerate(graph.kernels or ())
    )
    return replace(graph, kernels=kernels), leftover


def assign(
    graph: FusionGraph, records: Mapping[str, Sequence[Record]]
) -> tuple[dict[int, list[Record]], tuple[Record, ...]]:
    """Return the records of each kernel, by launch index, and the leftover ones; see `join`."""
    if graph.kernels is None:
        raise ValueError(f"{graph.name} has operations and no kernels: give from_eager what each operation launched")
    joined: dict[int, list[Record]] = {}
    leftover: list[Record] = []
    for phase, ran in records.items():
        indices = [index for index, kernel in enumerate(graph.kernels) if kernel.phase == phase]
        if graph.compiler == "eager":
            found, rest = _side_by_side({index: _all_launches(graph.kernels[index]) for index in indices}, ran)
        else:
            found, rest = [], []
            for some, records_of_some in _with_exchanges_apart(graph.kernels, indices, ran):
                pairs, others = _align(graph, _slots(graph.kernels, some), records_of_some)
                found += pairs
                rest += others
        leftover += rest
        for index, record in found:
            joined.setdefault(index, []).append(record)
    return joined, tuple(leftover)


def _with_exchanges_apart(
    kernels: Sequence[Kernel], indices: Sequence[int], ran: Sequence[Record]
) -> Iterator[tuple[Sequence[int], Sequence[Record]]]:
    """Yield kernels and records of computation, and those of exchanges between GPUs, which run beside them.

    Each keeps its order, but an exchange may start before a kernel that was launched earlier.
    """
    exchanges = [index for index in indices if kernels[index].kind == "collective"]
    if not exchanges:
        yield indices, ran
        return
    computing = [record for record in ran if not moves_between_gpus(record.name)]
    yield [index for index in indices if index not in exchanges], computing
    yield exchanges, [record for record in ran if moves_between_gpus(record.name)]


def _all_launches(kernel: Kernel) -> Counter[str]:
    """Return the kernels that an operation of eager PyTorch launches, by name, as `from_eager` recorded them."""
    return Counter({kernel.runtime_name or "": kernel.launches or 0}) + Counter(kernel.facts.get("with", {}))


def _side_by_side(
    launches: Mapping[int, Counter[str]], records: Sequence[Record]
) -> tuple[list[tuple[int, Record]], list[Record]]:
    """Return (kernel index, record) pairs and the leftover records of operations that run one after the other.

    An operation takes adjacent records that are exactly its launches, in any order.
    """
    names, operations = [record.name for record in records], list(launches.items())
    owners: list[int | None] = [None] * len(names)
    at = 0
    while operations:  # while all records match, no search is needed
        index, expected = operations[0]
        end = at + expected.total()
        if Counter(names[at:end]) != expected:
            break
        owners[at:end] = [index] * (end - at)
        del operations[0]
        at = end
    for index, begin, end in _fewest_left_over(operations, names[at:]):
        owners[at + begin : at + end] = [index] * (end - begin)
    pairs = [(owner, record) for owner, record in zip(owners, records, strict=True) if owner is not None]
    return pairs, [record for owner, record in zip(owners, records, strict=True) if owner is None]


def _fewest_left_over(
    operations: Sequence[tuple[int, Counter[str]]], names: Sequence[str]
) -> Iterator[tuple[int, int, int]]:
    """Yield (kernel index, begin, end) of each operation's records, with the fewest records left over."""

    def begin_of(expected: Counter[str], end: int) -> int | None:
        begin = end - expected.total()
        return begin if 0 <= begin < end and Counter(names[begin:end]) == expected else None

    # fewest[i][j]: the fewest of the first j records that the first i operations leave over.
    fewest = [list(range(len(names) + 1))]
    for _, expected in operations:
        row = [0]
        for j in range(1, len(names) + 1):
            begin = begin_of(expected, j)
            row.append(min(fewest[-1][j], row[-1] + 1, *(() if begin is None else (fewest[-1][begin],))))
        fewest.append(row)
    i, j = len(operations), len(names)
    while i and j:
        index, expected = operations[i - 1]
        begin = begin_of(expected, j)
        if begin is not None and fewest[i][j] == fewest[i - 1][begin]:
            yield index, begin, j
            i, j = i - 1, begin
        elif fewest[i][j] == fewest[i - 1][j]:
            i -= 1
        else:
            j -= 1


def _slots(kernels: Sequence[Kernel], indices: Sequence[int]) -> list[Slot]:
    """Return the main kernels of one call, in launch order."""
    slots: list[Slot] = []
    for slot in _in_launch_order([(index, kernels[index].launches) for index in indices]):
        kernel = kernels[slot.kernel]
        called = f"{kernel.name} {kernel.facts.get('custom_call_target', '')}"
        any_number = slot.any_number or (kernel.runtime_name is None and bool(ANY_NUMBER.search(called)))
        idle = slot.any_number or kernel.bytes_read == kernel.bytes_written == 0
        slots += [Slot(slot.kernel, any_number, idle)] * MAIN_KERNELS.get(kernel.name, 1)
    return slots


def _in_launch_order(kernels: Sequence[tuple[int, int | None]]) -> list[Slot]:
    """Return single launches; adjacent kernels with several launches are a loop's body, which may contain loops."""
    slots: list[Slot] = []
    position = 0
    while position < len(kernels):
        index, launches = kernels[position]
        if launches is None or launches <= 1:
            slots += [Slot(index, launches is None)] if launches != 0 else []
            position += 1
            continue
        body = []
        while position < len(kernels) and (kernels[position][1] or 0) > 1:
            body.append((kernels[position][0], kernels[position][1] or 0))
            position += 1
        trips = min(launches for _, launches in body)
        if all(launches % trips == 0 for _, launches in body):
            slots += _in_launch_order([(index, launches // trips) for index, launches in body]) * trips
        else:
            slots += [Slot(index) for index, launches in body for _ in range(launches)]
    return slots


def _align(
    graph: FusionGraph, slots: Sequence[Slot], records: Sequence[Record]
) -> tuple[list[tuple[int, Record]], list[Record]]:
    """Return the cheapest monotone alignment as (kernel index, record) pairs, and the leftover records.

    A library call takes helper records before and after its main kernel.
    """
    kernels = graph.kernels or ()
    keys = [_RecordKey.of(record) for record in records]
    fits = _Fits(graph.compiler, [kernels[slot.kernel] for slot in slots])
    if len(slots) == len(records) and not any(slot.any_number for slot in slots):
        pairs = [(slot.kernel, record) for slot, record in zip(slots, records, strict=True)]
        if all(fits.main(kernels[slot.kernel], key) == 0 for slot, key in zip(slots, keys, strict=True)):
            return pairs, []  # nothing is cheaper, so hundreds of kernels need no search
    placed = align_sequences(slots, keys, lambda index, key: fits.fit(kernels[index], key))
    _withdraw_guesses(kernels, slots, keys, placed, fits)
    pairs = [(slots[at].kernel, record) for at, record in zip(placed, records, strict=True) if at is not None]
    return pairs, [record for at, record in zip(placed, records, strict=True) if at is None]


def _withdraw_guesses(
    kernels: Sequence[Kernel], slots: Sequence[Slot], keys: Sequence[_RecordKey], placed: list[int | None], fits: _Fits
) -> None:
    """Undo the placement of adjacent library calls that ran more or fewer kernels than calls: it would be a guess."""
    start = 0
    while start < len(slots):
        end = start + 1
        if kernels[slots[start].kernel].runtime_name is not None:
            start = end
            continue
        while end < len(slots) and kernels[slots[end].kernel].runtime_name is None:
            end += 1
        joined = [i for i, at in enumerate(placed) if at is not None and start <= at < end]
        worked = {placed[i] for i in joined if fits.main(kernels[slots[placed[i] or 0].kernel], keys[i]) is not None}
        low = max((i for i, at in enumerate(placed) if at is not None and at < start), default=-1)
        high = min((i for i, at in enumerate(placed) if at is not None and at >= end), default=len(keys))
        rivals = [
            i for i in range(low + 1, high) if placed[i] is None
            and any(fits.main(kernels[slot.kernel], keys[i]) is not None for slot in slots[start:end])
        ]
        idle = [at for at in range(start, end) if at not in worked and not slots[at].any_number]
        if rivals or any(kernels[slots[at].kernel].bytes_written != 0 for at in idle):
            for i in joined:
                placed[i] = None
        start = end


class _RecordKey(NamedTuple):
    """The properties of a record that identify its kernel."""

    name: str
    grid: tuple[int, ...] | None
    bytes: int | None = None  # of a copy

    @classmethod
    def of(cls, record: Record) -> _RecordKey:
        grid = getattr(record, "grid", None)
        return cls(record.name, None if grid is None else tuple(grid), getattr(record, "bytes", None))


_Profile = tuple[int | None, int | None, str]  # bytes read and written, kind


class _Fits:
    """The ways in which a record can belong to a kernel."""

    def __init__(self, compiler: str, kernels: Iterable[Kernel]) -> None:
        self._xla = worker_of(compiler) == "xla"
        self._named: dict[str, set[_Profile]] = {}
        for kernel in kernels:
            if kernel.runtime_name:
                self._named.setdefault(kernel.runtime_name, set()).add(_profile(kernel))

    def fit(self, kernel: Kernel, key: _RecordKey) -> Fit:
        main = self.main(kernel, key)
        if kernel.runtime_name is not None:
            helps = _helps_a_sort(kernel, key.name)
            return Fit(helps and key.name == MEMCPY, helps and key.name != MEMCPY, main)
        helper = key.name not in self._named
        before, after = helper and BEFORE.search(key.name), helper and AFTER.search(key.name)
        return Fit(bool(before), bool(after), main)

    def main(self, kernel: Kernel, key: _RecordKey) -> float | None:
        """Return the cost of taking the record for the kernel itself; None if it cannot be that."""
        name = key.name
        if kernel.runtime_name is None:
            return self._library(kernel, key)
        if name == kernel.runtime_name:
            return 0.0 if _same_grid(kernel, key) else None
        # The graphs of committed runs give XLA's asynchronous copies of slices the kind "elementwise".
        copies = kernel.kind == "copy" or kernel.facts.get("opcode") == "fusion-start"
        if (name == MEMCPY and copies) or (name == MEMSET and kernel.kind == "memset"):
            return 1.0  # the driver may run it
        if not self._xla:
            return None
        if name in self._named:
            mine = _profile(kernel)
            return 1.0 if any(_may_be_equal(mine, other) for other in self._named[name]) else None
        return 2.0 if XLA.search(name) else None

    def _library(self, kernel: Kernel, key: _RecordKey) -> float | None:
        name = key.name
        if name in self._named:
            return None
        if kernel.kind == "collective":
            moves = key.bytes in (None, kernel.bytes_written) if name == PEER_COPY else moves_between_gpus(name)
            return 0.0 if moves else None
        if name in (MEMCPY, MEMSET):
            return 0.0 if kernel.kind in ("copy", "memset", "scatter") else None
        if AFTER.search(name) or BEFORE.search(name):
            return None
        if kernel.kind == "gemm":
            return 0.0 if GEMM.search(name) else 3.0 if LIBRARY.search(name) else None
        if kernel.kind == "attention":
            return 0.0 if ATTENTION.search(name) else None
        return 0.0 if LIBRARY.search(name) else 1.0 if GEMM.search(name) else None


def _same_grid(kernel: Kernel, key: _RecordKey) -> bool:
    """Return whether a launch of a hand-written kernel has the record's grid. A compiled kernel has a name of its own,
    and a GPU may have chosen another grid than the compile in the graph.
    """
    return "language" not in kernel.facts or None in (key.grid, kernel.launch.grid) or key.grid == kernel.launch.grid


def _helps_a_sort(kernel: Kernel, name: str) -> bool:
    """Return whether the record is a step of XLA's sort: [memcpy], sort_0_1, sort_0_1__1, sort_0_1__2."""
    if "sort" not in (kernel.facts.get("opcode"), *kernel.facts.get("opcodes", ())):
        return False
    own, _, stage = name.rpartition("__")
    return name == MEMCPY or (own == kernel.runtime_name and stage.isdigit())


def _profile(kernel: Kernel) -> _Profile:
    return kernel.bytes_read, kernel.bytes_written, kernel.kind


def _may_be_equal(one: _Profile, other: _Profile) -> bool:
    return all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def _with_time(kernel: Kernel, records: Sequence[Record]) -> Kernel:
    names = list(dict.fromkeys(record.name for record in records))
    if kernel.runtime_name is None:
        main = main_name(names)
        helpers = Counter(record.name for record in records if record.name != main)
    else:
        main = kernel.runtime_name
        helpers = Counter(record.name for record in records if _helps_a_sort(kernel, record.name))
    facts = {**kernel.facts, "with": dict(helpers)} if helpers else kernel.facts
    others = set(facts.get("with", {})) - {main}
    if not {main, *others}.issuperset(names):
        facts = {**facts, "ran_as": names}
    launch = measured(kernel.launch, [record for record in records if record.name not in others])
    time = sum(map(duration_us, records))
    return replace(kernel, device_time_us=time, runtime_name=main, launch=launch, facts=facts)


def main_name(names: Sequence[str]) -> str:
    """Return the main kernel among those of one library call; the others prepared or finished its work."""
    return next((name for name in names if not BEFORE.search(name) and not AFTER.search(name)), names[0])
