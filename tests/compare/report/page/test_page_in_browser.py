"""A report in a browser: pages, charts, sorting, searching, themes and keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CASE = "#/case/attention/llama-8b/bf16/fwd"


def column(page: Any, title: str) -> list[str]:
    """Return the visible cells of a column of the table of records."""
    return page.evaluate(
        """title => {
          const heads = [...document.querySelectorAll("#records thead th")];
          const place = heads.findIndex((th) => th.textContent.trim() === title);
          return [...document.querySelectorAll("#records tbody tr")].map((row) => row.cells[place].textContent);
        }""",
        title,
    )


@pytest.fixture(scope="module")
def opened(report: Path, visit: Any) -> Iterator[Any]:
    with visit(report) as it:
        yield it


@pytest.fixture
def page(opened: Any, show: Any) -> Any:
    """The case, opened again."""
    show(opened, CASE)
    return opened


@pytest.fixture
def front(opened: Any) -> Any:
    """The front page, with all rows of its matrix."""
    opened.evaluate("location.hash = '#/'")
    opened.locator("#matrix-filter").fill("")
    return opened


def test_the_front_page_has_findings_and_a_matrix(report: Path, visit: Any, ready: Any) -> None:
    with visit(report) as page:
        assert page.locator("h1:visible").inner_text() == "h200-small: fusion report"
        assert 1 <= page.locator(".findings li").count() <= 5
        assert "worth up to" in page.locator(".findings li").first.inner_text()
        best = page.locator("#matrix tr", has_text="gpt2-scores bf16 fwd").locator("td.best")
        assert best.inner_text().startswith("1.00")
        page.locator("#matrix a", has_text="gpt2-scores bf16 fwd").click()
        ready(page)
        assert page.locator("#case h1").inner_text().startswith("softmax")


def test_the_summary_of_a_case(page: Any) -> None:
    """It shows the fastest implementation, the kernels of XLA, and its largest array with its source line."""
    lines = page.locator(".glance tbody tr").all_inner_texts()
    assert lines[0].startswith("sdpa-cudnn")
    heads = page.locator(".glance thead th").all_inner_texts()
    xla = next(line for line in lines if line.split("\t")[0] == "xla").split("\t")
    shown = dict(zip(heads, xla, strict=True))
    assert shown["kernels"] == "4"
    assert shown["largest array between kernels"] == "bf16[64,4096,4096], 2.15 GB (xlafuse/blocks/attention.py:19)"


def test_narrow_tables_break_no_words(report: Path, visit: Any, ready: Any) -> None:
    """Paths break only after a slash."""
    with visit(report, CASE) as page:
        ready(page)
        page.set_viewport_size({"width": 500, "height": 900})
        broken = page.evaluate("""() => {
          const found = [];
          const walker = document.createTreeWalker(document.querySelector(".glance tbody"), NodeFilter.SHOW_TEXT);
          while (walker.nextNode()) {
            for (const word of walker.currentNode.data.matchAll(/[\\w.:]+/g)) {
              const range = document.createRange();
              range.setStart(walker.currentNode, word.index);
              range.setEnd(walker.currentNode, word.index + word[0].length);
              if (new Set([...range.getClientRects()].map((r) => r.top)).size > 1) found.push(word[0]);
            }
          }
          return found;
        }""")
        assert broken == []
        assert page.locator(".scroll:has(.glance)").evaluate("e => e.clientWidth") <= 500


def test_a_case_has_its_charts(page: Any) -> None:
    assert page.locator("figure.chart:not([aria-label])").count() == 0
    assert page.locator("#case table:not(:has(thead th))").count() == 0
    for name in ("times", "ratios", "kernels", "roofline", "traffic"):
        assert page.locator(f'[data-chart="{name}"] svg').count() == 1, name
    bar = page.locator('[data-chart="kernels"] [aria-label*="attention_forward_kernel"]').first
    bar.hover()
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    words = tooltip.inner_text()
    assert "kernel" in words and "reads" in words and "µs" in words


def test_a_bar_leads_to_its_table_row(report: Path, visit: Any, ready: Any) -> None:
    """Without sources, a click on a bar shows the kernel's row."""
    with visit(report, CASE) as page:
        ready(page)
        page.evaluate("xlafuse.sources = undefined")  # as in a report without sources
        page.locator('[data-chart="kernels"] [aria-label*="attention_forward_kernel"]').first.click()
        page.wait_for_selector("tr.picked:visible")
        assert page.url.endswith(CASE)


def test_the_table_of_kernels(page: Any) -> None:
    """It shows the data of the drawing, which test_page_numbers.py checks; each kernel leads to its source."""
    fold = page.locator('details.kernels[data-implementation="xla"]')
    assert fold.locator("table").count() == 0  # made when the fold opens
    fold.locator("summary").click()
    fold.locator("tbody tr").first.wait_for()
    number = page.evaluate("xlafuse.load('settings').then((s) => s.cases.indexOf(location.hash.slice(7)))")
    data = page.evaluate(
        "async (n) => (await xlafuse.load('drawing', n)).columns.find(({name}) => name === 'xla')", number
    )
    heads = fold.locator("thead th").all_inner_texts()
    fields = {"kernel": "name", "reads": "read", "writes": "written", "FLOPs": "flops", "µs": "time",
              "roofline µs": "roofline_time", "recoverable µs": "recoverable", "bound": "bound"}
    rows = fold.locator("tbody tr")
    assert rows.count() == len(data["kernels"]) > 1
    for index, kernel in enumerate(data["kernels"]):
        shown = dict(zip(heads, rows.nth(index).locator("td").all_inner_texts(), strict=True))
        assert {head: shown[head] for head in fields} == {head: kernel[field] for head, field in fields.items()}
        assert shown["source"] == ", ".join(kernel["lines"][:4])
    rows.last.locator("a.kernel").click()
    page.wait_for_function("document.activeElement.closest('#c-sources')")


def test_focus_follows_a_kernel(page: Any) -> None:
    """Focus moves from the link to the source, and from there to the box."""
    link = page.locator('.glance a.kernel[data-implementation="xla"]').first
    kernel = int(link.get_attribute("data-kernel"))
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.closest('#c-sources')")
    page.locator(".so-chosen").first.wait_for()
    button = page.locator(".so-jump", has_text="its box in the graph")
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.matches('.dr-box')")
    own = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert own.startswith(f"{kernel + 1}, ")
    assert 0 < page.locator(".dr-box:focus").bounding_box()["y"] < 900


def test_records_sort_search_and_filter(report: Path, visit: Any, ready: Any) -> None:
    with visit(report, "#/records") as page:
        page.wait_for_selector("#records tbody tr")
        page.locator("#records thead th", has_text="time µs").first.click()
        page.wait_for_selector("th[aria-sort=ascending]")
        times = [float(text) for text in column(page, "time µs")]
        assert len(times) == 50 and times == sorted(times)
        page.get_by_label("search").fill("triton gpt2-scores")
        page.wait_for_function("document.querySelectorAll('#records tbody tr').length < 10")
        assert set(column(page, "implementation")) == {"triton"}
        page.get_by_label("search").fill("")
        page.get_by_label("direction", exact=True).select_option("=train")
        assert set(column(page, "direction")) == {"train"}
        page.locator("#records tbody a").first.click()
        ready(page)
        assert page.locator("#case .glance").is_visible()


def test_the_matrix_can_be_filtered(front: Any) -> None:
    front.locator("#matrix-filter").fill("attention train")
    shown = front.locator("#matrix tbody tr:visible").all_inner_texts()
    assert shown and all("train" in line for line in shown)
    assert "attention" in shown[0]


def test_the_matrix_can_be_filtered_by_implementation(front: Any) -> None:
    """Only matching rows and columns remain; without a match, a message says so."""
    heads = front.locator("#matrix thead th:visible")
    every = heads.all_inner_texts()
    assert not {"xla-unfused", "eager"} & set(every)
    front.locator("#matrix-filter").fill("softmax")
    assert "sdpa-cudnn" in every and "sdpa-cudnn" not in heads.all_inner_texts()
    front.locator("#matrix-filter").fill("sdpa-cudnn fwd")
    assert heads.all_inner_texts() == ["block", "case", "sdpa-cudnn"]
    lines = front.locator("#matrix tbody tr:visible")
    assert lines.count() and all("attention" in line and "fwd" in line for line in lines.all_inner_texts())
    assert lines.locator("td.none:visible").count() == 0
    front.locator("#matrix-filter").fill("triton attention")  # not triton-cudagraphs
    assert heads.all_inner_texts() == ["block", "case", "triton"]
    front.locator("#matrix-filter").fill("nonsense")
    assert front.locator("#matrix").is_hidden()
    assert "nonsense" in front.locator("#matrix-none").inner_text()
    front.locator("#matrix-filter").fill("")
    assert heads.all_inner_texts() == every and front.locator("#matrix-none").inner_text() == ""


def test_implementations_without_fusion_are_folded(front: Any) -> None:
    """A box or their name shows their columns, after all others."""
    heads = front.locator("#matrix thead th:visible")
    before = heads.all_inner_texts()
    front.locator("#matrix-unfused").check()
    shown = heads.all_inner_texts()
    assert shown[: len(before)] == before and set(shown[len(before) :]) == {"xla-unfused", "eager"}
    front.locator("#matrix-unfused").uncheck()
    assert heads.all_inner_texts() == before
    front.locator("#matrix-filter").fill("eager")
    assert heads.all_inner_texts() == ["block", "case", "eager"]


@pytest.mark.parametrize("width", [1400, 390])
def test_heads_and_cases_stay_in_sight(report: Path, visit: Any, width: int) -> None:
    with visit(report) as page:
        page.set_viewport_size({"width": width, "height": 300})
        page.locator("#matrix-unfused").check()
        page.evaluate("document.querySelector('.scroll.tall').scrollTo(10000, 10000)")
        page.locator("#matrix thead").scroll_into_view_if_needed()
        box = page.locator(".scroll.tall").bounding_box()
        head = page.locator("#matrix thead th").last.bounding_box()
        last = page.locator("#matrix tbody tr").last.locator("th").nth(1).bounding_box()
        assert abs(head["y"] - box["y"]) < 2
        assert box["x"] <= last["x"] < box["x"] + box["width"] / 2


def test_a_case_opens_on_times_and_graphs(page: Any) -> None:
    """The first screen says which implementation is fastest and draws the graphs; tables are further down."""
    parts = ("ul.choices", "#c-time", "#c-graphs", "#c-summary")
    places = [page.locator(part).bounding_box()["y"] for part in parts]
    assert places == sorted(places) and places[2] < 900


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(report: Path, visit: Any, ready: Any, scheme: str) -> None:
    """The theme follows the system until the reader switches it; charts follow the theme."""
    ground = "() => getComputedStyle(document.body).backgroundColor"
    ink = "() => getComputedStyle(document.querySelector('[data-chart=\"times\"] .role-axis-label text')).fill"
    with visit(report, CASE, color_scheme=scheme) as page:
        ready(page)
        before = page.evaluate(ground), page.evaluate(ink)
        assert page.evaluate("xlafuse.theme()") == scheme
        page.locator("#theme").click()
        page.wait_for_function(f"xlafuse.theme() !== '{scheme}'")
        page.wait_for_function(f"({ink})() !== '{before[1]}'")
        assert page.evaluate(ground) != before[0]
        light = {"light": before[0], "dark": page.evaluate(ground)}[scheme]
        assert light == "rgb(255, 255, 255)"


def test_the_keyboard_suffices(report: Path, visit: Any, ready: Any) -> None:
    with visit(report) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.locator("#matrix a", has_text="gpt2-scores bf16 fwd").focus()
        page.keyboard.press("Enter")
        ready(page)
        page.locator("details.kernels summary").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("details.kernels").first.get_attribute("open") is not None
        page.go_back()
        page.wait_for_selector("#overview:visible")


def test_printing_is_light_and_hides_controls(report: Path, visit: Any, ready: Any) -> None:
    with visit(report, CASE, color_scheme="dark") as page:
        ready(page)
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.evaluate("xlafuse.theme()") == "light"
        assert page.locator("header.top").is_hidden()
        assert page.locator("details.kernels table").first.is_visible()


@pytest.mark.parametrize("address", ["#/case/nonsense", "#/case/%E0%A4%A/<script>", "#/nonsense", "#/constructor"])
def test_an_unknown_address_says_so(report: Path, visit: Any, address: str) -> None:
    with visit(report, address) as page:
        assert page.locator("section.page:visible").get_attribute("id") == "unknown"
        said = page.locator("#unknown-what").inner_text()
        assert ("No case" in said) == address.startswith("#/case/") and address.rpartition("/")[2] in said
        page.locator("#unknown a", has_text="overview").click()
        page.wait_for_selector("#overview:visible")


def test_provenance_is_filtered_by_word(report: Path, visit: Any) -> None:
    with visit(report, "#/records") as page:
        page.wait_for_selector("#records tbody tr")
        choice = page.get_by_label("provenance", exact=True)
        words = {text for text in choice.locator("option").all_inner_texts()} - {"provenance", "(none)"}
        assert {"compiled", "device"} <= words <= {"compiled", "device", "replayed", "not autotuned", "unknown"}
        choice.select_option("=device")
        shown = set(column(page, "provenance"))
        assert all("device" in text for text in shown) and "device" in shown
        assert any("compiled" in text for text in shown)


def test_records_keep_their_columns_and_unknown_ones_last(report: Path, visit: Any) -> None:
    """Unknown values come last in both directions; block, case and implementation stay in view."""
    with visit(report, "#/records") as page:
        page.wait_for_selector("#records tbody tr")
        widths = "() => [...document.querySelectorAll('#records thead th')].map((th) => th.offsetWidth)"
        before = page.evaluate(widths)
        head = page.locator("#records thead th", has_text="/ xla").first
        page.locator(".dt-layout-table > .dt-layout-cell").evaluate("e => { e.scrollLeft = 700; }")
        place = head.bounding_box()
        for direction in ("ascending", "descending"):
            head.click()
            page.wait_for_selector(f"th[aria-sort={direction}]")
            page.locator("select.dt-input").select_option("500")
            cells = column(page, "/ xla")
            known = [float(text) for text in cells if text]
            assert cells == [text for text in cells if text] + [""] * (len(cells) - len(known)) and "" in cells
            assert known == sorted(known, reverse=direction == "descending")
            assert head.bounding_box() == place
        page.get_by_label("direction", exact=True).select_option("=train")
        assert page.evaluate(widths) == before
        left = page.locator(".dt-layout-table > .dt-layout-cell").bounding_box()["x"]
        fixed = page.locator("#records tbody tr").first.locator(".fixed").all()
        boxes = [cell.bounding_box() for cell in fixed]
        assert [box["x"] for box in boxes] == pytest.approx([left + sum(before[:i]) for i in range(3)], abs=2)
