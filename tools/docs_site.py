"""The files of the docs site, for mkdocs: those of docs/, and every file of the project that a page links to.

mkdocs takes pages from docs/ alone. The site also has the project's other Markdown, the code and the pages of reports
that its pages link to, so no link leads outside. docs/README.md has the groups of the navigation.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from xlafuse.compare.report.page.content import libraries
from xlafuse.compare.report.page.page import document
from xlafuse.compare.sources.opening import open_source
from xlafuse.kernels import pallas, triton

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PROJECT = ROOT / "pyproject.toml"
START, QUESTIONS, GALLERY = ROOT / "README.md", DOCS / "README.md", ROOT / "reports" / "index.html"
REFERENCE = DOCS / "reference.md"
_PLACES = {START: "index.md", QUESTIONS: "questions.md", GALLERY: "gallery.md"}
_COPIED = {".css", ".html", ".json", ".png", ".svg"}
_SHOWN = {".md", *_COPIED}
_ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ", re.M)  # of a docstring
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_LINK = re.compile(r'(?<=\]\()[^)\s"#:]+(?=[)#])|(?<=src=")[^"#:]+(?=")')


class ArgumentLists(griffe.Extension):
    """Shows the arguments that a docstring describes as a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _ARGUMENT.sub(r"\n- `\1`: ", obj.docstring.value)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation, and the link to the project where it has an address."""
    hook = tomllib.loads(PROJECT.read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    if hook["address"]:
        config.repo_url, config.repo_name = hook["address"], config.site_name
    config.nav = navigation()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the theme, and those of the site in the place of those of docs/."""
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files(of_theme + [
        File.generated(config, place, content=content) if isinstance(content, str)
        else File.generated(config, place, abs_src_path=str(content))
        for place, content in site_files().items()
    ])


def navigation() -> list[dict[str, Any]]:
    """Return the groups of docs/README.md with their pages; links to parts of a page are left out."""
    _, *parts = re.split(r"^## (.+)\n", QUESTIONS.read_text(), flags=re.M)
    groups: dict[str, list[dict[str, str]]] = {}
    for group, table in zip(parts[::2], parts[1::2], strict=True):
        links = re.findall(r"\| \[([^\]]+)\]\(([^)#]+)\) \|$", table, re.M)
        groups[group] = [{name[0].upper() + name[1:]: place((DOCS / link).resolve())} for name, link in links]
    groups["Start"].insert(1, {"All questions": place(QUESTIONS)})
    return [{group: pages} for group, pages in groups.items()]


def site_files() -> dict[str, str | Path]:
    """Return the site's files by their places: texts, and paths of files that are copied."""
    found: dict[str, str | Path] = {
        f"notebooks/{graph.stem}.html": document(open_source(graph), libraries.read(), None)
        for graph in (DOCS / "notebooks").glob("*.json")
    }
    waiting = [START, DOCS / "site.css", *DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    while waiting:
        path = waiting.pop()
        if place(path) in found:
            continue
        text = _text(path)
        if text is None:
            found[place(path)] = path
            continue
        links = {link: (path.parent / link).resolve() for link in _LINK.findall(text)}
        targets = {link: file for link, file in links.items() if file.exists() and file.is_relative_to(ROOT)}
        found[place(path)] = _LINK.sub(lambda link: _relative(link[0], path, targets), text)  # noqa: B023
        waiting += targets.values()
    return found


def place(path: Path) -> str:
    """Return a file's place among the site's sources; a page's ends in .md."""
    if path in _PLACES:
        return _PLACES[path]
    name = str(path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT))
    return name if path.suffix in _SHOWN else f"{name.removesuffix('.ipynb')}.md"


def _relative(link: str, page: Path, targets: dict[str, Path]) -> str:
    return relpath(place(targets[link]), dirname(place(page)) or ".") if link in targets else link


def _text(path: Path) -> str | None:
    """Return the Markdown of a page, or None for a file that is copied."""
    if path.is_dir():
        files = (file.name for file in sorted(path.iterdir()) if file.suffix in _SHOWN)
        return "\n".join([f"# {path.name}\n", *(f"- [{name}]({path.name}/{name})" for name in files)])
    if path == GALLERY:
        return _gallery(path.read_text())
    if path.suffix in _COPIED:
        return None
    text = path.read_text()
    if path.suffix == ".md":
        return text + _kernels() if path == REFERENCE else text
    if path.suffix == ".ipynb":
        return "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
    return f"---\nsearch: {{exclude: true}}\n---\n# {path.name}\n\n{_fence(text, path.suffix[1:])}"


def _kernels() -> str:
    """Return what makes mkdocstrings show each public kernel."""
    lines = []
    for short, names, folder in (("triton", triton.NAMES, "triton_side.kernels"), ("pallas", pallas.NAMES, "pallas")):
        lines += [f"\n## xlafuse.kernels.{short}\n"]
        lines += [f"::: xlafuse.{folder}.{name}.{name}\n    options: {{heading_level: 3}}" for name in names]
    return "\n".join(lines)


def _gallery(html: str) -> str:
    """Return the list of runs as Markdown, each page below the words that link to it."""
    html = re.sub(r'<a href="([^"]*)">(.*?)</a>', r"[\2](\1)", html)
    parts = ["# Pages of real runs", html.partition("<p>")[2].partition("</p>")[0]]
    for title, words in re.findall(r"<dt>(.*?)</dt>\s*<dd>(.*?)</dd>", html, re.S):
        pages = re.findall(r"\[([^\]]*)\]\(([^)]*\.html)\)", title + words)
        frames = (f'<iframe title="{name}" src="{page}" loading="lazy"></iframe>' for name, page in pages)
        parts += [f"## {title}", words, *frames]
    return "\n\n".join(parts)


def _cell(cell: dict[str, Any]) -> str:
    """Return a notebook's cell as Markdown, with its outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([_fence(source, "python"), *map(_output, cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "text/html" in data:
        return f'<div>{"".join(data["text/html"])}</div>'
    return _fence(_ANSI.sub("", "".join(data["text/plain"])), "text")


def _fence(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"
