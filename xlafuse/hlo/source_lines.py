"""The source operations of HLO instructions, from the op_name and stack frame that XLA keeps of the user's program."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from xlafuse.hlo.text_reader import Instruction
from xlafuse.hlo.value_numbering import MOVES, NumberedInstruction


@dataclass(frozen=True)
class SourceOp:
    """An operation of the user's program.

    op: the last part of its op_name; the HLO opcode if XLA recorded no op_name.
    stage: the named scopes around it, outermost first ("norm/scale"), "" if none is known.
    line: "file:line" of its innermost recorded frame. place: its innermost frame outside libraries, with columns and
        function, as `stack_frames.place_of` writes it.
    site: an identity, equal in two kernels that both compute this operation: op_name and frame. A number follows if the
        same line ran several times during tracing, on other operands (layers built in a loop). "" without op_name.
    backward: its op_name says that it is a transpose.
    rematerialized: it repeats a forward operation, by checkpointing or by XLA's rematerialisation pass.
    """

    op: str
    stage: str = ""
    line: str = ""
    site: str = ""
    backward: bool = False
    rematerialized: bool = False
    place: str = ""


@dataclass
class SourceOpFinder:
    """A finder of source operations in one module; it remembers the value numbers of each operation.

    arguments: the framework's names of entry parameters; copies and transposes of parameters inherit them.
    """

    arguments: frozenset[str]
    _instances: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _stages: dict[str, str] = field(default_factory=dict)

    def find(self, work: Iterable[NumberedInstruction]) -> tuple[SourceOp, ...]:
        """Return the source operations in a kernel, each once; XLA makes several instructions of one.

        Two sorts of instructions count only if the kernel holds nothing else:

        - broadcasts and reshapes, which prepare an operand;
        - copies named after a computation, which they do not compute: XLA copies a quotient into another layout and
          calls the copy "div". Such a copy counts by its opcode.
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
            if instruction.opcode not in MOVES:  # an instruction that moves data has not computed it
                computed.append(expression)
        return tuple(self._source_op(instruction, computed) for instruction, computed in found.values())

    def _op_name(self, instruction: Instruction) -> str:
        return "" if instruction.op_name in self.arguments else instruction.op_name

    def _borrows(self, instruction: Instruction) -> bool:
        """Return whether an instruction moves data under the name of an operation that computes."""
        name = self._op_name(instruction)
        return bool(name) and instruction.opcode in MOVES and name.rpartition("/")[2] not in _MOVEMENTS

    def _source_op(self, instruction: Instruction, expressions: list[int]) -> SourceOp:
        op_name = self._op_name(instruction)
        rematerialized = "rematted_computation" in op_name or bool(_XLA_REMAT.search(instruction.name))
        if not op_name:
            return SourceOp(
                instruction.opcode, line=instruction.source, rematerialized=rematerialized, place=instruction.place
            )
        if self._borrows(instruction):
            # XLA concatenates the operands of merged products and names the result after one of them.
            merges = instruction.opcode == "concatenate"
            return SourceOp(
                instruction.opcode,
                stage="" if merges else self._stage(op_name),
                line="" if merges else instruction.source,
                backward=_is_backward(op_name),
                rematerialized=rematerialized,
                place="" if merges else instruction.place,
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
            place=instruction.place,
        )

    def _stage(self, op_name: str) -> str:
        scopes = op_name.rpartition("/")[0]
        if scopes not in self._stages:
            self._stages[scopes] = stage_of(op_name)
        return self._stages[scopes]

    def _instance(self, site: tuple[str, str], expressions: list[int]) -> int:
        """Return which operation of this name and frame it is, counted from 1; equal values are one operation."""
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
    """Return the operations in the epilogue of a cuBLAS call, read from its configuration; they have no op_name."""
    if not instruction.custom_call_target.startswith("__cublas"):
        return ()
    added = ["add"] if (beta := _BETA.search(instruction.backend_config)) and float(beta[1]) != 0 else []
    epilogue = _EPILOGUE.search(instruction.backend_config)
    if epilogue and epilogue[1] != "DEFAULT":
        added += epilogue[1].lower().split("_")
    return tuple(SourceOp(op) for op in added)


# The last parts of op_names of jax primitives that move data and compute nothing.
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
# Parts of op_names that jax's transforms and control flow add; a user's scope with such a name is lost.
_STRUCTURE = frozenset(
    "while body cond closed_call core_call core_closed_call eval_jaxpr checkpoint remat remat2 rematted_computation "
    "custom_vjp_call custom_vjp_call_jaxpr custom_jvp_call custom_jvp_call_jaxpr shard_map".split()
)
_BRANCH = re.compile(r"branch_\d+_fun$")


def stage_of(op_name: str) -> str:
    """Return an op_name's named scopes, joined by "/": "jit(f)/transpose(jvp(norm))/scale/mul" -> "norm/scale"."""
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
