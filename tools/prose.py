"""A check of the project's prose: `python -m tools.prose [FILE...]` prints each sentence that breaks a rule.

It reads docstrings, comments and messages of Python files, comments of JavaScript, C++, CUDA and the Makefile, and
Markdown. The rules:

- opening: no sentence begins with `What`, `Who`, `Of`, `That`, `As of` or `Whether`; a question may.
- process: a process is "it", not `who`, `whom`, `nobody` or `somebody`; people may be.
- private: no word that only this project uses for a part of the program.
- long: at most 40 words a sentence.

A text is left out if `prose: ok` stands in its first line, or in the line before or after that one. The rules are
advice: the exit code is 0 whatever is printed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_OURS = ("reports/h", "tests/data/", "tests/fusion_snapshots/")  # written by programs
MOST_WORDS = 40
FEWEST_WORDS = 4  # of a string that is taken for prose
# Files about kernels, where a warp has `lanes`.
KERNELS = ("triton_side/", "tests/triton_side/", "tools/benchmarks/")

Prose = Iterator[tuple[int, str, bool]]  # line, text, and whether sentences begin in it

_OPENING = re.compile(r"(What|Who|Of|That|As of|Whether)\b")
_PEOPLE = (
    "person", "people", "user", "users", "reader", "readers", "author", "authors", "engineers", "anyone", "those",
)
_PROCESS = re.compile("".join(f"(?<!{word} )" for word in _PEOPLE) + r"\b(whom?|whoever|nobody|somebody)\b", re.I)
_PRIVATE = re.compile(r"\b(clerk|crew|ballast|lanes?|worn|starved|speed of memory|in hand|at hand)\b", re.I)
_CODE = re.compile(r"`[^`]*`")
_NO_PROSE = re.compile(r"[{}=\\<>]|\bfor \w+ in\b")  # a string that holds code, a template or a path
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+[.)]) )|\n(?=\s*[\w, ()*`]+: )")
_SENTENCE = re.compile(r"(?<=[.!?;])\s+(?=[A-Z`(\"]|[a-z_]\w*(?:, \w+)*: )")


def main(names: list[str]) -> None:
    for name in names or tracked():
        for problem in of_file(name):
            print(problem)


def tracked() -> list[str]:
    """Return the project's files with prose, relative to its root."""
    patterns = ["*.py", "*.md", "*.js", "*.cpp", "*.cu", "*.cuh", "Makefile"]
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [name for name in listed.splitlines() if not name.startswith(NOT_OURS) and (ROOT / name).is_file()]


def of_file(name: str) -> Iterator[str]:
    """Yield "file:line: rule: sentence" for each sentence of a file that breaks a rule."""
    source = (ROOT / name).read_text(errors="replace")
    lines = source.split("\n")
    readers: dict[str, Callable[[str], Prose]] = {
        ".py": of_python, ".md": of_markdown, "": partial(of_comments, mark="#"),
    }
    for line, text, begins in readers.get(Path(name).suffix, of_comments)(source):
        if not any("prose: ok" in near for near in lines[max(0, line - 2) : line + 1]):
            for sentence in sentences(text):
                for rule in broken(sentence, begins=begins, kernels=name.startswith(KERNELS)):
                    yield f"{name}:{line}: {rule}: {sentence[:140]}"


def broken(sentence: str, *, begins: bool = True, kernels: bool = False) -> list[str]:
    """Return the rules that a sentence breaks. begins: whether it is the beginning of a sentence, not a remark."""
    plain = _CODE.sub("x", sentence)
    private = _PRIVATE.search(plain)
    if private and kernels and private[0].lower().startswith("lane"):
        private = None
    found = {
        "opening": begins and _OPENING.match(plain) and not plain.endswith("?"),
        "process": _PROCESS.search(plain),
        "private": private,
        "long": len(plain.split()) > MOST_WORDS,
    }
    return [rule for rule, hit in found.items() if hit]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, paragraph by paragraph, each on one line."""
    for paragraph in _PARAGRAPH.split(text):
        flat = " ".join(paragraph.split()).lstrip("-*# ")
        yield from filter(None, _SENTENCE.split(flat))


def of_python(source: str) -> Prose:
    """Yield the docstrings, messages and comments of a Python file."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
            yield node.body[0].lineno, text, True
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if len(node.value.split()) >= FEWEST_WORDS and not _NO_PROSE.search(node.value):
                yield node.lineno, node.value, True
    yield from _comments(source)


def _comments(source: str) -> Prose:
    """Yield comments: successive lines that hold nothing else as one text, a remark behind code by itself."""
    block: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(type|ruff|noqa|prose|!)", token.string):
            continue
        words, line = token.string.lstrip("# "), token.start[0]
        if token.line[: token.start[1]].strip():
            yield line, words, False
        elif block and line == first + len(block):
            block.append(words)
        else:
            if block:
                yield first, "\n".join(block), True
            block, first = [words], line
    if block:
        yield first, "\n".join(block), True


def of_comments(source: str, mark: str = "//") -> Prose:
    """Yield comments that begin with a mark: successive lines as one text."""
    block: list[str] = []
    for number, line in enumerate([*source.split("\n"), ""], 1):
        code, found, words = line.partition(mark)
        if found and not code.strip():
            block.append("" if words.startswith("   ") else words.strip())  # an indented line is an example
            continue
        if block:
            yield number - len(block), "\n".join(block), True
            block = []
        if found and code.endswith(" "):
            yield number, words.strip(), False


def of_markdown(source: str) -> Prose:
    """Yield the paragraphs of a Markdown text, without code, tables, headings and pictures."""
    without_code = re.sub(r"```[\s\S]*?```|<!--[\s\S]*?-->", lambda found: "\n" * found[0].count("\n"), source)
    text = re.sub(r"^(    |\||#|\s*!\[).*$", "", without_code, flags=re.M)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if paragraph.strip():
            yield line, paragraph, True
        line += paragraph.count("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
