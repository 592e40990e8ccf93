"""Optimized HLO -> the kernels a GPU will launch: what each holds, which source lines it came from, how many
bytes it moves.

Reads text only and needs no framework; see hlo_text for the reader.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from xlafuse.hlo_text import Computation, Instruction, Module, Shape, parse
from xlafuse.hlo_traffic import LIBRARIES, Traffic, calls_library

__all__ = ["Computation", "Instruction", "Kernel", "Kind", "Module", "Shape", "kernels", "parse"]

Kind = Literal[
    "elementwise", "reduction", "gemm", "attention", "copy", "scatter", "collective", "library", "custom"
]


@dataclass(frozen=True)
class Kernel:
    """One entry of the schedule that runs on the GPU.

    name: the HLO instruction's. runtime_name: what the kernel is called when it runs; None where a library
        chooses (cuBLAS). Fusions with equal bodies share one kernel and then all run under the name of one of
        them.
    ops: the source operations inside, in order, each once: the last part of its op_name, or the opcode where
        XLA recorded none.
    stages: the named scopes they came from, outermost first ("norm/mean_square"). lines: "file:line", sorted.
    opcodes: of the HLO instructions inside that compute or move data, in order.
    bytes_read, bytes_written: of one launch, as declared: each distinct operand once (a slice or gather reads
        what it yields, an in-place update writes its update), each result once; a library's scratch space is
        left out.
    launches: in one call of the module; None where that depends on data (a conditional, a loop of unknown
        length).
    tunable: XLA's autotuner chooses its configuration by measuring, where there is a device.
    """

    name: str
    kind: Kind
    ops: tuple[str, ...]
    stages: tuple[str, ...]
    lines: tuple[str, ...]
    opcodes: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    runtime_name: str | None
    launches: int | None
    tunable: bool


_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency partition-id replica-id "
    "opt-barrier domain".split()
)
_MOVES = frozenset(
    "copy transpose reshape slice dynamic-slice dynamic-update-slice concatenate pad reverse broadcast "
    "gather".split()
)
_COLLECTIVES = frozenset(
    "all-reduce all-gather all-to-all reduce-scatter collective-permute collective-broadcast "
    "collective-reduce ragged-all-to-all send recv".split()
)
_GEMMS = frozenset(("dot", "convolution", "scaled-dot", "ragged-dot"))
_LIBRARY_OPS = frozenset(("fft", "cholesky", "triangular-solve"))
_CUSTOM_OPS = frozenset(("sort", "topk", "scan", "rng-bit-generator", "infeed", "outfeed"))
_MAX_VISITS = 1_000_000
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d{1,18})"?\}')


def kernels(module: Module) -> list[Kernel]:
    """The module's kernels in the order of the text.

    Raises ValueError if calls expand beyond a million instructions.
    """
    traffic = Traffic(module)
    found, inside = [], 0
    for computation, instruction, launches in _walk(module):
        found.append(_kernel(module, traffic, computation, instruction, launches))
        inside += len(found[-1].opcodes)
        _check_size(module, inside)
    return found


def _check_size(module: Module, visits: int) -> None:
    if visits > _MAX_VISITS:
        raise ValueError(
            f"calls in module {module.name!r} expand beyond {_MAX_VISITS} instructions; "
            "this is no module XLA wrote"
        )


def _walk(module: Module) -> Iterator[tuple[Computation, Instruction, int | None]]:
    """Every instruction that runs on the GPU, and how often; loops, calls and async wrappers are entered."""
    entry = module.computations.get(module.entry)
    if entry is None:
        return
    stack: list[tuple[Computation, Iterator[Instruction], int | None]] = [
        (entry, iter(entry.instructions.values()), 1)
    ]
    open_names = {entry.name}
    visits = 0
    while stack:
        computation, rest, launches = stack[-1]
        instruction = next(rest, None)
        if instruction is None:
            stack.pop()
            open_names.discard(computation.name)
            continue
        visits += 1
        _check_size(module, visits)
        names, times = _entered(instruction)
        inner = [name for name in names if name in module.computations and name not in open_names]
        if inner:
            product = None if launches is None or times is None else launches * times
            for name in dict.fromkeys(reversed(inner)):
                open_names.add(name)
                callee = module.computations[name]
                stack.append((callee, iter(callee.instructions.values()), product))
        elif instruction.opcode not in _FREE and not instruction.opcode.endswith(("-done", "-update")):
            yield computation, instruction, launches


def _entered(instruction: Instruction) -> tuple[list[str], int | None]:
    """The computations whose instructions run as kernels of their own, and how often."""
    match instruction.opcode:
        case "call":
            return instruction.called("to_apply", "calls"), 1
        case "async-start":
            return instruction.called("calls", "to_apply"), 1
        case "while":
            if trips := _TRIPS.search(instruction.backend_config):  # then the condition is not evaluated
                return instruction.called("body"), int(trips[1])
            return instruction.called("condition") + instruction.called("body"), None
        case "conditional":
            return instruction.called("branch_computations", "true_computation", "false_computation"), None
        case _:
            return [], 1


def _kernel(
    module: Module, traffic: Traffic, computation: Computation, instruction: Instruction, launches: int | None
) -> Kernel:
    inside = _inside(module, instruction)
    work = [part for part in inside if part.opcode not in _FREE and part.opcode != "fusion"] or [instruction]
    kind = _kind(instruction, work)
    library = kind == "library" or calls_library(instruction)
    return Kernel(
        name=instruction.name,
        kind=kind,
        ops=_ops(work) + _library_epilogue(instruction),
        stages=tuple(dict.fromkeys(stage for part in work if (stage := stage_of(part.op_name)))),
        lines=tuple(sorted({part.source for part in work if part.source})),
        opcodes=tuple(part.opcode for part in work),
        bytes_read=traffic.read(computation, instruction),
        bytes_written=traffic.written(computation, instruction),
        runtime_name=None if library else re.sub(r"[.-]", "_", instruction.name),
        launches=launches,
        tunable=_tunable(instruction, kind),
    )


def _inside(module: Module, instruction: Instruction) -> list[Instruction]:
    """The instruction itself, or all of a fusion's, nested fusions included; reducers' bodies are not."""
    if instruction.synchronous_opcode != "fusion":
        return [instruction]
    inside, pending, seen = [], instruction.called("calls"), set()
    while pending:
        name = pending.pop()
        if name in seen or name not in module.computations:
            continue
        seen.add(name)
        for part in module.computations[name].instructions.values():
            inside.append(part)
            if part.opcode == "fusion":
                pending += part.called("calls")
    return inside


def _kind(instruction: Instruction, work: list[Instruction]) -> Kind:
    opcodes = {part.synchronous_opcode for part in work}
    if instruction.synchronous_opcode == "custom-call":
        target = instruction.custom_call_target
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
    return "copy" if opcodes <= _MOVES else "elementwise"


def _tunable(instruction: Instruction, kind: Kind) -> bool:
    """GEMMs and cuDNN calls are tuned; so is a fusion that XLA may hand to its native or its Triton emitter.

    XLA marks the latter while it is the native emitter's. One that tuning moved to Triton (an H200: 1 of 32)
    looks like any Triton fusion and is taken for one.
    """
    if kind == "gemm" or instruction.custom_call_target.startswith("__cudnn"):
        return True
    return '"native_emitter_backend_config"' in instruction.backend_config


def _ops(work: list[Instruction]) -> tuple[str, ...]:
    """One entry for each source operation, of which XLA makes several instructions of its name and site.

    Broadcasts and reshapes only prepare another instruction's operand, so they count where nothing else is
    there.
    """
    telling = [part for part in work if part.opcode not in ("broadcast", "reshape")] or work
    named = dict.fromkeys((part.op_name or part.opcode, part.site or part.source) for part in telling)
    return tuple(op_name.rsplit("/", 1)[-1] for op_name, _ in named)


def _library_epilogue(instruction: Instruction) -> tuple[str, ...]:
    """What a cuBLAS call does beside its product; of that XLA keeps the call's parameters and no op_name."""
    if not instruction.custom_call_target.startswith("__cublas"):
        return ()
    added = ("add",) if (beta := _BETA.search(instruction.backend_config)) and float(beta[1]) != 0 else ()
    epilogue = _EPILOGUE.search(instruction.backend_config)
    return added + (tuple(epilogue[1].lower().split("_")) if epilogue and epilogue[1] != "DEFAULT" else ())


# "beta":1,  and  "epilogue":"BIAS_GELU"
_BETA = re.compile(r'"beta":(\d{1,9}(?:\.\d{1,18})?)')
_EPILOGUE = re.compile(r'"epilogue":"([A-Z_]{1,64})"')
_WRAPPER = re.compile(r"(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)$")
_STRUCTURE = frozenset(
    "while body cond closed_call eval_jaxpr checkpoint remat rematted_computation custom_vjp_call "
    "custom_jvp_call".split()
)


def stage_of(op_name: str) -> str:
    """An op_name's named scopes, joined by "/": "jit(f)/transpose(jvp(norm))/scale/mul" -> "norm/scale"."""
    scopes = []
    for part in op_name.split("/")[:-1]:
        while wrapped := _WRAPPER.match(part):
            part = wrapped[1]
        if (
            part
            and part not in _STRUCTURE
            and "(" not in part
            and "->" not in part
            and not part.startswith("branch_")
        ):
            scopes.append(part)
    return "/".join(scopes)
