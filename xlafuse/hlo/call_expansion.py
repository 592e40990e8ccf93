"""A limit on the instructions that a module runs once all its calls are expanded.

Nested calls can double the count with every computation, so a file of 50 kB can stand for 2^200 instructions. The count
is computed without expanding anything.
"""

from collections.abc import Iterator

from xlafuse.hlo.text_reader import Computation, Instruction, Module

# XLA inlines computations that are called once, and calls the others a few times at most.
_MAX_EXPANSION = 8
_ALWAYS_ALLOWED = 200_000

# Instructions that run the computations they name. The function of a reduction does not count.
_RUN_COMPUTATIONS = frozenset(("call", "async", "while", "conditional", "fusion"))


def check_expansion(module: Module) -> None:
    """Raise ValueError if the expanded entry exceeds eight times the module's size plus 200,000.

    Sizes count instructions, operands and results.
    """
    entry = module.computations.get(module.entry)
    if entry is None:
        return
    own = {name: sum(map(_weight, c.instructions.values())) for name, c in module.computations.items()}
    limit = _ALWAYS_ALLOWED + _MAX_EXPANSION * sum(own.values())
    total: dict[str, int] = {}
    # Each computation is totalled after those that it runs; one that runs itself is not entered again.
    pending: list[tuple[Computation, Iterator[str]]] = [(entry, _runs(entry))]
    running = {entry.name}
    size = dict(own)
    while pending:
        computation, rest = pending[-1]
        name = next(rest, None)
        if name is None:
            pending.pop()
            running.discard(computation.name)
            total[computation.name] = min(size[computation.name], limit + 1)
            if pending:
                size[pending[-1][0].name] += total[computation.name]
        elif name in total:
            size[computation.name] = min(size[computation.name] + total[name], limit + 1)
        elif name in module.computations and name not in running:
            running.add(name)
            pending.append((module.computations[name], _runs(module.computations[name])))
    if total[entry.name] > limit:
        raise ValueError(
            f"calls in module {module.name[:200]!r} expand its {sum(own.values())} instructions, operands and results "
            f"beyond {limit}; this is no module XLA wrote"
        )


def _weight(instruction: Instruction) -> int:
    return 1 + len(instruction.operands) + len(instruction.shapes)


def _runs(computation: Computation) -> Iterator[str]:
    for instruction in computation.instructions.values():
        if instruction.synchronous_opcode in _RUN_COMPUTATIONS:
            for _, name in instruction.calls:
                yield name
