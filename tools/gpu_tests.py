"""Write the outcome of the GPU tests as Markdown: what ran, on which GPU, at which commit, what was skipped and why.

    make test-gpu ARGS="--junitxml FILE"    on a machine with a GPU; in pieces by ARGS="tests/compare --junitxml FILE"
    python -m tools.gpu_tests FILE [FILE ...] --out reports/gpu-tests.md
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

from tabulate import tabulate

OUTCOMES = ("passed", "failed", "skipped")


def outcome_of(test: ElementTree.Element) -> str:
    """Return a test's outcome; an error in a fixture is a failure."""
    tags = {child.tag for child in test}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


def folder_of(test: ElementTree.Element) -> str:
    """Return the folder of a test's module, at most two below tests/, such as tests/compare/measure."""
    parts = test.get("classname", "").split(".")
    module = next((at for at, part in enumerate(parts) if part.startswith("test_")), len(parts))
    return "/".join(parts[: min(module, 3)])


def reason_of(test: ElementTree.Element) -> str:
    """Return why a test was skipped."""
    skipped = test.find("skipped")
    reason = "" if skipped is None else skipped.get("message", "")
    located = re.search(r"'Skipped: (.*)'\)$", reason)  # ('/path/test_x.py', 3, 'Skipped: reason')
    reason = located[1] if located else reason or "no reason given"
    return re.sub(r"/\S+/(python[\d.]*) -m", r"\1 -m", reason)  # without the path of the interpreter


def summary(files: list[Path]) -> str:
    """Return the Markdown of JUnit files, a section for each GPU and commit.

    Raises:
        ValueError: a file has no suite that `make test-gpu` named.
    """
    suites: dict[str, list[ElementTree.Element]] = defaultdict(list)
    for file in files:
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            name = suite.get("name", "")
            if ", commit " not in name:
                raise ValueError(f"{file}: its suite {name!r} names no GPU and commit; write it by `make test-gpu`")
            suites[name].append(suite)
    parts = ["# GPU tests", "`make test-gpu`, in pieces; this page is written by `python -m tools.gpu_tests`."]
    for name, of_gpu in suites.items():
        tests = [test for suite in of_gpu for test in suite.iter("testcase")]
        folders: dict[str, Counter[str]] = defaultdict(Counter)
        for test in tests:
            folders[folder_of(test)][outcome_of(test)] += 1
        total: Counter[str] = sum(folders.values(), Counter())
        rows = [[folder, *(folders[folder][key] for key in OUTCOMES)] for folder in sorted(folders)]
        parts += [f"## {name}", f"{len(of_gpu)} pieces, {sum(float(s.get('time', 0)) for s in of_gpu):.0f} s together."]
        parts.append(tabulate([*rows, ["all", *(total[key] for key in OUTCOMES)]], ["tests", *OUTCOMES], "github"))
        failed = [f"- {test.get('classname')}::{test.get('name')}" for test in tests if outcome_of(test) == "failed"]
        if failed:
            parts += ["### Failed", "\n".join(failed)]
        reasons = Counter(reason_of(test) for test in tests if outcome_of(test) == "skipped")
        if reasons:
            table = [[count, reason] for reason, count in reasons.most_common()]
            parts += ["### Skipped", tabulate(table, ["tests", "reason"], "github")]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_tests", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="JUnit files of `make test-gpu`")
    parser.add_argument("--out", type=Path, help="the Markdown file to write; without it, the text is printed")
    parser.add_argument("--note", default="", help="a paragraph for the page, such as tests that no piece ran")
    options = parser.parse_args(arguments)
    try:
        text = summary(options.files) + (f"\n{options.note}\n" if options.note else "")
    except (OSError, ValueError, ElementTree.ParseError) as problem:
        print(f"gpu_tests: {problem}", file=sys.stderr)
        return 2
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
