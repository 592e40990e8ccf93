"""The bytes that a GPU sends to others in one call of a module, by the shapes of its collectives."""

from collections.abc import Callable, Mapping

from xlafuse.hlo import gpu_program

# For each collective, the bytes that one of `ranks` GPUs sends of an operand of so many bytes, where each sends its
# data to every other once (all-reduce: a share to every other, and its sum back).
_SENT: Mapping[str, Callable[[int, int], float]] = {
    "all-gather": lambda operand, ranks: operand * (ranks - 1),
    "reduce-scatter": lambda operand, ranks: operand * (ranks - 1) / ranks,
    "all-to-all": lambda operand, ranks: operand * (ranks - 1) / ranks,
    "all-reduce": lambda operand, ranks: 2 * operand * (ranks - 1) / ranks,
    "collective-permute": lambda operand, ranks: operand,
}


def sent(hlo_text: str, ranks: int) -> int | None:
    """Return the bytes; None where they depend on data, as those of a ragged exchange do."""
    total = 0.0
    for launch in gpu_program.program(gpu_program.parse(hlo_text)).launches:
        if launch.kernel.kind != "collective":
            continue
        (opcode,) = {opcode.removesuffix("-start") for opcode in launch.kernel.opcodes} or {""}
        if opcode not in _SENT or launch.kernel.launches is None:
            return None
        total += _SENT[opcode](sum(access.bytes for access in launch.reads), ranks) * launch.kernel.launches
    return int(total)
