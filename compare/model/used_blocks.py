"""The blocks of the suite in a step, with the kernels that they are."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xlafuse.hlo.shape import LONG_NAMES

from ..graph.model import StepPhase
from .parts import Part, Piece
from .places import parse
from .step import Step

if TYPE_CHECKING:
    from .recognise.block import RecognisedBlock

_MOST_OF_A_PART = 0.5  # of its time: then the part is that block's
_ADAM = re.compile(r"AdamW?\.step")
_FEW_KERNELS = 3  # of different kinds: a fused update has no more


@dataclass(frozen=True)
class UsedBlock:
    """A block of the suite in a step, with the kernels that it is.

    sizes: of one layer, by the block's axes. dtype: the long name. layers: how often the step has it. phases: in which
    it occurs. pieces: its kernels. attributes: what the sizes do not say, such as a mask that is data.
    """

    block: str
    sizes: Mapping[str, int]
    dtype: str
    layers: int
    phases: frozenset[StepPhase]
    pieces: tuple[Piece, ...]
    attributes: Mapping[str, Any]

    @property
    def time_us(self) -> float:
        return sum(piece.time_us for piece in self.pieces)

    @property
    def has_unknown_mask(self) -> bool:
        """Return whether it has a mask that the program does not show, because it is data."""
        return self.attributes.get("mask") == "data"


def used_blocks(step: Step) -> list[UsedBlock]:
    """Return the blocks in the programs of a step, that with most time first.

    A part is of a block if most of its time is of kernels that compute some of it; of several blocks, of that which has
    most of it. A line may have several calls: a product on it is of a block only if it is one of the block's own.
    Programs of which a path has the graph alone have no blocks.
    """
    from .recognise.programs import operations_of  # masks need numpy, and readers start faster without it
    from .recognise.recognise import recognise

    alike = [
        (blocks, {(graph, name) for block in blocks for name in block.kernels})
        for graph, program in step.programs.items()
        for blocks in _alike(recognise(operations_of(program)))
    ]
    owned: list[list[Piece]] = [[] for _ in alike]
    for part in step.parts:
        members = [_members(part, kernels) for _, kernels in alike]
        times = [_cost(part, itertools.compress(part.pieces, own)) for own in members]
        most = max(times, default=0.0)
        place = parse(part.key)
        is_a_call = place is not None and place.begin is not None
        for number, own in enumerate(members):
            whole = times[number] == most >= _MOST_OF_A_PART * _cost(part, part.pieces)
            owned[number] += [
                piece for piece, is_member in zip(part.pieces, own, strict=True)
                if (whole if is_a_call or not piece.is_product else is_member)
            ]
    made = [_used(blocks, own) for (blocks, _), own in zip(alike, owned, strict=True) if own] + _eager_optimizers(step)
    return sorted(made, key=lambda used: -used.time_us)


def _eager_optimizers(step: Step) -> list[UsedBlock]:
    """Return Adam's updates that PyTorch runs operation by operation.

    They are of the arrays that compiled programs return with the shapes of their arguments: gradients.
    """
    found = []
    buffers = [buffer for graph in step.graphs.values() for buffer in graph.buffers]
    given, made = (
        Counter((buffer.shape, buffer.dtype) for buffer in buffers if buffer.role == role)
        for role in ("input", "output")
    )
    elements = Counter[str]()
    for (shape, dtype), count in (given & made).items():
        elements[dtype] += math.prod(shape) * count
    for part in step.parts:
        pieces = [piece for piece in part.pieces if not piece.graph]
        if _ADAM.fullmatch(part.key) and len(pieces) > _FEW_KERNELS and elements:
            dtype, count = elements.most_common(1)[0]
            long = LONG_NAMES.get(dtype, dtype)
            found.append(UsedBlock("adamw", {"elements": count}, long, 1, frozenset({"update"}), tuple(pieces), {}))
    return found


def block_of(pieces: Iterable[Piece], blocks: Iterable[UsedBlock]) -> str:
    """Return the block that most of the time of some kernels is of; "" for none."""
    own = list(pieces)
    times: dict[str, float] = {}
    for used in blocks:
        of_block = {(piece.graph, piece.index) for piece in used.pieces}
        time = sum(piece.time_us for piece in own if (piece.graph, piece.index) in of_block)
        times[used.block] = times.get(used.block, 0.0) + time
    name = max(times, key=times.__getitem__, default="")
    return name if times.get(name, 0.0) > _MOST_OF_A_PART * sum(piece.time_us for piece in own) else ""


def _alike(blocks: Iterable[RecognisedBlock]) -> Iterator[list[RecognisedBlock]]:
    """Yield blocks of one name, size and type together: those of all layers and phases."""
    found: dict[object, list[RecognisedBlock]] = {}
    for block in blocks:
        found.setdefault((block.block, tuple(block.sizes.items()), block.dtype), []).append(block)
    yield from found.values()


def _members(part: Part, kernels: set[tuple[str, str]]) -> list[bool]:
    """Return whether each piece of a part is among a block's kernels, or is the same kernel launched again.

    PyTorch names no operations of a product in backward; it is the gradient of the block's products, unless the part
    has others in forward, too.
    """
    named = [(piece.graph, piece.kernel.name) in kernels for piece in part.pieces]
    own = {_base(piece) for piece, is_named in zip(part.pieces, named, strict=True) if is_named}
    pairs = list(zip(part.pieces, named, strict=True))
    has_others = any(
        piece.phase == "forward" and piece.is_product and not is_named for piece, is_named in pairs
    )
    return [
        is_named or (_base(piece) in own and not (has_others and piece.is_product))
        for piece, is_named in pairs
    ]


def _base(piece: Piece) -> tuple[str, str]:
    return piece.graph, piece.kernel.name.partition("#")[0]


def _cost(part: Part, pieces: Iterable[Piece]) -> float:
    """Return the time of pieces of a part; their number where none was timed."""
    return sum(piece.time_us if part.time_us else 1.0 for piece in pieces)


def _used(alike: Sequence[RecognisedBlock], pieces: Sequence[Piece]) -> UsedBlock:
    first, phases = alike[0], frozenset(block.phase for block in alike)
    layers = max(sum(block.phase == phase for block in alike) for phase in phases)
    dtype = LONG_NAMES.get(first.dtype, first.dtype)
    return UsedBlock(first.block, first.sizes, dtype, layers, phases, tuple(pieces), first.attributes)
