"""XLA's own parser of HLO text, run in a process with limits, because malformed text can crash it.

All private names of jaxlib that these tests use are here; tested with jaxlib 0.10.2 and 0.11.2.
"""

from __future__ import annotations

import ast
import json
import re
import select
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from xlafuse.hlo.shape import UNBOUNDED, Element
from xlafuse.hlo.text_reader import Module

SECONDS = 20  # for one module
MEMORY = 4 << 30

# Reads a module a line, as a JSON string; answers with the module as XLA prints it, or with null.
SERVER = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
from jaxlib import _hlo
for line in sys.stdin:
    try:
        answer = _hlo.hlo_module_from_text(json.loads(line)).to_string()
    except Exception:
        answer = None
    print(json.dumps(answer), flush=True)
"""


class XlaParser:
    """A process that parses one module after another. A crash or a timeout is an answer like a refusal."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> XlaParser:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def print_again(self, text: str) -> str | None:
        """Return the module as XLA prints it; None if its parser refuses it."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
            )
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(text) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._stop()
            return None
        ready, _, _ = select.select([self._process.stdout], [], [], SECONDS)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            self._stop()
            return None
        return json.loads(answer)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@dataclass(frozen=True)
class Part:
    """An instruction, as both parsers can state it."""

    opcode: str
    shape: str
    operands: tuple[str, ...]
    calls: frozenset[tuple[str, str]] = frozenset()
    is_root: bool = False
    index: int | None = None
    op_name: str = ""
    target: str = ""
    backend_config: str = ""


@dataclass
class Content:
    entry: str = ""
    computations: dict[str, dict[str, Part]] = field(default_factory=dict)


def content_of(module: Module) -> Content:
    content = Content(module.entry)
    for name, computation in module.computations.items():
        content.computations[name] = {
            part.name: Part(
                part.opcode, _written(part.result), part.operands, frozenset(part.calls), part.is_root, part.index,
                part.op_name, part.custom_call_target, part.backend_config,
            )
            for part in computation.instructions.values()
        }
    return content


def _written(element: Element) -> str:
    if element.shape is None:
        return f"({', '.join(map(_written, element.elements))})"
    dims = ",".join("?" if size == UNBOUNDED else str(size) for size in element.shape.dims)
    return f"{element.shape.dtype}[{dims}]"


_PRINTED = re.compile(r"  (ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_CALLS = re.compile(
    r"[ (](calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations"
    r"|select|scatter)=(%[^\s,]+|\{[^}]*\})"
)
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/|<=")
_STRING = r'"((?:[^"\\]|\\.)*)"'


def content_of_print(text: str) -> Content:
    """Read what XLA printed, which has one fixed form: an instruction a line, with layouts and percent signs."""
    content = Content()
    parts: dict[str, Part] = {}
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
            parts = content.computations[header[2]] = {}
            if header[1]:
                content.entry = header[2]
        elif printed := _PRINTED.match(line):
            root, name, shape, opcode, rest = printed.groups()
            inside, attributes = _inside(rest)
            operands = () if opcode in ("constant", "parameter", "iota") else tuple(re.findall(r"%([^\s,)]+)", inside))
            quoted = re.sub(_STRING, '""', attributes)
            calls = {(key, name) for key, names in _CALLS.findall(quoted) for name in re.findall(r"%([^\s,}]+)", names)}
            index = int(inside) if opcode == "parameter" else _integer(re.search(r" index=(\d+)", quoted))
            parts[name] = Part(
                opcode, _LAYOUT.sub("", shape).replace("(, ", "("), operands,
                frozenset(calls), bool(root), index, _string(re.search(f"op_name={_STRING}", attributes)),
                _string(re.search(f"custom_call_target={_STRING}", attributes)),
                _backend_config(attributes),
            )
    return content


def _inside(text: str) -> tuple[str, str]:
    depth = 1
    for at, mark in enumerate(text):
        depth += (mark == "(") - (mark == ")")
        if depth == 0:
            return text[:at], text[at + 1 :]
    raise AssertionError(text)


def _integer(found: re.Match[str] | None) -> int | None:
    return int(found[1]) if found else None


def _string(found: re.Match[str] | None) -> str:
    return ast.literal_eval(f'b"{found[1]}"').decode(errors="replace") if found else ""


def _backend_config(attributes: str) -> str:
    if quoted := re.search(f"backend_config={_STRING}", attributes):
        return _string(quoted)
    found = re.search(r"backend_config=(\{.*\})", attributes)
    return found[1] if found else ""


def disagreements(read: Content, printed: Content) -> list[Any]:
    found: list[Any] = []
    if read.entry != printed.entry:
        found.append(("entry", read.entry, printed.entry))
    for name in {**read.computations, **printed.computations}:
        ours, theirs = read.computations.get(name, {}), printed.computations.get(name, {})
        found += [
            (name, part, ours.get(part), theirs.get(part))
            for part in {**ours, **theirs}
            if ours.get(part) != theirs.get(part)
        ]
    return found
