"""A limit on the instructions that a module runs once all its calls are expanded, and a check for recursion.

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
    """Raise ValueError if a computation calls itself, or if the expanded entry exceeds eight times the module's size
    plus 200,000.

    Sizes count instructions, operands and results.
    """
    own = {name: sum(map(_weight, c.instructions.values())) for name, c in module.computations.items()}
    limit = _ALWAYS_ALLOWED + _MAX_EXPANSION * sum(own.values())
    total: dict[str, int] = {}
    for name in _callees_first(module):
        size = own[name] + sum(total.get(run, 0) for run in _runs(module.computations[name]))
        total[name] = min(size, limit + 1)
    if total.get(module.entry, 0) > limit:
        raise ValueError(
            f"calls in module {module.name[:200]!r} expand its {sum(own.values())} instructions, operands and results "
            f"beyond {limit}; this is no module XLA wrote"
        )


def _callees_first(module: Module) -> Iterator[str]:
    """Yield each computation after those that it names. Raises ValueError where one names itself, also indirectly."""
    done: set[str] = set()
    for first in module.computations:
        pending = [] if first in done else [(first, _named(module.computations[first]))]
        running = {first}
        while pending:
            name, rest = pending[-1]
            called = next(rest, None)
            if called is None:
                pending.pop()
                running.discard(name)
                done.add(name)
                yield name
            elif called in running:
                raise ValueError(
                    f"computation {called[:200]!r} of module {module.name[:200]!r} calls itself"
                    f"{'' if called == name else f' through {name[:200]!r}'}, and HLO has no recursion; "
                    "this is no module XLA wrote"
                )
            elif called in module.computations and called not in done:
                running.add(called)
                pending.append((called, _named(module.computations[called])))


def _named(computation: Computation) -> Iterator[str]:
    return (name for instruction in computation.instructions.values() for _, name in instruction.calls)


def _weight(instruction: Instruction) -> int:
    return 1 + len(instruction.operands) + len(instruction.shapes)


def _runs(computation: Computation) -> Iterator[str]:
    for instruction in computation.instructions.values():
        if instruction.synchronous_opcode in _RUN_COMPUTATIONS:
            for _, name in instruction.calls:
                yield name
