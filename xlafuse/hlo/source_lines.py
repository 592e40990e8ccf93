"""From an HLO instruction back to the operation of the user's program: what XLA keeps of it in op_name and frames."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from xlafuse.hlo.text_reader import Instruction
from xlafuse.hlo.value_numbering import MOVES, NumberedInstruction


@dataclass(frozen=True)
class SourceOp:
    """An operation of the user's program.

    op: the last part of its op_name; the HLO opcode where XLA recorded none. stage: the named scopes around it,
    outermost first ("norm/scale"), "" where none is known. line: "file:line" of its innermost recorded frame.
    site: equal in two kernels where both compute this one operation: op_name and frame, numbered where the same line
    ran several times while tracing, on other operands (layers built in a loop); "" where XLA recorded no op_name.
    backward: op_name says it comes of transposing. rematerialized: it repeats a forward operation, by checkpointing or
    by XLA's own rematerialisation pass.
    """

    op: str
    stage: str = ""
    line: str = ""
    site: str = ""
    backward: bool = False
    rematerialized: bool = False


@dataclass
class Sources:
    """The source operations of one module; it remembers which expressions it has seen of each.

    arguments: the framework's names of entry parameters, which copies and transposes of these inherit.
    """

    arguments: frozenset[str]
    _instances: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _stages: dict[str, str] = field(default_factory=dict)

    def of(self, work: Iterable[NumberedInstruction]) -> tuple[SourceOp, ...]:
        """One for each source operation, of which XLA makes several instructions of its name and site.

        Broadcasts and reshapes only prepare another instruction's operand, and what moves data under the name of a
        computation does not compute it (XLA copies a quotient into another layout and calls the copy "div"). Either
        counts where nothing else is there, the latter by its opcode.
        """
        parts = list(work)
        telling = [
            part for part in parts
            if part.instruction.opcode not in ("broadcast", "reshape") and not self._borrows(part.instruction)
        ] or parts
        found: dict[tuple[str, str], tuple[Instruction, list[int]]] = {}
        for instruction, _, expression in telling:
            name = "" if self._borrows(instruction) else self._op_name(instruction)
            key = name or instruction.opcode, instruction.site or instruction.source
            computed = found.setdefault(key, (instruction, []))[1]
            if instruction.opcode not in MOVES:  # who moves or pads what another kernel computed, does not compute it
                computed.append(expression)
        return tuple(self._source_op(instruction, computed) for instruction, computed in found.values())

    def _op_name(self, instruction: Instruction) -> str:
        return "" if instruction.op_name in self.arguments else instruction.op_name

    def _borrows(self, instruction: Instruction) -> bool:
        """Whether it moves data under the name of an operation that does something else."""
        name = self._op_name(instruction)
        return bool(name) and instruction.opcode in MOVES and name.rpartition("/")[2] not in _MOVEMENTS

    def _source_op(self, instruction: Instruction, expressions: list[int]) -> SourceOp:
        op_name = self._op_name(instruction)
        rematerialized = "rematted_computation" in op_name or bool(_XLA_REMAT.search(instruction.name))
        if not op_name:
            return SourceOp(instruction.opcode, line=instruction.source, rematerialized=rematerialized)
        if self._borrows(instruction):
            # What XLA puts side by side for a merged product it names after neither; the rest serves its namesake.
            merges = instruction.opcode == "concatenate"
            return SourceOp(
                instruction.opcode,
                stage="" if merges else self._stage(op_name),
                line="" if merges else instruction.source,
                backward=_is_backward(op_name),
                rematerialized=rematerialized,
            )
        frame = f"{instruction.source}#{instruction.site}"
        number = self._instance((op_name, frame), expressions)
        return SourceOp(
            op=op_name.rsplit("/", 1)[-1],
            stage=self._stage(op_name),
            line=instruction.source,
            site=f"{op_name}@{frame}" + (f"~{number}" if number > 1 else ""),
            backward=_is_backward(op_name),
            rematerialized=rematerialized,
        )

    def _stage(self, op_name: str) -> str:
        scopes = op_name.rpartition("/")[0]
        if scopes not in self._stages:
            self._stages[scopes] = stage_of(op_name)
        return self._stages[scopes]

    def _instance(self, site: tuple[str, str], expressions: list[int]) -> int:
        """Which operation of that name and frame this is, counted from 1: what shares an expression is the same."""
        instances = self._instances.setdefault(site, {})
        number = next((instances[e] for e in expressions if e in instances), 0)
        if not number:
            number = self._counts[site] = self._counts.get(site, 0) + 1
        for expression in expressions:
            instances.setdefault(expression, number)
        return number


def _is_backward(op_name: str) -> bool:
    return "transpose(" in op_name and "rematted_computation" not in op_name


def library_epilogue(instruction: Instruction) -> tuple[SourceOp, ...]:
    """What a cuBLAS call does beside its product; of that XLA keeps the call's parameters and no op_name."""
    if not instruction.custom_call_target.startswith("__cublas"):
        return ()
    added = ["add"] if (beta := _BETA.search(instruction.backend_config)) and float(beta[1]) != 0 else []
    epilogue = _EPILOGUE.search(instruction.backend_config)
    if epilogue and epilogue[1] != "DEFAULT":
        added += epilogue[1].lower().split("_")
    return tuple(SourceOp(op) for op in added)


# jax's primitives that move data and compute nothing, as an op_name ends.
_MOVEMENTS = frozenset(
    "broadcast_in_dim concatenate copy copy_p dynamic_slice dynamic_update_slice expand_dims gather pad reshape rev "
    "scatter slice split squeeze stack tile transpose unstack".split()
)
# "beta":1,  and  "epilogue":"BIAS_GELU"
_BETA = re.compile(r'"beta":(\d{1,9}(?:\.\d{1,18})?)')
_EPILOGUE = re.compile(r'"epilogue":"([A-Z_]{1,64})"')
# %fusion.5.remat, %dot.remat2, %copy.remat_compressed
_XLA_REMAT = re.compile(r"\.remat(?:\d+|_[a-z]+)?(?:\.|$)")
_MAX_WRAPPERS = 64
_WRAPPER = re.compile(r"(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)$")
# Components that jax's transforms and control flow add; a scope of the user's by one of these names is lost.
_STRUCTURE = frozenset(
    "while body cond closed_call core_call core_closed_call eval_jaxpr checkpoint remat remat2 rematted_computation "
    "custom_vjp_call custom_vjp_call_jaxpr custom_jvp_call custom_jvp_call_jaxpr shard_map".split()
)
_BRANCH = re.compile(r"branch_\d+_fun$")


def stage_of(op_name: str) -> str:
    """An op_name's named scopes, joined by "/": "jit(f)/transpose(jvp(norm))/scale/mul" -> "norm/scale"."""
    scopes = []
    for part in op_name.split("/")[:-1]:
        for _ in range(_MAX_WRAPPERS):
            if not (wrapped := _WRAPPER.match(part)):
                break
            part = wrapped[1]
        if (
            part
            and part not in _STRUCTURE
            and "(" not in part
            and "->" not in part
            and not _BRANCH.match(part)
        ):
            scopes.append(part)
    return "/".join(scopes)
