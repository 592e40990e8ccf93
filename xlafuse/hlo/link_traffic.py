"""The bytes that a GPU sends to others in a collective or in one call of a module, by the shapes of the collectives."""

from collections.abc import Callable, Iterable, Mapping

from xlafuse.hlo import gpu_program

# For each collective, the bytes that one of so many GPUs sends of an operand of so many bytes, where each sends its
# data to every other once (all-reduce: a share to every other, and its sum back).
_SENT: Mapping[str, Callable[[int, int], float]] = {
    "all-gather": lambda operand, gpus: operand * (gpus - 1),
    "reduce-scatter": lambda operand, gpus: operand * (gpus - 1) / gpus,
    "all-to-all": lambda operand, gpus: operand * (gpus - 1) / gpus,
    "all-reduce": lambda operand, gpus: 2 * operand * (gpus - 1) / gpus,
    "collective-permute": lambda operand, gpus: operand,
}


def collective_of(opcodes: Iterable[str]) -> str | None:
    """Return the collective among a kernel's opcodes; None without one, or where it sends as many bytes as data say."""
    return next((name for opcode in opcodes if (name := opcode.removesuffix("-start")) in _SENT), None)


def bytes_sent(collective: str, operand: int, gpus: int) -> float:
    """Return the bytes that one of `gpus` GPUs sends of its operand."""
    return _SENT[collective](operand, gpus)


def sent(hlo_text: str) -> int | None:
    """Return the bytes of one call; None where those of a collective are not known."""
    total = 0.0
    for launch in gpu_program.program(gpu_program.parse(hlo_text)).launches:
        if launch.kernel.kind != "collective":
            continue
        kernel, collective = launch.kernel, collective_of(launch.kernel.opcodes)
        if collective is None or not kernel.gpus or kernel.launches is None:
            return None
        total += bytes_sent(collective, kernel.bytes_read, kernel.gpus) * kernel.launches
    return int(total)
