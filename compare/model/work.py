"""The FLOPs of a model's own work in a step: without recomputation, and without what a mask hides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..spec.blocks import BLOCKS
from .parts import Part, Piece
from .step import Step
from .used_blocks import UsedBlock

_MOST_UNKNOWN = 0.05  # of the time: products of unknown FLOPs with more of it hide the rate
_FORWARD_AND_BACKWARD = 3  # the gradient of a product is two products of its size


def model_flops(step: Step, blocks: Sequence[UsedBlock]) -> float | None:
    """Return the FLOPs of the model's own work in a step; None where kernels with products, or outside of graphs, hide
    theirs.

    The work of attention is that of its sizes, since a library does not state it and products above a causal mask's
    diagonal are none. Other FLOPs are those of compiled kernels. Where only those of forward are known, forward and
    backward together are three times these.
    """
    attention = [used for used in blocks if used.block == "attention"]
    own = {(piece.graph, piece.index) for used in attention for piece in used.pieces}
    others = [piece for piece in step.pieces if (piece.graph, piece.index) not in own and piece.phase != "recompute"]
    forward = [piece for piece in others if piece.phase == "forward"]
    times = _FORWARD_AND_BACKWARD if len(forward) < len(others) else 1
    work = times * sum(map(_forward_flops, attention))
    if _unknown_us(others) <= _MOST_UNKNOWN * step.time_us:
        return work + sum(piece.flops for piece in others)
    if _unknown_us(forward) <= _MOST_UNKNOWN * step.time_us:
        return work + times * sum(piece.flops for piece in forward)
    return None


def part_flops(step: Step, blocks: Sequence[UsedBlock]) -> dict[str, float | None]:
    """Return the FLOPs of each part's own work, by its key; None where products hide theirs.

    As for the whole model, products above a causal mask's diagonal are none, and a backward pass that hides its
    products counts as two times forward.
    """
    masked = {
        (piece.graph, piece.index) for used in blocks if used.block == "attention" and used.sizes.get("causal")
        for piece in used.pieces if piece.kernel.kind == "gemm"
    }
    return {part.key: _part_flops(part, masked) for part in step.parts}


def _part_flops(part: Part, masked: set[tuple[str, int]]) -> float | None:
    own = [piece for piece in part.pieces if piece.phase != "recompute"]
    forward = [piece for piece in own if piece.phase == "forward"]

    def work(pieces: Iterable[Piece]) -> float:
        return sum(piece.flops / (2 if (piece.graph, piece.index) in masked else 1) for piece in pieces)

    if not _unknown_us(own):
        return work(own)
    return None if _unknown_us(forward) or not work(forward) else _FORWARD_AND_BACKWARD * work(forward)


def _forward_flops(used: UsedBlock) -> float:
    """Return the FLOPs of a forward call in all layers. A mask that is data hides nothing."""
    return used.layers * BLOCKS[used.block].flops({"causal": 0, "window": 0, **used.sizes})


def _unknown_us(pieces: Iterable[Piece]) -> float:
    """Return the time of kernels whose FLOPs are not known, of those that may have a product; an update has none."""
    return sum(
        piece.time_us for piece in pieces if piece.kernel.flops is None
        and (piece.is_product or not (piece.graph or piece.phase == "update"))
    )
