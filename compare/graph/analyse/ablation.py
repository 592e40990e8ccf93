"""The savings of fusion: a compiler's graph compared with the graph of the same program without fusion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from ..buffer_edges import connected
from ..model import FusionGraph, Kernel, Phase, SourceOp
from ..operations import token
from .align import phase_of
from .totals import Tally, declared_bytes, difference, tally


@dataclass(frozen=True)
class KernelGroup:
    """Kernels of one graph, by launch index, with the sums of one call.

    declared: bytes. device_time_us: None where no kernel was measured.
    """

    kernels: tuple[int, ...]
    launches: Tally
    declared: Tally
    device_time_us: Tally | None


@dataclass(frozen=True)
class Region:
    """Kernels of both graphs that hold the same operations.

    Two fused kernels that compute the same operation share a region. stages, phases: of the fused kernels, in order of
    appearance.
    """

    stages: tuple[str, ...]
    fused: KernelGroup
    unfused: KernelGroup
    phases: tuple[Phase, ...] = ()

    @property
    def bytes_saved(self) -> float | None:
        """Bytes that fusion saves; None where a kernel's bytes are unknown."""
        return difference(self.unfused.declared, self.fused.declared)

    @property
    def time_saved_us(self) -> float | None:
        """Time that fusion saves; None unless all kernels of both graphs were measured."""
        return difference(self.unfused.device_time_us, self.fused.device_time_us)


@dataclass(frozen=True)
class Ablation:
    """The comparison of two graphs.

    total: both graphs as one region.
    regions: sorted by bytes saved, largest first.
    only_fused, only_unfused: kernels without an operation in common with the other graph. Each kernel is in one region
        or in one of these.
    """

    total: Region
    regions: tuple[Region, ...]
    only_fused: tuple[int, ...]
    only_unfused: tuple[int, ...]


def ablation(fused: FusionGraph, unfused: FusionGraph) -> Ablation:
    """Compare each fused kernel with the unfused kernels of the same operations.

    Operations are matched by site. A kernel whose sites are all unknown to the other graph is matched by line and name,
    or else by stage. Raises ValueError if a graph has operations only.
    """
    if fused.kernels is None or unfused.kernels is None:
        raise ValueError("an ablation needs the kernels of both graphs; one of them has operations only")
    groups = _groups(fused.kernels, unfused.kernels)
    regions = [_region(fused, unfused, sorted(left), sorted(right)) for left, right in groups]
    regions.sort(key=lambda region: -(region.bytes_saved or 0))
    held_left = {index for left, _ in groups for index in left}
    held_right = {index for _, right in groups for index in right}
    everything = range(len(fused.kernels)), range(len(unfused.kernels))
    return Ablation(
        _region(fused, unfused, *everything),
        tuple(regions),
        tuple(index for index in everything[0] if index not in held_left),
        tuple(index for index in everything[1] if index not in held_right),
    )


# Identities of an operation within its phase, the strongest first; "" where that is unknown.
_IDENTITIES: tuple[Callable[[SourceOp], Hashable], ...] = (
    lambda op: op.site, lambda op: op.line and (op.line, token(op.op)), lambda op: op.stage,
)


def _groups(left: Iterable[Kernel], right: Iterable[Kernel]) -> list[tuple[set[int], set[int]]]:
    """Return the connected components of kernels of both graphs that hold a common operation."""
    sides = list(left), list(right)
    edges: set[tuple[int, int]] = set()
    for identity in _IDENTITIES:
        found = _edges(sides, identity)
        linked = {a for a, _ in edges}, {b for _, b in edges}
        # A weaker identity only matches kernels that no stronger one matched.
        edges |= {(a, b) for a, b in found if a not in linked[0] or b not in linked[1]}
    groups = connected(((0, a), (1, b)) for a, b in sorted(edges))
    return [({i for side, i in group if side == 0}, {i for side, i in group if side == 1}) for group in groups]


def _edges(
    sides: tuple[list[Kernel], list[Kernel]], identity: Callable[[SourceOp], Hashable]
) -> set[tuple[int, int]]:
    holders: dict[Hashable, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for side, kernels in enumerate(sides):
        for index, kernel in enumerate(kernels):
            for op in kernel.source_ops:
                if key := identity(op):
                    holders[phase_of(kernel, op), key][side].add(index)
    return {(a, b) for left, right in holders.values() for a in left for b in right}


def _region(fused: FusionGraph, unfused: FusionGraph, left: Iterable[int], right: Iterable[int]) -> Region:
    groups = _kernel_group(fused, tuple(left)), _kernel_group(unfused, tuple(right))
    kernels = [(fused.kernels or ())[index] for index in groups[0].kernels]
    stages = dict.fromkeys(stage for kernel in kernels for stage in kernel.stages)
    phases = dict.fromkeys(phase_of(kernel, op) for kernel in kernels for op in kernel.source_ops)
    return Region(tuple(stages), *groups, phases=tuple(phases))


def _kernel_group(graph: FusionGraph, indices: tuple[int, ...]) -> KernelGroup:
    kernels = [(graph.kernels or ())[index] for index in indices]
    times = [kernel.device_time_us for kernel in kernels]
    measured = any(time is not None for time in times)
    return KernelGroup(
        indices,
        tally(kernel.launches for kernel in kernels),
        tally(map(declared_bytes, kernels)),
        tally(times) if measured else None,
    )
