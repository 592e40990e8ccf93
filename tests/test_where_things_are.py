"""CONTRIBUTING.md answers where things are, each with one file and a name in it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = (
    "L2 flushed", "warm-up end", "tolerance derived", "fusion's bytes", "worker restarted", "report column", "export",
    "H200's bandwidth", "add a block", "add an implementation", "add a compiler", "add a target", "add a finding",
)


def rows() -> list[tuple[str, str, str]]:
    """Return (question, file, name) of the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2]
    found = re.findall(r"^\| ([^|]+\?) \| `([^`]+)`[^|]*\| `(\w+)` \|$", text, re.MULTILINE)
    assert len(found) == text.count("\n| Where "), "a line of the table has another form"
    return found


def names_in(file: Path) -> set[str]:
    """Return the names that a file defines: functions, classes and assigned names, or the keys of a JSON object."""
    if file.suffix == ".json":
        return set(json.loads(file.read_text()))
    nodes = list(ast.walk(ast.parse(file.read_text())))
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_every_question_has_one_answer() -> None:
    questions = [question for question, _, _ in rows()]
    for part in QUESTIONS:
        assert sum(part in question for question in questions) == 1, part
    assert len(questions) == len(QUESTIONS)


@pytest.mark.parametrize(("question", "path", "name"), rows(), ids=lambda value: str(value).replace("/", "."))
def test_the_name_is_in_the_file(question: str, path: str, name: str) -> None:
    assert name in names_in(ROOT / path), question
