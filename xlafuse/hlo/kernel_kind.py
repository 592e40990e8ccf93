"""The kind of kernel that an instruction becomes, whether XLA autotunes it, and its name at run time."""

import re
from typing import Literal

from xlafuse.hlo.fusion_bytes import LIBRARIES
from xlafuse.hlo.text_reader import Instruction
from xlafuse.hlo.value_numbering import MOVES

Kind = Literal[
    "elementwise", "reduction", "gemm", "attention", "copy", "scatter", "collective", "library", "custom"
]

_COLLECTIVES = frozenset(
    "all-reduce all-gather all-to-all reduce-scatter collective-permute collective-broadcast "
    "collective-reduce ragged-all-to-all send recv".split()
)
_GEMMS = frozenset(("dot", "convolution", "scaled-dot", "ragged-dot"))
_LIBRARY_OPS = frozenset(("fft", "cholesky", "triangular-solve"))
_CUSTOM_OPS = frozenset(
    ("sort", "topk", "scan", "rng-bit-generator", "infeed", "outfeed", "call", "while", "conditional", "async")
)
# backend_config={name = "add_kernel", ...
_TRITON_NAME = re.compile(r'name\s*=\s*\\?"([\w$]{1,256})')
# metadata={op_name="jit(backward)/transpose(jvp(add_kernel))/mpmd_map" of pl.kernel; of pl.pallas_call, pallas_call
_MOSAIC_NAME = re.compile(r"([\w$]{1,256})\)*/(?:mpmd_map|pallas_call)$")


def kind_of(instruction: Instruction, work: list[Instruction]) -> Kind:
    """Return the kind of kernel. work: the instructions inside that compute or move data."""
    opcodes = {part.synchronous_opcode for part in work}
    if "custom-call" in opcodes:  # a fusion can hold one, to pass it a slice of a buffer
        target = next(part.custom_call_target for part in work if part.synchronous_opcode == "custom-call")
        if target.startswith("__cublas"):
            return "gemm"
        if target.startswith("__cudnn$fmha"):
            return "attention"
        return "library" if target.startswith(LIBRARIES) else "custom"
    if opcodes & _COLLECTIVES:
        return "collective"
    if opcodes & _LIBRARY_OPS:
        return "library"
    if opcodes & _CUSTOM_OPS:
        return "custom"
    if opcodes & _GEMMS:
        return "gemm"
    if opcodes & {"scatter", "select-and-scatter"}:
        return "scatter"
    if opcodes & {"reduce", "reduce-window"}:
        return "reduction"
    return "copy" if opcodes <= MOVES else "elementwise"


def is_tunable(instruction: Instruction, kind: Kind) -> bool:
    """Return whether XLA autotunes a kernel: GEMMs, cuDNN calls, and fusions with a choice between two emitters.

    XLA marks such a fusion as long as the native emitter has it. If tuning moved it to Triton (on an H200 1 of 32), it
    looks like any Triton fusion and counts as not tunable.
    """
    if kind == "gemm" or instruction.custom_call_target.startswith("__cudnn"):
        return True
    return '"native_emitter_backend_config"' in instruction.backend_config


def runtime_name(instruction: Instruction, kind: Kind, work: list[Instruction]) -> str | None:
    """Return the kernel's name at run time; None if a library or the author of a custom call chooses it."""
    if kind == "library" or any(part.synchronous_opcode == "custom-call" for part in work):
        match instruction.custom_call_target:
            case "__gpu$xla.gpu.triton":
                name = _TRITON_NAME.search(instruction.backend_config)
                return name[1] if name else None
            case "mosaic_gpu_v2":
                name = _MOSAIC_NAME.search(instruction.op_name)
                return f"{name[1]}_mosaic_gpu_kernel" if name else None
        return None
    # A sort keeps its own name, even inside a fusion.
    named = next((part for part in work if part.opcode == "sort"), instruction)
    return named.name.replace(".", "_").replace("-", "_")
