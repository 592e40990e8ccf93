"""Fixtures that open reports in Chromium, and read their embedded data and tables without it."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.report.page import embed, page
from xlafuse.compare.sources.opening import open_source

Open = Callable[..., AbstractContextManager[Any]]
QUICK = PROJECT / "tests" / "data" / "runs" / "h200-small"
REQUIRED = bool(os.environ.get("XLAFUSE_REQUIRE_BROWSER"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of this folder without the packages of the extra `html`.

    With XLAFUSE_REQUIRE_BROWSER, as in continuous integration, they fail instead.
    """
    if REQUIRED:
        return
    try:
        import itables  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as problem:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"{problem}: pip install 'xlafuse[html]'"))


@pytest.fixture(scope="session")
def visit(browser: Any) -> Open:
    """Open a page: with visit(file, route) as page: ...

    It fails if the page logs an error or makes a network request. ready: a selector that matches a ready page.
    """

    @contextmanager
    def opened(file: Path, route: str = "", ready: str = "body[data-ready]", **options: Any) -> Iterator[Any]:
        context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        problems: list[str] = []
        with context:
            it = context.new_page()
            it.set_default_timeout(10_000)
            it.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
            it.on("pageerror", lambda error: problems.append(str(error)))
            it.on("dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
            inside = ("file:", "blob:", "data:")
            it.on("request", lambda r: None if r.url.startswith(inside) else problems.append(f"asked for {r.url}"))
            it.goto(f"file://{file}{route}")
            it.wait_for_selector(ready, timeout=20_000)
            yield it
        assert not problems

    return opened


@pytest.fixture(scope="session")
def ready() -> Callable[[Any], None]:
    """Return a function that waits until the case of the address is shown with its charts."""

    def wait(it: Any) -> None:
        it.wait_for_function("document.getElementById('case').dataset.shown === location.hash")

    return wait


@pytest.fixture(scope="session")
def show(ready: Callable[[Any], None]) -> Callable[[Any, str], None]:
    """Return a function that opens a case anew in a page that is already open, which costs less than a new page."""

    def opened(it: Any, route: str) -> None:
        it.mouse.move(0, 0)
        it.evaluate("location.hash = '#/about'")
        it.wait_for_selector("#about:visible")
        it.evaluate("route => { delete document.getElementById('case').dataset.shown; location.hash = route; }", route)
        ready(it)

    return opened


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of three of the run's four blocks."""
    out = tmp_path_factory.mktemp("report") / "quick.html"
    page.write(open_source(QUICK).select({"block": ["softmax", "attention", "rmsnorm"]}), out)
    return out


def restored(value: Any) -> Any:
    """Reverse embed.by_key."""
    if isinstance(value, list):
        return [restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: restored(each) for key, each in value.items()}
    if list(found) != ["="]:
        return {key[1:] if key.startswith("==") else key: each for key, each in found.items()}
    return [dict(zip(found["="], row, strict=True)) for row in zip(*found["="].values(), strict=True)]


@pytest.fixture(scope="session")
def embedded() -> Callable[..., Any]:
    """Return a function that reads embedded data: (file, kind), or for one case (file, kind, number)."""
    def read(file: Path, kind: str, number: int | None = None) -> Any:
        id = kind if number is None else f"{kind}-{number // embed.CASES_PER_ELEMENT}"
        found = re.search(rf'<script type="{embed.TYPE}" id="{id}">([^<]*)</script>', file.read_text())
        assert found, id
        data = restored(json.loads(gzip.decompress(base64.b64decode(found[1]))))
        return data if number is None else data[number % embed.CASES_PER_ELEMENT]

    return read


class _Tables(HTMLParser):
    """The text of every cell, table by table, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="session")
def tables() -> Callable[[str], list[list[list[str]]]]:
    """Return a function that reads all tables of an HTML text."""
    def read(html: str) -> list[list[list[str]]]:
        parser = _Tables()
        parser.feed(html)
        return [[[" ".join(cell.split()) for cell in row] for row in table] for table in parser.tables]

    return read
