"""The kind of kernel that an instruction becomes, whether XLA autotunes it, and its name at run time."""

import math
import re
from typing import Literal

from xlafuse.hlo.fusion_bytes import LIBRARIES
from xlafuse.hlo.text_reader import Computation, Instruction
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
_DYNAMIC = frozenset(("dynamic-slice", "dynamic-update-slice"))
# The operations that may compute the index of a slice that XLA copies.
_INDEX = frozenset("parameter constant bitcast reshape add subtract multiply compare select".split())
# slice={[3:4], [0:512:1]}
_STEP = re.compile(r"\[\d+:\d+(?::(\d{1,18}))?\]")
# backend_config={name = "add_kernel", ...
_TRITON_NAME = re.compile(r'name\s*=\s*\\?"([\w$]{1,256})')
# metadata={op_name="jit(backward)/transpose(jvp(add_kernel))/mpmd_map" of pl.kernel; of pl.pallas_call, pallas_call
_MOSAIC_NAME = re.compile(r"([\w$]{1,256})\)*/(?:mpmd_map|pallas_call)$")


def kind_of(instruction: Instruction, work: list[Instruction], body: Computation | None) -> Kind:
    """Return the kind of kernel. work: the instructions inside that compute or move data. body: that of a fusion."""
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
    if opcodes <= MOVES or (body is not None and opcodes & _DYNAMIC and _copies_slice(instruction, body)):
        return "copy"
    return "elementwise"


def _copies_slice(fusion: Instruction, body: Computation) -> bool:
    """Return whether XLA's runtime copies a slice in memory and launches no kernel for this fusion.

    The fusion takes a slice of a parameter, or updates a slice of one with a parameter or with a slice of one. Each
    slice is contiguous, and its offset is constant or linear in the counter of a loop of known length: XLA annotates
    such a dynamic slice. The fusion may compute the index from the counter. Checked against the thunks of jax 0.10.2
    and 0.11.2.
    """
    parts = body.instructions.values()
    if fusion.fusion_kind == "kCustom":  # jax 0.10 inserts an operation for the copy
        return '"dynamic_slice_fusion"' in fusion.backend_config and any(part.opcode == "copy" for part in parts)
    shown: dict[str, Instruction] = {}  # by name; through bitcasts
    for part in parts:
        same = part.opcode in ("bitcast", "reshape") and part.operands
        shown[part.name] = shown.get(part.operands[0], part) if same else part

    def operand(part: Instruction | None, position: int) -> Instruction | None:
        return shown.get(part.operands[position]) if part and position < len(part.operands) else None

    root = body.root
    result = shown[root.name] if root else None
    if result is None or result.opcode not in _DYNAMIC:
        return False
    slices, arrays = [result], [operand(result, 0)]
    if result.opcode == "dynamic-update-slice":
        update = operand(result, 1)
        if update is not None and update.opcode in ("slice", "dynamic-slice"):
            slices.append(update)
            update = operand(update, 0)
        arrays.append(update)
    return (
        all(array is not None and array.opcode == "parameter" for array in arrays)
        and all(_has_known_offset(part, body) for part in slices)
        and all(part.opcode in _INDEX or any(part is each for each in slices) for part in parts)
    )


def _has_known_offset(part: Instruction, body: Computation) -> bool:
    """Return whether a slice is contiguous at an offset that XLA knows before the fusion runs."""
    if part.opcode != "slice":
        return '"dynamic_slice_config"' in part.backend_config
    source, taken = body.operand_shape(part.operands[0]), part.result.shape
    strides = source.strides if source else None
    steps = [int(step or 1) for step in _STEP.findall(part.detail)]
    if strides is None or taken is None or not len(steps) == len(taken.dims) == len(strides):
        return False
    span = sum((size - 1) * step * stride for size, step, stride in zip(taken.dims, steps, strides, strict=True)) + 1
    return span == math.prod(taken.dims)


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
