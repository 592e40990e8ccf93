"""Remedies: the change to a part of a step, the gain that measured rows promise, and the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .. import targets
from .advice import ADVICE, SWITCHED_CALLS, TF32, Advice
from .checkpoint import checkpoint, freed_bytes
from .evidence import Evidence, Measured, nearest, tf32_pair
from .parts import Piece, parts
from .places import parse
from .precision import ieee_products, in_tf32
from .step import Step
from .used_blocks import UsedBlock

_LEAST_GAIN = 0.01  # of the step: less is no remedy
_NEARLY = 1.2  # times the fastest measured time: such a block has no remedy
_BELOW = 0.95  # of the roofline time: such a block has kernels that are not known
_KEEP_NOTHING_BETWEEN = ("attention", "attention_bias", "linear_cross_entropy")  # scores, logits
_PASSES = 3  # an update operation by operation moves three times the bytes of one kernel: 21 arrays for 7
_ORDER = {"switch": 0, "library": 1, "kernel": 2}


@dataclass(frozen=True)
class Remedy:
    """A change to kernels of a step.

    layers: how often the step has the block. after_us: device time that the kernels take then. measured: the rows
    behind it; none where the step itself tells the gain. limits: where the change does not apply, and what the program
    does not show. place: the call to change, where it is not the kernels' own. memory_bytes: the change of the step's
    most memory.
    """

    pieces: tuple[Piece, ...]
    layers: int
    advice: Advice
    after_us: float
    measured: tuple[Measured, ...] = ()
    limits: str = ""
    place: str = ""
    memory_bytes: int = 0

    @property
    def evidence(self) -> str:
        return "; ".join(map(str, self.measured)) or "this step's recomputation"

    @property
    def before_us(self) -> float:
        """The kernels' device time in a step."""
        return sum(piece.time_us for piece in self.pieces)

    @property
    def gain_us(self) -> float:
        """The gain, which is never more than the kernels take."""
        return max(0.0, self.before_us - self.after_us)


@dataclass(frozen=True)
class Best:
    """A block that is nearly as fast as the fastest measured implementation.

    least_us: the longer one of that implementation's time and of the roofline time that the block does not undercut.
    """

    used: UsedBlock
    least_us: float


def changes(step: Step, blocks: Sequence[UsedBlock]) -> list[list[Remedy]]:
    """Return the remedies of a step, the block with the largest gain first. Those of one list exclude each other.

    To drop checkpointing presupposes the first remedy of all where it changes what is computed again. TF32 counts the
    products that no other remedy changes. The last ones are bounds: blocks without a remedy, of which an implementation
    was measured that takes less. Nothing is listed below a hundredth of the step, or on a GPU of which no rows are
    recorded.
    """
    target, compiler = targets.of_device(step.device), _compiler(step)
    if target is None or not step.time_us:
        return []
    found = [
        [
            replace(remedy, memory_bytes=-freed_bytes(step, remedy.pieces))
            if remedy.advice.block in _KEEP_NOTHING_BETWEEN else remedy for remedy in of_block
        ]
        for of_block in _with_switches(step, measured_remedies(blocks, compiler, target, step.time_us))
    ]
    taken = [of_block[0] for of_block in found]
    if (dropped := _without_checkpoint(step, taken)) is not None and dropped.gain_us >= _LEAST_GAIN * step.time_us:
        taken.append(dropped)
        found.append([dropped])
    if (faster := _in_tf32(step, taken, compiler, target)) and faster.gain_us >= _LEAST_GAIN * step.time_us:
        taken.append(faster)
        found.append([faster])
    found.sort(key=lambda of_block: -of_block[0].gain_us)
    bounds = filter(None, (_bound(used, target) for used in _others(blocks, taken)))
    worth = [
        bound for bound in bounds
        if bound.gain_us >= _LEAST_GAIN * step.time_us and bound.before_us > _NEARLY * bound.after_us
    ]
    return [*found, *([bound] for bound in sorted(worth, key=lambda bound: -bound.gain_us))]


def _with_switches(step: Step, found: Iterable[Sequence[Remedy]]) -> Iterator[list[Remedy]]:
    """Yield remedies without the switches that change no call of the program: one written out needs an edit."""
    for of_block in found:
        kept = []
        for remedy in of_block:
            callee = SWITCHED_CALLS.get(remedy.advice.switch)
            places = [place for part in parts(remedy.pieces) if (place := parse(part.key)) is not None]
            called = [name for place in places if (name := step.sources.called(place))]
            if callee and called and not any(callee in name for name in called):
                remedy = replace(remedy, advice=replace(remedy.advice, switch="", kind="library"))
            kept.append(remedy)
        yield kept


def at_their_best(step: Step, blocks: Sequence[UsedBlock], made: Sequence[Remedy]) -> list[Best]:
    """Return the blocks of a hundredth of the step or more that need no change, the longest first.

    made: the remedies of the step.
    """
    target = targets.of_device(step.device)
    if target is None:
        return []
    found = []
    for used in _others(blocks, made):
        bound, roofline_us = _bound(used, target), _roofline_us(used, target)
        fast = bound is not None and used.time_us <= _NEARLY * bound.after_us
        if bound and fast and used.time_us >= max(_LEAST_GAIN * step.time_us, _BELOW * roofline_us):
            known = [time for time in (bound.after_us, roofline_us) if time <= used.time_us]
            found.append(Best(used, max(known, default=used.time_us)))
    return found


def measured_remedies(
    blocks: Iterable[UsedBlock], compiler: str, target: str, step_us: float
) -> list[list[Remedy]]:
    """Return the remedies that measured rows stand for, of each block, the block with the largest gain first.

    Within a block a switch comes before a library's call, and that before a kernel. A later one is listed only where it
    gains more. Nothing is listed without a measured row, or below a hundredth of the step.
    """
    found = []
    for used in blocks:
        own: list[Remedy] = []
        for advice in sorted((a for a in ADVICE if (a.block, a.compiler) == (used.block, compiler)), key=_rank):
            remedy = _remedy(used, advice, target)
            least = max([_LEAST_GAIN * step_us, *(1.02 * other.gain_us for other in own)])
            if remedy is not None and remedy.gain_us >= least:
                own.append(remedy)
        if own:
            found.append(own)
    return sorted(found, key=lambda own: -own[0].gain_us)


def _rank(advice: Advice) -> int:
    return _ORDER[advice.kind]


def _remedy(used: UsedBlock, advice: Advice, target: str) -> Remedy | None:
    """Return the remedy of a change; None where no row is measured near, or where not all of its arrays are known."""
    measured = _measured(used, target, advice.row)
    if measured is None or _has_unknown_arrays(used, target):
        return None
    mask = "if its mask, which is data here, is causal" if used.has_unknown_mask else ""
    dropout = ""
    if used.attributes.get("dropout"):
        advice = replace(advice, change=advice.change.replace("is_causal=True", "is_causal=True, dropout_p=..."))
        dropout = "the measured row has no dropout"
    limits = "; ".join(filter(None, [advice.limits, mask, dropout]))
    return Remedy(used.pieces, used.layers, advice, _after_us(used, measured), measured, limits)


def _has_unknown_arrays(used: UsedBlock, target: str) -> bool:
    """Return whether an eager update takes twice what its arrays explain: gradients outside compiled programs."""
    is_eager = used.block == "adamw" and not any(piece.graph for piece in used.pieces)
    return is_eager and used.time_us > 2 * _PASSES * _roofline_us(used, target)


def _bound(used: UsedBlock, target: str) -> Remedy | None:
    """Return what the block gains with the fastest measured implementation; None as for `_remedy`."""
    measured = _measured(used, target)
    if measured is None or _has_unknown_arrays(used, target):
        return None
    advice = Advice(used.block, "", "", f"at most, as the fastest measured {used.block} of any framework", "bound")
    return Remedy(used.pieces, used.layers, advice, _after_us(used, measured), measured)


def _after_us(used: UsedBlock, measured: Iterable[Measured]) -> float:
    return used.layers * sum(row.scaled_us for row in measured)


def _measured(used: UsedBlock, target: str, row: str | None = None) -> tuple[Measured, ...] | None:
    """Return the rows of an implementation, or of the fastest one, that together are a layer; None where one lacks."""
    found = [
        None if evidence is None else evidence.measured_row(evidence.fastest if row is None else row)
        for evidence in _evidence(used, target)
    ]
    known = tuple(measured for measured in found if measured is not None)
    return known if len(known) == len(found) else None


def _roofline_us(used: UsedBlock, target: str) -> float:
    return used.layers * sum(evidence.roofline_us for evidence in _evidence(used, target) if evidence is not None)


def _evidence(used: UsedBlock, target: str) -> Iterator[Evidence | None]:
    """Yield the measured cases that together are a layer of the block.

    A layer takes the row's time in training, or in inference where the step has no backward, and once more the time in
    inference where the step computes it again. A mask that is data counts as causal.
    """
    sizes = {**used.sizes, "causal": 1, "window": 0} if used.has_unknown_mask else used.sizes
    precision = "ieee" if ieee_products(used.pieces) else "tf32"
    for direction in ("train" if "backward" in used.phases else "fwd", *["fwd"] * ("recompute" in used.phases)):
        yield nearest(target, used.block, sizes, used.dtype, direction, precision)


def _compiler(step: Step) -> str:
    """Return the compiler of a step's programs, or "eager" for PyTorch without one; "" where it is unknown."""
    graph = next(iter(step.graphs.values()), None)
    if graph is None:
        return "eager" if step.profile is not None and step.profile.profile.tool == "torch.profiler" else ""
    return graph.compiler


def _in_tf32(step: Step, taken: Sequence[Remedy], compiler: str, target: str) -> Remedy | None:
    """Return the remedy to multiply float32 arrays in TF32, for the products of which those taken change none."""
    changed = _identities(piece for remedy in taken for piece in remedy.pieces)
    products = [piece for piece in ieee_products(step.pieces) if (piece.graph, piece.index) not in changed]
    advice = TF32.get(compiler)
    direction = "train" if any(piece.phase == "backward" for piece in step.pieces) else "fwd"
    pair = None if advice is None else tf32_pair(target, advice.row, direction)
    if advice is None or pair is None or not products:
        return None
    measured = in_tf32(step, products, pair, target)
    return Remedy(tuple(products), step.layers, advice, measured.scaled_us, (measured,))


def _without_checkpoint(step: Step, taken: Sequence[Remedy]) -> Remedy | None:
    """Return the remedy not to compute anything again, after the first one of those taken if that gains more."""
    repeated = checkpoint(step, taken[0].pieces if taken else ())
    presupposes = repeated is not None and bool(taken) and taken[0].gain_us > repeated.time_us
    if not presupposes:
        repeated = checkpoint(step, ())
    if repeated is None:
        return None
    advice = Advice("", "", "", f"{'then ' * presupposes}drop {repeated.name}", "checkpoint")
    return Remedy(
        repeated.pieces, step.layers, advice, 0.0, place=repeated.place,
        memory_bytes=repeated.memory_bytes,
    )


def _others(blocks: Iterable[UsedBlock], taken: Sequence[Remedy]) -> list[UsedBlock]:
    """Return the blocks of which no remedy changes a kernel."""
    changed = _identities(piece for remedy in taken if remedy.advice.kind != "checkpoint" for piece in remedy.pieces)
    return [used for used in blocks if changed.isdisjoint(_identities(used.pieces))]


def _identities(pieces: Iterable[Piece]) -> set[tuple[str, int]]:
    return {(piece.graph, piece.index) for piece in pieces}
