"""tools/gpu_tests.py: the Markdown of JUnit files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import gpu_tests

SUITE = """<testsuites><testsuite name="{name}" time="2.5">
<testcase classname="tests.compare.measure.test_modes" name="a" time="1"/>
<testcase classname="tests.compare.measure.test_modes.TestClass" name="b"><failure message="no">E</failure></testcase>
<testcase classname="tests.compare.test_every" name="c"><error message="no">E</error></testcase>
<testcase classname="tests.tools.test_x" name="d"><skipped message="('/x.py', 3, 'Skipped: needs quack')"/></testcase>
</testsuite></testsuites>"""


def test_pieces_of_a_gpu_are_one_section_with_failures_and_reasons(tmp_path: Path) -> None:
    for piece in ("a", "b"):
        (tmp_path / piece).write_text(SUITE.format(name="GPU X, commit abc"))
    (tmp_path / "c").write_text(SUITE.format(name="GPU Y, commit abc"))
    text = gpu_tests.summary([tmp_path / piece for piece in "abc"])
    assert text.count("## GPU X, commit abc") == text.count("## GPU Y, commit abc") == 1
    of_x = text.split("## GPU ")[1]
    assert [line.split() for line in of_x.splitlines() if "tests/compare/measure" in line] == [
        ["|", "tests/compare/measure", "|", "2", "|", "2", "|", "0", "|"]
    ]
    assert of_x.count("- tests.compare.test_every::c") == 2
    assert "| needs quack" in of_x


def test_a_file_without_gpu_and_commit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(SUITE.format(name="pytest"))
    with pytest.raises(ValueError, match="make test-gpu"):
        gpu_tests.summary([tmp_path / "a"])
