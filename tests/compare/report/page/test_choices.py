"""The first words of a case's page."""

from __future__ import annotations

import re

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.report.page.content import choices
from xlafuse.compare.sources.source import Source


def test_the_guide_quotes_a_committed_run(committed_run: Source) -> None:
    """The answers in docs/reading-a-report.md are those of the page."""
    (case,) = (case for case in committed_run.cases if case.id == "attention/llama-8b/bf16/fwd")
    said = " ".join(choices.choices(case))
    table = (PROJECT / "docs" / "reading-a-report.md").read_text().split("| question |")[1].split("\n\n")[0]
    answers = "\n".join(row.split("|")[3] for row in table.splitlines()[2:])
    quoted = re.findall(r"`([^`]+)`|(\d[\d.]* (?:µs|ms|GB|times the fewest))", answers)
    assert len(quoted) == 9
    for code, number in quoted:
        assert (code or number) in said, code or number
    kernels = re.search(r"^ (\d+), which move", answers, re.MULTILINE)
    assert kernels and f"XLA makes {kernels[1]} kernels" in said
