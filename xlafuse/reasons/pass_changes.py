"""The changes that each XLA pass made, from the module before and after it."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from xlafuse.dumps.dump_folder import Artifacts, Snapshot
from xlafuse.hlo import file_reader
from xlafuse.hlo.text_reader import Instruction, Module
from xlafuse.reasons.fusion_replay import fusion_body, kernel_computations

_SHOWN = 3


@dataclass(frozen=True)
class NewFusion:
    """A fusion that a pass created or extended. opcodes: of its computations, in order, each once."""

    name: str
    opcodes: tuple[str, ...]


@dataclass(frozen=True)
class PassChange:
    """The changes between two snapshots of a module.

    number: XLA's number of the later snapshot.
    first, last: the first and last pass that ran in between. They are equal if the dump has a snapshot right before the
        pass.
    instructions: (before, after), the number of instructions outside of fusions that compute or move data.
    computations: (before, after), their number.
    opcodes: the change in the number of instructions of each opcode in the whole module, including fusions' bodies.
    appeared, vanished: instructions outside of fusions.
    renamed: (old, new) names of instructions that only changed their name.
    custom_calls: (name, target) of new custom calls.
    """

    number: int
    first: str
    last: str
    instructions: tuple[int, int]
    computations: tuple[int, int]
    opcodes: Mapping[str, int] = field(default_factory=dict)
    fusions: tuple[NewFusion, ...] = ()
    appeared: tuple[str, ...] = ()
    vanished: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    custom_calls: tuple[tuple[str, str], ...] = ()
    scheduled: bool = False

    @property
    def passes(self) -> str:
        return self.last if self.first in (self.last, "") else f"{self.first} to {self.last}"

    def __str__(self) -> str:
        """Return a line: "priority-fusion: 23 instructions into 4 fusions; fusion.3 took multiply, rsqrt, convert"."""
        parts = []
        if self.fusions:
            went = len(self.vanished)
            parts.append(f"{_count(went, 'instruction')} into {_count(len(self.fusions), 'fusion')}")
            parts += [f"{made.name} took {_list(made.opcodes, 8) or 'nothing'}" for made in self.fusions[:_SHOWN]]
            if len(self.fusions) > _SHOWN:
                parts.append(f"{len(self.fusions) - _SHOWN} more")
        parts += [f"{name} calls {target}" for name, target in self.custom_calls[:_SHOWN]]
        if len(self.custom_calls) > _SHOWN:
            parts.append(f"{len(self.custom_calls) - _SHOWN} more custom calls")
        if not parts and (changed := sorted(self.opcodes.items(), key=lambda pair: (-abs(pair[1]), pair[0]))):
            parts.append(_list([f"{number:+d} {opcode}" for opcode, number in changed], 6))
        if self.renamed and not self.fusions:
            old, new = self.renamed[0]
            parts.append(f"{len(self.renamed)} renamed ({old} -> {new}{', ...' if len(self.renamed) > 1 else ''})")
        if self.scheduled:
            parts.append("scheduled")
        return f"{self.passes}: {'; '.join(parts) or 'layouts, order or attributes only'}"


def read_pass_changes(source: Artifacts | Iterable[Snapshot]) -> list[PassChange]:
    """Return the changes in order, without passes that changed nothing.

    A dump folder of this project has snapshots only around fusion passes that changed the module; other passes are
    missing. Raises OSError or file_reader.UnreadableHlo if a snapshot cannot be read.
    """
    return list(_changes(source.snapshots() if isinstance(source, Artifacts) else source))


def _changes(snapshots: Iterable[Snapshot]) -> Iterator[PassChange]:
    earlier: tuple[Snapshot, _View] | None = None
    for snapshot in snapshots:
        with snapshot.file.local() as path:
            view = _View.of(file_reader.read(path))
        if earlier is not None:
            change = _change(earlier[1], view, earlier[0].before, snapshot)
            if change is not None and snapshot.after:
                yield change
        earlier = snapshot, view


@dataclass(frozen=True)
class _View:
    """The compared properties of a module; the text also differs in numbering and layouts."""

    kernels: Mapping[str, tuple[Instruction, tuple[object, ...]]]  # name -> instruction, its properties
    took: Mapping[str, tuple[str, ...]]
    opcodes: Counter[str]
    computations: int
    scheduled: bool

    @classmethod
    def of(cls, module: Module) -> "_View":
        kernels: dict[str, tuple[Instruction, tuple[object, ...]]] = {}
        took: dict[str, tuple[str, ...]] = {}
        opcodes: Counter[str] = Counter()
        for computation in kernel_computations(module):
            for name, instruction in computation.instructions.items():
                inside = fusion_body(module, instruction)
                work = [i.opcode for i in inside.instructions.values()] if inside else []
                opcodes.update([instruction.opcode, *work])
                if instruction.opcode in _NO_WORK:
                    continue
                dims = tuple(shape.dims for shape in instruction.shapes)
                kernels[name] = instruction, (instruction.opcode, instruction.custom_call_target, dims, tuple(work))
                if inside is not None:
                    took[name] = tuple(dict.fromkeys(opcode for opcode in work if opcode not in _NO_WORK))
        for opcode in ("parameter", "tuple", "get-tuple-element"):
            del opcodes[opcode]
        return cls(kernels, took, opcodes, len(module.computations), module.is_scheduled)


_NO_WORK = frozenset("parameter constant tuple get-tuple-element bitcast after-all broadcast".split())


def _change(before: _View, after: _View, first: str, snapshot: Snapshot) -> PassChange | None:
    gone = [name for name in before.kernels if name not in after.kernels]
    come = [name for name in after.kernels if name not in before.kernels]
    renamed = _renamed(before, gone, after, come)
    old, new = {pair[0] for pair in renamed}, {pair[1] for pair in renamed}
    appeared = tuple(name for name in come if name not in new)
    grown = [name for name, took in after.took.items() if name in before.took and len(took) > len(before.took[name])]
    opcodes = {
        opcode: number
        for opcode in before.opcodes | after.opcodes
        if (number := after.opcodes[opcode] - before.opcodes[opcode])
    }
    change = PassChange(
        number=snapshot.number,
        first=first,
        last=snapshot.after,
        instructions=(len(before.kernels), len(after.kernels)),
        computations=(before.computations, after.computations),
        opcodes=opcodes,
        fusions=tuple(NewFusion(name, after.took[name]) for name in (*appeared, *grown) if name in after.took),
        appeared=appeared,
        vanished=tuple(name for name in gone if name not in old),
        renamed=tuple(renamed),
        custom_calls=tuple(
            (name, instruction.custom_call_target)
            for name in appeared
            if (instruction := after.kernels[name][0]).opcode == "custom-call"
        ),
        scheduled=after.scheduled and not before.scheduled,
    )
    same = not (change.appeared or change.vanished or renamed or opcodes or change.fusions or change.scheduled)
    return None if same and before.computations == after.computations else change


def _renamed(before: _View, gone: list[str], after: _View, come: list[str]) -> list[tuple[str, str]]:
    """Return (old, new) names of instructions with equal properties, paired in order."""
    left: dict[tuple[object, ...], deque[str]] = {}
    for name in gone:
        left.setdefault(before.kernels[name][1], deque()).append(name)
    pairs = []
    for name in come:
        if names := left.get(after.kernels[name][1]):
            pairs.append((names.popleft(), name))
    return pairs


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _list(words: Iterable[str], most: int) -> str:
    words = list(words)
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
