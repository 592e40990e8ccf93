"""What is embedded comes out as it went in."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from markupsafe import Markup

from compare import PROJECT
from compare.html import charts, embed, page

AWKWARD = {"text": "</script><!-- \u00e9 \u2028 \U0001f600 \ud800 \\ \" \n", "numbers": [1, -2.5, 1e300, None, True]}


def written(folder: Path, elements: list[Markup]) -> Path:
    """A page with these elements and nothing to show."""
    front = Markup('<input id="matrix-filter">')
    values = {"front": front, "kinds": charts.KINDS, "version": "", "title": "", "styles": []}
    scripts = [Markup((Path(page.__file__).parent / "static" / "page.js").read_text())]
    elements = [embed.element("settings", {"colours": {}, "cases": [], "links": []}), *elements]
    (folder / "page.html").write_text(page.render("page.html", elements=elements, scripts=scripts, **values))
    return folder / "page.html"


def load(it: Any, id: str) -> Any:
    return it.evaluate("id => xlafuse.load(id)", id)


def test_pieces_of_all_ranges(tmp_path: Path, visit: Any) -> None:
    """More of them than there are code points before the surrogates: lines in two orders cannot be joined."""
    lines = [f"line {number} is repeated in both of them" for number in range(56_000)]
    data = {"a": {"y": AWKWARD, "x": "\n".join(lines)}, "b": {"x": AWKWARD}, "c": {"x": "\n".join(lines[::-1])}}
    data |= {"d": {"x": "\n".join(lines[:10])}}
    with visit(written(tmp_path, list(embed.elements(data)))) as it:
        assert load(it, "c") == data["c"]
        assert load(it, "d") == data["d"]
        assert load(it, "a")["y"]["text"].startswith("</script><!-- \u00e9 \u2028 \U0001f600")


def test_repetitions_cost_little() -> None:
    once = {"case-0": {"html": "\n".join(f"<tr><td>{number} of a table</td></tr>" for number in range(5000))}}
    twice = once | {"case-1": once["case-0"]}
    sizes = [sum(map(len, embed.elements(data))) for data in (once, twice)]
    assert sizes[1] < 1.1 * sizes[0]


def test_numbers_that_json_does_not_know(tmp_path: Path, visit: Any) -> None:
    data = {"a": {"worst": [math.inf, -math.inf, math.nan, 1.5]}}
    with visit(written(tmp_path, list(embed.elements(data)))) as it:
        assert load(it, "a") == {"worst": [None, None, None, 1.5]}


def test_the_same_data_is_the_same_page_in_every_process() -> None:
    """A committed page changes with its data alone: Python's hashes of text differ from process to process."""
    program = (
        "from compare.html import embed; common = [{'x': f'{n:040}'} for n in range(50)];"
        "print(list(embed.elements({'a': common, 'b': common[::-1], 'c': common[::2]})))"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(PROJECT)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1] and "pieces" in made[0]
