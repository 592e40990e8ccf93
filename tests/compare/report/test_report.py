"""The table shows the rows' values with units, leaves missing values blank, and shows hostile text as text."""

import math
from typing import Any

import pytest
from made_records import made_record, measurement_of
from made_rows import rows_of, timed_record

from xlafuse.compare.base.text import number, printable
from xlafuse.compare.record.record import Record
from xlafuse.compare.report import matrix, table
from xlafuse.compare.sources.run_source import ceilings_of
from xlafuse.compare.spec.blocks import BLOCKS

CASE = next(c for c in BLOCKS["gelu"].cases("quick") if c.direction == "fwd")
TRAIN = next(c for c in BLOCKS["gelu"].cases("quick") if c.direction == "train")
CEILINGS = ceilings_of({"segments": [{"id": "s1", "ceilings": {"streams": {"1:1": 4e12}}}]})


def ok(case: Any, implementation: str, us: float) -> Record:
    errors = [{"name": "y", "error": 0.25, "tolerance": 0.5}]
    peaks = {"peak_memory": dict.fromkeys(case.phases, {"bytes": 10**6})}
    return timed_record(case, implementation, us, measured=peaks, errors=errors, compile_s=1.5)


def rendered(*records: Record, markdown: bool = False, every: bool = False) -> str:
    return table.render(rows_of(*records, ceilings=CEILINGS), markdown=markdown, every=every)


def test_numbers_appear_with_their_units() -> None:
    records = ok(CASE, "xla", 100.0), ok(CASE, "triton", 80.0)
    text = rendered(*records, every=True)
    header = next(line for line in text.splitlines() if line.startswith("implementation"))
    for name in ("time µs", "±", "compared with xla", "rate", "of peak", "wall µs", "memory MB", "compile s", "error"):
        assert name in header
    line = next(line for line in text.splitlines() if line.startswith("triton"))
    for cell in ("NVIDIA H200", "80.0", "1.25x faster, 1.25 to 1.25", "2936 GB/s", "73%", "1.5", "0.50"):
        assert cell in line, cell
    assert "gelu / llama-8b / bf16 / fwd" in text
    assert "2 records: 2 ok" in text

    brief = rendered(*records)
    line = next(line for line in brief.splitlines() if line.startswith("triton"))
    assert "80.0" in line and "73%" in line and "GB/s" not in line
    assert "--all shows more columns: checked on" in brief and "--all" not in text


def test_train_shows_its_parts() -> None:
    text = rendered(ok(TRAIN, "xla", 100.0), ok(CASE, "xla", 100.0))
    fwd, train = (text.index(f"gelu / llama-8b / bf16 / {d}") for d in ("fwd", "train"))
    assert "backward" in text[train:fwd]
    assert "backward" not in text[fwd:]


@pytest.mark.parametrize(
    ("status", "fields", "part"),
    [
        ("skipped", {"detail": "needs a GPU"}, "cuda: skipped: needs a GPU"),
        (
            "compiled",
            {"checked": {"device": "cpu", "backend": "interpreter", "dtype": "float16", "case": "odd"}},
            "cpu (interpreter, fp16)",
        ),
        ("wrong", {"errors": [{"name": "y", "error": math.inf, "tolerance": 1.0}]}, "inf"),
    ],
)
def test_a_record_without_times(status: str, fields: dict[str, Any], part: str) -> None:
    text = rendered(made_record(CASE, "cuda", "cuda", status, **fields))
    assert part in text and "time" not in text and "compared with xla" not in text


def test_no_records() -> None:
    assert table.render([]) == matrix.render([]) == "no records"


HOSTILE = "a\x1b[2J\r\nb\u202e | c [red]x[/red] <script> *y* `z`" + "w" * 5000


@pytest.mark.parametrize("markdown", [False, True])
def test_hostile_text_stays_text(markdown: bool) -> None:
    text = rendered(made_record(CASE, HOSTILE, "xla", "failed", detail=HOSTILE), markdown=markdown)
    assert not {"\x1b", "\r", "\u202e"} & set(text)
    assert max(map(len, text.splitlines())) < 700
    if markdown:
        assert "<script>" not in text
        line = next(line for line in text.splitlines() if line.startswith("| a"))
        assert line.replace("\\|", "").count("|") == text.splitlines()[4].count("|")
    else:
        assert "[red]x[/red]" in text


def test_markdown_is_a_table() -> None:
    lines = rendered(ok(CASE, "xla", 100.0), markdown=True).splitlines()
    assert lines[2] == "## gelu / llama-8b / bf16 / fwd"
    assert lines[4].startswith("| implementation")
    assert set(lines[5]) <= set("|-: ")
    assert len({line.count("|") for line in lines[4:7]}) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (3, "3"), (0.0, "0"), (0.01234, "0.0123"), (1.5, "1.50"), (123456.7, "123457"), (math.inf, "inf")],
)
def test_numbers_are_rounded(value: float | None, text: str) -> None:
    assert number(value) == text


def test_printable_keeps_one_line_and_names_the_full_length() -> None:
    assert printable("a\n\tb \x00 c") == "a b c"
    assert printable("µ → 日本") == "µ → 日本"
    assert printable("x" * 1000, 10) == "xxxxxxxxxx… (1000 characters)"


def test_the_matrix_marks_the_fastest_of_one_clock() -> None:
    other_clock, other_segment = ok(CASE, "eager", 3.0), ok(CASE, "library", 2.0)
    measurement_of(other_clock).timer = "cuda-events"
    other_segment.segment = "s2"
    rows = rows_of(
        ok(CASE, "xla", 12.0), ok(CASE, "triton", 8.0), made_record(CASE, "cuda", "cuda", "skipped"), other_clock,
        other_segment,
    )
    text = matrix.render(rows)
    assert "8.00 *" in text and "12.0 *" not in text and "skipped" in text
    assert "3.00 *" not in text and "2.00 *" not in text  # alone on their clock or in their segment
    assert matrix.render(rows, markdown=True).startswith("| ")


def test_the_matrix_counts_kernels_where_nothing_was_timed() -> None:
    def compiled(implementation: str, status: str = "compiled", **more: Any) -> Record:
        kernels = {"forward": {"launches": 4, "bytes_declared": 9, "provenance": {}}}
        return made_record(CASE, implementation, implementation, status, **{"kernels": kernels, **more})

    checked = {"device": "cpu", "backend": "cpu", "dtype": "float32", "case": "odd"}
    records = [
        compiled("xla"), compiled("flex", "skipped", kernels={}),
        compiled("eager", "skipped", kernels={}, checked=checked),
    ]
    text = matrix.render(rows_of(*records))
    assert "kernels" in text and text.splitlines()[2].split()[-3:] == ["4", "skipped", "checked"]
    records = [compiled("xla"), *(compiled(status, status) for status in ("wrong", "failed", "timeout", "skipped"))]
    text = matrix.render(rows_of(*records, compiled("eager", "skipped", checked=checked)))
    assert text.splitlines()[2].split()[-6:] == ["4", "wrong", "failed", "timeout", "skipped", "4"]
