"""The blocks of the suite in a step, with the parts that they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlafuse.hlo.shape import LONG_NAMES

from ..sources.source import Source
from .parts import Part, Piece
from .phases import StepPhase
from .recognise.block import RecognisedBlock
from .recognise.programs import operations_of
from .recognise.recognise import recognise

_MOST_OF_A_PART = 0.5  # of its time: then the part is that block's


@dataclass(frozen=True)
class Use:
    """A block of the suite in a step, with the parts that it is.

    sizes: of one layer, by the block's axes. dtype: the long name. layers: how often the step has it. phases: in which
    it occurs. attributes: what the sizes do not say, such as a mask that is data.
    """

    block: str
    sizes: Mapping[str, int]
    dtype: str
    layers: int
    phases: frozenset[StepPhase]
    parts: tuple[Part, ...]
    attributes: Mapping[str, Any]

    @property
    def time_us(self) -> float:
        return sum(part.time_us for part in self.parts)


def uses(source: Source, parts: Sequence[Part]) -> list[Use]:
    """Return the blocks in the programs of a source, that with most time first.

    A part is of a block if most of its time is of kernels that compute some of it; of several blocks, of that which has
    more of it. Programs of which a path has the graph alone have no blocks.
    """
    found: list[tuple[list[RecognisedBlock], dict[str, float]]] = []
    for result in source.results:
        if result.program is not None:
            for alike in _alike(recognise(operations_of(result.program()))):
                kernels = {(result.id, name) for block in alike for name in block.kernels}
                found.append((alike, {part.key: _share(part, kernels) for part in parts}))
    made = []
    for number, (alike, shares) in enumerate(found):
        own = [
            part for part in parts
            if shares[part.key] >= _MOST_OF_A_PART and number == _owner(part.key, [shares for _, shares in found])
        ]
        made.append(_use(alike, own))
    return sorted((use for use in made if use.parts), key=lambda use: -use.time_us)


def _alike(blocks: Iterable[RecognisedBlock]) -> Iterator[list[RecognisedBlock]]:
    """Yield blocks of one name, size and type together: those of all layers and phases."""
    found: dict[object, list[RecognisedBlock]] = {}
    for block in blocks:
        found.setdefault((block.block, tuple(block.sizes.items()), block.dtype), []).append(block)
    yield from found.values()


def _share(part: Part, kernels: set[tuple[str, str]]) -> float:
    """Return the share of a part's time, or of its kernels where none was timed, that is of these kernels."""

    def cost(piece: Piece) -> float:
        return piece.time_us if part.time_us else 1.0

    own = sum(cost(piece) for piece in part.pieces if (piece.graph, piece.kernel.name) in kernels)
    return own / (part.time_us or len(part.pieces))


def _owner(key: str, shares: Sequence[Mapping[str, float]]) -> int:
    return max(range(len(shares)), key=lambda number: shares[number][key])


def _use(alike: Sequence[RecognisedBlock], parts: Sequence[Part]) -> Use:
    first, phases = alike[0], frozenset(block.phase for block in alike)
    layers = max(sum(block.phase == phase for block in alike) for phase in phases)
    dtype = LONG_NAMES.get(first.dtype, first.dtype)
    return Use(first.block, first.sizes, dtype, layers, phases, tuple(parts), first.attributes)
