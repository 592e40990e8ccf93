"""The page that compares two runs, in a browser: without network, in light and dark, and printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from made_runs import diff

DATA = Path(__file__).parents[3] / "data" / "runs"


def test_the_page_needs_no_network_and_has_two_themes(tmp_path: Path, visit: Any) -> None:
    file = tmp_path / "page.html"
    assert diff(DATA / "jax-0.10", DATA / "jax-0.11", "-o", file).exit_code == 1
    grounds = set()
    for scheme in ("light", "dark"):
        with visit(file, ready="h1", color_scheme=scheme) as page:
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert page.evaluate("performance.getEntriesByType('resource').length") == 0
            shown = page.inner_text("body")
            assert "Regressed" in shown and "jax\t0.10.2\t0.11.2" in shown
            assert "written to memory now: 2 buffers, 33.6 MB" in shown  # the first trees are open
    assert len(grounds) == 2
    with visit(file, ready="h1") as page:
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = false")
        assert not page.locator("details pre").first.evaluate("it => it.checkVisibility()")
        page.emulate_media(media="print")
        assert page.locator("details pre").first.evaluate("it => it.checkVisibility()")
