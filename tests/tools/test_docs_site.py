"""The docs site, built and opened in a browser, and its notebook, executed."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "first-look.ipynb"
if not os.environ.get("XLAFUSE_REQUIRE_BROWSER"):  # as in .ci/run, which installs the packages
    pytest.importorskip("mkdocs", reason="`make docs` installs the extra `docs`")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = _build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site, because a browser searches no pages that it opened as files."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """Open a page of the browser. It fails if a page logs an error, or asks another server."""
    problems: list[str] = []
    with browser.new_context() as context:
        opened = context.new_page()
        opened.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        opened.on("pageerror", lambda error: problems.append(str(error)))
        own = (address, "data:", "blob:")
        opened.on("request", lambda r: None if r.url.startswith(own) else problems.append(f"asked for {r.url}"))
        yield opened
    assert problems == []


def test_every_link_of_a_page_leads_to_a_file_and_a_part_of_it(site: Path) -> None:
    """mkdocs checks links of Markdown. This has those of HTML, too, as of the notebook's output."""
    every = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    texts = {path: text for path, text in every.items() if "md-main" in text}  # without pages of reports
    missing = [
        f"{path.relative_to(site)}: {link}" for path, text in texts.items()
        for link in re.findall(r'(?:href|src)="?([^" >]+)', text)
        if ":" not in link and not _leads_somewhere(path, link, texts)
    ]
    assert len(texts) > 50 and missing == []


def _leads_somewhere(page: Path, link: str, texts: dict[Path, str]) -> bool:
    name, _, part = unquote(link).partition("#")
    target = (page.parent / name).resolve() if name else page
    has_part = not part or target not in texts or re.search(rf'(?:id|name)="?{re.escape(part)}[" >]', texts[target])
    return target.exists() and bool(has_part)


def test_the_site_links_to_the_project_at_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mkdocs.config import load_config

    from tools import docs_site

    text = (ROOT / "pyproject.toml").read_text()
    for address in ("", "https://code.example/xlafuse"):
        project = tmp_path / "pyproject.toml"
        project.write_text(re.sub(r'^address = ".*?"', f'address = "{address}"', text, flags=re.M))
        monkeypatch.setattr(docs_site, "PROJECT", project)
        config = docs_site.on_config(load_config(str(ROOT / "mkdocs.yml")))
        assert (config.repo_url or "") == address


def test_every_page_of_docs_is_linked_from_the_questions() -> None:
    text = (ROOT / "docs" / "README.md").read_text()
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name}" not in text] == ["README.md"]


def test_the_navigation_has_four_groups(page: Any, address: str) -> None:
    page.goto(address)
    tabs = page.locator(".md-tabs__link")
    assert [text.strip() for text in tabs.all_inner_texts()] == ["Start", "Your own job", "The suite", "Inside"]
    tabs.nth(3).click()
    page.wait_for_url("**/measuring.html")
    assert page.locator("h1").inner_text().startswith("Measuring")


def test_the_search_finds_a_page(page: Any, address: str) -> None:
    page.goto(address)
    page.locator("input.md-search__input").click()
    ready = page.locator(".md-search-result__meta", has_text="Type to start searching")
    ready.wait_for(timeout=120_000)
    page.locator("input.md-search__input").press_sequentially("priority-fusion")  # the page listens to keys
    page.locator('.md-search-result__link[href*="fusion-graph.html"]').first.wait_for()
    links = [link.get_attribute("href") for link in page.locator(".md-search-result__link").all()]
    assert not any(".py.html" in link for link in links)


def test_the_gallery_shows_the_committed_pages(page: Any, address: str) -> None:
    page.goto(f"{address}/gallery.html")
    committed = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "reports").rglob("*.html"))
    assert sorted(frame.get_attribute("src") for frame in page.locator("iframe").all()) == committed[:-1]
    assert committed[-1] == "reports/index.html"  # the gallery's text
    first = page.frame_locator("iframe").first
    first.locator("body[data-ready]").wait_for()
    assert "records of" in first.locator("#overview").inner_text()


def test_the_notebook_shows_its_outputs_and_the_page(page: Any, address: str) -> None:
    page.goto(f"{address}/notebooks/first-look.html")
    text = page.locator("article").inner_text()
    assert "forward: 7 kernels" in text and "the producer is not fusible" in text and "\x1b" not in text
    report = page.frame_locator("iframe")
    report.locator("body[data-ready]").wait_for()
    assert "cudnn" in report.locator("body").inner_text()


def test_the_reference_has_the_docstrings_of_the_api_and_of_the_kernels(page: Any, address: str) -> None:
    page.goto(f"{address}/reference.html")
    arguments = page.locator("[id='xlafuse.explain'] + div li code:first-child")
    assert {"fn", "grad", "target", "check"} <= set(arguments.all_inner_texts())
    assert "q" in page.locator("[id='xlafuse.pallas.attention.attention']").inner_text()


def test_a_link_that_leads_nowhere_stops_the_build(tmp_path: Path) -> None:
    """The project's settings, for one page."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[no such part](#b), [no such page](c.md)\n")
    text = (ROOT / "mkdocs.yml").read_text().replace("hooks: [tools/docs_site.py]", "")
    (tmp_path / "mkdocs.yml").write_text(text)
    done = _build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode and "'#b'" in done.stdout and "'c.md'" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_notebook_runs_and_prints_what_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may differ: those of versions, and predictions. `jupyter execute --inplace` writes it again."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, 4)
    committed = _words(notebook)
    try:
        NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    except CellExecutionError as problem:
        if "pip install nvidia-cudnn-cu13" not in str(problem):
            raise
        pytest.skip("the Python that compiles for XLA has no cuDNN: the extra `cpu` brings it for Python 3.12 or newer")
    assert _words(notebook) == committed
    saved, fresh = (_kernels(folder / "attention.json") for folder in (NOTEBOOK.parent, tmp_path))
    assert saved == fresh and len(saved["attention"]) == 7
    assert NOTEBOOK.stat().st_size < 300_000


def _kernels(explained: Path) -> dict[str, list[str]]:
    graphs = json.loads(explained.read_text())["graphs"]
    return {name: [kernel["name"] for kernel in graph["kernels"]] for name, graph in graphs.items()}


def _words(notebook: Any) -> list[str]:
    """Return the words of all outputs, without numbers and the lines of tables and trees."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = [output["text"] if "text" in output else output["data"]["text/html"] for output in outputs]
    assert len(texts) >= 6
    return re.findall(r"[^\W\d]+", re.sub(r"\x1b\[[\d;]*m", "", " ".join(texts)))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def _build(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", folder]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
