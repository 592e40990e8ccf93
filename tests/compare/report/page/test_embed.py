"""Embedded data are read unchanged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from markupsafe import Markup

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.report import charts
from xlafuse.compare.report.page import embed, page

# All kinds of values, and text that would end elements, lines or strings if unescaped.
AWKWARD: list[Any] = [
    {"=": [{"=": 1, "==a": 2}] * 2, "==": {"=": [{"=": []}]}},
    {"text": "</script><!-- \u00e9 \u2028 \U0001f600 \\ \" \n", "numbers": [1, -2.5, 1e300, None, True]},
    None,
    *({"rows": [{"a": i, "b": [i, "x"]}] * i, "__proto__": [], "pairs": [[1, {}], [2, {"k": [[]]}]]} for i in range(4)),
    *([], [1], [[1, 2], [3]], "text", 0.1, {}, {"k": None}, [None, [None]]),
]


def written(folder: Path, elements: list[Markup]) -> Path:
    """Write a page with these elements and no content."""
    front = Markup('<input id="matrix-filter">')
    values = {"front": front, "kinds": charts.KINDS, "version": "", "title": "", "styles": [], "recorded": True}
    values["cases_per_element"] = embed.CASES_PER_ELEMENT
    scripts = [Markup((Path(page.__file__).parent / "static" / "page.js").read_text())]
    elements = [embed.element("settings", {"colours": {}, "cases": [], "links": [], "home": "#/"}), *elements]
    (folder / "page.html").write_text(page.render("page.html", elements=elements, scripts=scripts, **values))
    return folder / "page.html"


def test_the_page_reads_what_is_embedded(tmp_path: Path, visit: Any) -> None:
    many = [*AWKWARD * 3, *({"x": number} for number in range(embed.CASES_PER_ELEMENT))]
    assert len(many) > 2 * embed.CASES_PER_ELEMENT
    with visit(written(tmp_path, [*embed.elements("awkward", many), embed.element("one", AWKWARD)])) as it:
        assert json.loads(it.evaluate("xlafuse.load('one').then(JSON.stringify)")) == AWKWARD
        for number in (0, 1, 5, embed.CASES_PER_ELEMENT, len(many) - 1):
            found = it.evaluate("n => xlafuse.load('awkward', n).then(JSON.stringify)", number)
            assert json.loads(found) == many[number], number


def test_infinite_numbers_become_null(tmp_path: Path, visit: Any) -> None:
    data = {"worst": [math.inf, -math.inf, math.nan, 1.5]}
    with visit(written(tmp_path, [embed.element("a", data)])) as it:
        assert it.evaluate("xlafuse.load('a')") == {"worst": [None, None, None, 1.5]}


def test_equal_data_give_equal_pages_in_every_process() -> None:
    """A committed page changes only with its data, although hashes of text differ between processes."""
    program = (
        "from xlafuse.compare.report.page import embed; common = [{'x': f'{n:040}'} for n in range(50)];"
        "print(list(embed.elements('a', [{'a': common}, {'b': common[::-1]}, None])))"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(PROJECT)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1] and "gzip" in made[0]
