"""Find the pointer parameters that a compiled kernel reads and writes, from Triton's TTIR or from PTX.

Gluon has no TTIR. Its kernels are read from their TTGIR, in which partitions of warps take values from around them.

Both readers follow each pointer parameter to its loads and stores; nothing is executed. A parameter counts as read or
written if any path through the code reads or writes it. Tested with the TTIR of the series of Triton in versions.py and
with the PTX of NVRTC 13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Parameters = frozenset[int]  # positions of parameters that a value may point into
NONE: Parameters = frozenset()
T = TypeVar("T")

READING = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather", "tt.atomic_rmw", "tt.atomic_cas",
           "ttg.async_copy_global_to_local", "ttng.async_tma_copy_global_to_local", "ttng.async_tma_gather")
WRITING = ("tt.store", "tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce",
           "tt.atomic_rmw", "tt.atomic_cas", "ttng.async_tma_copy_local_to_global",
           "ttng.async_tma_scatter", "ttng.async_tma_reduce")

_LOCATION = re.compile(r'\s*loc\((?:"(?:[^"\\]|\\.)*"|\((?:"[^"]*"|[^()])*\)|[^()"])*\)')
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_FUNCTION = re.compile(
    r"tt\.func (?:public |private )?@([\w$.]+)\((.*?)\)(?: -> .*?)?(?: attributes \{[^}]*\})? *\{", re.S
)
_PARAMETER = re.compile(r"(%[\w$.-]+): (!tt\.(?:ptr|tensordesc)|tensor<[^>]*!tt\.ptr)?")
_CARRIED = re.compile(r"(?:iter_args|scf\.while) ?\(([^)]*)\)")
_PARTITION = re.compile(r"(?:default|partition\d+\((.*)\) num_warps\(\d+\)) \{$")
_OPERATION = re.compile(r'(?:(%[\w$.-]+)(?::(\d+))? = )?"?([a-z_]+\.[\w.]+)"?\b')


@dataclass(frozen=True)
class Effects:
    """Positions, among a kernel's parameters, of the pointers through which it reads and writes."""

    reads: Parameters
    writes: Parameters


def without_locations(text: str) -> str:
    """Return MLIR without the source locations of its operations and arguments. `#loc` definitions stay."""
    while (stripped := _LOCATION.sub("", text)) != text:
        text = stripped
    return text


def of_ttir(text: str, name: str) -> Effects:
    """Return the effects of the function `name` in Triton's highest IR.

    Positions count the parameters that the IR still has, so without constexprs. Raises ValueError if there is no such
    function.
    """
    text = without_locations(text)
    starts = list(_FUNCTION.finditer(text))
    module = {
        start.group(1): (_PARAMETER.findall(start.group(2)), text[start.end() :].splitlines())
        for start in starts
    }
    if name not in module:
        raise ValueError(f"TTIR must hold the function {name!r}, found {', '.join(module) or 'none'}")
    summary = _Module(module).summary(name)
    return Effects(summary.reads, summary.writes)


def arguments_in_ir(arguments: Iterable[tuple[T, str]]) -> list[T]:
    """Return the argument of each parameter of the IR, given (argument, type in Triton's signature) in order.

    The IR has no constexprs, and a descriptor's shape and strides follow it as parameters.
    """
    found = []
    for argument, kind in arguments:
        block = re.match(r"tensordesc<[^\[]*\[([^\]]*)\]", kind)
        if kind != "constexpr":
            found += [argument] * (1 + 2 * len(block[1].split(",")) if block else 1)
    return found


@dataclass
class _Summary:
    reads: Parameters = NONE
    writes: Parameters = NONE
    returns: tuple[Parameters, ...] = ()


@dataclass
class _Region:
    """An operation's region: its results, a loop's line number, and the values that its blocks yield."""

    results: tuple[str, ...] = ()
    loop: int | None = None
    yields: list[Parameters] = field(default_factory=list)


class _Module:
    def __init__(self, functions: dict[str, tuple[list[tuple[str, str]], list[str]]]) -> None:
        self._functions = functions
        self._summaries: dict[str, _Summary] = {}

    def summary(self, name: str) -> _Summary:
        if name not in self._summaries:
            self._summaries[name] = _Summary()  # Triton has no recursion
            self._summaries[name] = _Body(self, *self._functions[name]).summary()
        return self._summaries[name]


class _Body:
    """One function. It walks over the lines until the values that loops carry and blocks receive no longer grow."""

    def __init__(self, module: _Module, parameters: list[tuple[str, str]], lines: list[str]) -> None:
        self._module, self._parameters, self._lines = module, parameters, lines
        # (a loop's line or a block's name, position) -> the value that arrives there
        self._kept: dict[tuple[int | str, int], Parameters] = {}

    def summary(self) -> _Summary:
        while True:
            before = dict(self._kept)
            found = self._walk()
            if self._kept == before:
                return found

    def _walk(self) -> _Summary:
        self._values: dict[str, Parameters] = {
            name: frozenset({index}) for index, (name, pointer) in enumerate(self._parameters) if pointer
        }
        self._found = _Summary()
        self._captured: list[Parameters] = []  # by the partitions of warps
        regions: list[_Region] = [_Region()]
        for number, raw in enumerate(self._lines):
            line = raw.strip()
            if line.startswith("^"):
                self._enter_block(line)
            elif partition := _PARTITION.match(line):
                arguments = re.findall(r"(%[\w$.-]+):", partition[1] or "")
                self._values.update(zip(arguments, self._captured, strict=True) if arguments else ())
                regions.append(_Region())
            elif line.startswith("}"):
                region = regions.pop()
                if line.endswith("{"):  # "} else {", "} do {": the next block of the same operation
                    regions.append(region)
                    continue
                for result, value in zip(region.results, region.yields, strict=False):
                    self._values[result] = value
                if not regions:
                    break
            elif match := _OPERATION.match(line):
                region = self._operation(number, line, match, regions)
                if line.endswith("{"):
                    regions.append(region)
        return self._found

    def _operation(self, number: int, line: str, match: re.Match[str], regions: list[_Region]) -> _Region:
        name, count, operation = match.group(1), int(match.group(2) or 1), match.group(3)
        results = () if name is None else (name,) if match.group(2) is None else tuple(
            f"{name}#{i}" for i in range(count))
        rest = line[match.end() :]
        operands = [self._values.get(value, NONE) for value in _VALUE.findall(rest)]
        if operation in READING and operands:
            self._found.reads |= operands[0]
        if operation in WRITING and operands:
            self._found.writes |= operands[0]
        if operation == "ttg.warp_specialize":
            self._captured = operands
        elif operation in ("scf.for", "scf.while"):
            carried = _CARRIED.search(line)
            pairs = re.findall(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)", carried.group(1) if carried else "")
            for index, (argument, start) in enumerate(pairs):
                self._values[argument] = self._values.get(start, NONE) | self._kept.get((number, index), NONE)
            starts = [self._values[argument] for argument, _ in pairs]
            return _Region(results, number, starts)
        if operation in ("scf.yield", "scf.condition"):
            owner = next((r for r in reversed(regions) if r.results or r.loop is not None), regions[-1])
            passed = operands[1:] if operation == "scf.condition" else operands
            self._yield(owner, passed)
            for index, value in enumerate(passed if operation == "scf.condition" else ()):
                self._keep(("bb0", index), value)  # the "do" block's arguments
        elif operation in ("cf.br", "cf.cond_br"):
            for block, values in re.findall(r"\^(\w+)(?:\(([^:)]*))?", rest):
                for index, value in enumerate(_VALUE.findall(values)):
                    self._keep((block, index), self._values.get(value, NONE))
        elif operation == "tt.return":
            self._found.returns = _merged(self._found.returns, operands)
        elif operation == "tt.call":
            self._call(rest, operands, results)
        elif operation not in READING:
            for result in results:
                self._values[result] = frozenset().union(*operands)
        return _Region(results)

    def _yield(self, owner: _Region, operands: Sequence[Parameters]) -> None:
        owner.yields[:] = _merged(tuple(owner.yields), operands)
        for index, value in enumerate(operands if owner.loop is not None else ()):
            self._keep((owner.loop or 0, index), value)

    def _call(self, rest: str, arguments: list[Parameters], results: tuple[str, ...]) -> None:
        callee = re.search(r"@([\w$.]+)", rest)
        summary = self._module.summary(callee.group(1)) if callee else _Summary()

        def outside(inside: Parameters) -> Parameters:
            return frozenset().union(*(arguments[i] for i in inside if i < len(arguments)))

        self._found.reads |= outside(summary.reads)
        self._found.writes |= outside(summary.writes)
        for result, value in zip(results, summary.returns, strict=False):
            self._values[result] = outside(value)

    def _enter_block(self, line: str) -> None:
        label = re.match(r"\^(\w+)", line)
        for index, argument in enumerate(re.findall(r"(%[\w$.-]+):", line)):
            self._values[argument] = self._kept.get((label.group(1) if label else "", index), NONE)

    def _keep(self, key: tuple[int | str, int], value: Parameters) -> None:
        self._kept[key] = self._kept.get(key, NONE) | value


def _merged(first: Sequence[Parameters], second: Sequence[Parameters]) -> tuple[Parameters, ...]:
    longest = max(len(first), len(second))
    padded = [[*side, *[NONE] * (longest - len(side))] for side in (first, second)]
    return tuple(a | b for a, b in zip(*padded, strict=True))


_REGISTER = re.compile(r"%[a-zA-Z_]\w*")
_NOT_GLOBAL = (".shared", ".local", ".const", ".param")


def of_ptx(text: str, symbol: str) -> Effects:
    """Return the effects of the entry `symbol`; positions count its parameters.

    Raises ValueError if there is no such entry.
    """
    entry = re.search(rf"\.entry {re.escape(symbol)}\((.*?)\)(.*?)^\}}", text, re.S | re.M)
    if entry is None:
        raise ValueError(f"PTX must hold the entry {symbol!r}")
    registers: dict[str, Parameters] = {}
    reads, writes = NONE, NONE

    def pointed(operands: str) -> Iterator[Parameters]:
        return (registers.get(register, NONE) for register in _REGISTER.findall(operands))

    instructions = [line.strip() for line in entry.group(2).splitlines() if line.strip().endswith(";")]
    while True:  # repeat, regardless of the order of instructions, until nothing changes
        before = (dict(registers), reads, writes)
        for instruction in instructions:
            opcode, _, operands = re.sub(r"^@!?%\w+\s+", "", instruction).partition("\t")
            if not operands:
                opcode, _, operands = opcode.partition(" ")
            destination, _, sources = operands.partition(",")
            if opcode.startswith("ld.param"):
                parameter = re.search(rf"{re.escape(symbol)}_param_(\d+)\b", sources)
                values = [frozenset({int(parameter.group(1))})] if parameter and opcode.strip().endswith("64") else []
            elif opcode.startswith(("ld", "st", "atom", "red", "cp.async")):
                if not any(space in opcode for space in _NOT_GLOBAL) or opcode.startswith("cp.async"):
                    address = frozenset().union(*pointed(" ".join(re.findall(r"\[([^\]]*)\]", operands))))
                    reads |= NONE if opcode.startswith("st") else address
                    writes |= NONE if opcode.startswith(("ld", "cp.async")) else address
                continue
            else:
                values = list(pointed(sources))
            for register in _REGISTER.findall(destination):
                registers[register] = registers.get(register, NONE).union(*values)
        if (registers, reads, writes) == before:
            return Effects(reads, writes)
