"""XLA's own parser of HLO text, run in a process with limits, because malformed text can crash it.

All private names of jaxlib that these tests use are here; tested with jaxlib 0.10.2 and 0.11.2.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from xlafuse.hlo import proto_reader
from xlafuse.hlo.shape import Element
from xlafuse.hlo.text_reader import Instruction, Module

SECONDS = 20  # for one module
MEMORY = 4 << 30

# Reads a module a line, as a JSON string; answers with its serialized proto in base64 and its text, or with null.
SERVER = f"""
import base64, json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
from jaxlib import _hlo
for line in sys.stdin:
    try:
        module = _hlo.hlo_module_from_text(json.loads(line))
        answer = base64.b64encode(module.as_serialized_hlo_module_proto()).decode(), module.to_string()
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

    def parse(self, text: str) -> Module | None:
        """Return the module that XLA reads, its instructions in the order of the text; None if XLA refuses it."""
        answer = self._answer(text)
        return None if answer is None else proto_reader.parse_proto(_in_order_of_text(base64.b64decode(answer[0])))

    def print(self, text: str) -> str | None:
        """Return the module as XLA prints it; None if XLA refuses it."""
        answer = self._answer(text)
        return None if answer is None else answer[1]

    def _answer(self, text: str) -> tuple[str, str] | None:
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
        found: tuple[str, str] | None = json.loads(answer)
        return found

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _in_order_of_text(data: bytes) -> bytes:
    """Sort a module's parts by their ids, which XLA's parser counts up."""
    module = proto_reader.message_type("xla.HloModuleProto").FromString(data)
    module.ClearField("schedule")
    for computation in module.computations:
        _sort(computation.instructions)
    _sort(module.computations)
    return module.SerializeToString()


def _sort(parts: Any) -> None:
    in_order = sorted(parts, key=lambda part: part.id)
    del parts[:]
    parts.extend(in_order)


def disagreements(ours: Module, theirs: Module) -> list[Any]:
    """Compare all that both entries reach: XLA renames what has the same name in two computations."""
    found: list[Any] = []
    pending, renamed = [(ours.entry, theirs.entry)], {ours.entry: theirs.entry}
    while pending:
        name, other = pending.pop()
        parts = list(ours.computations[name].instructions.values())
        others = list(theirs.computations[other].instructions.values())
        if len(parts) != len(others):
            found.append((name, [part.name for part in parts], [part.name for part in others]))
            continue
        names = {part.name: other.name for part, other in zip(parts, others, strict=True)}
        for part, other in zip(parts, others, strict=True):
            found += [(name, part.name, *difference) for difference in _differences(part, other, names)]
            for (_, called), (_, their_called) in zip(part.calls, other.calls, strict=False):
                if renamed.setdefault(called, their_called) != their_called:
                    found.append((name, part.name, called, renamed[called], their_called))
                elif (called, their_called) not in pending:
                    pending.append((called, their_called))
    if len(ours.computations) != len(theirs.computations):
        found.append((list(ours.computations), list(theirs.computations)))
    return found


def _differences(part: Instruction, other: Instruction, names: dict[str, str]) -> Iterator[tuple[str, Any, Any]]:
    # XLA merges equal stack frames, so sites have other numbers.
    ours = dataclasses.replace(
        part, name=other.name, site=other.site, operands=tuple(names.get(name, f"? {name}") for name in part.operands),
        calls=tuple((key, "") for key, _ in part.calls),
    )
    theirs = dataclasses.replace(other, calls=tuple((key, "") for key, _ in other.calls))
    for field in dataclasses.fields(Instruction):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if field.compare and a != b:
            yield field.name, a, b
    if _tree(ours.result) != _tree(theirs.result):
        yield "result", _tree(ours.result), _tree(theirs.result)


def _tree(element: Element) -> Any:
    return element.shape or tuple(map(_tree, element.elements))
