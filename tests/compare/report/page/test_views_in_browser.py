"""The fusion graphs and sources in a browser: pointer, keyboard and hostile text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph import formats
from xlafuse.compare.report.page import page as report_page
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.source import Source

CASE = {"block": ["rmsnorm"], "case": ["llama-8b"], "direction": ["train"]}
ROUTE = "#/case/rmsnorm/llama-8b/bf16/train"
# Keep the kernels for which sources are shown.
LISTEN = """() => { window.picked = []; const show = xlafuse.sources.show;
  xlafuse.sources.show = (element, data, options) => {
    if (options.kernel && options.focus) picked.push(options.kernel);
    return show(element, data, options);
  }; }"""


@pytest.fixture(scope="module")
def run() -> Source:
    return open_source(PROJECT / "tests" / "data" / "runs" / "h200-rmsnorm").select(CASE)


@pytest.fixture(scope="module")
def path(run: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("views") / "page.html"
    report_page.write(run, out)
    return out


@pytest.fixture(scope="module")
def opened(visit: Any, path: Path) -> Iterator[Any]:
    with visit(path) as it:
        it.evaluate(LISTEN)
        yield it


@pytest.fixture
def page(opened: Any, show: Any) -> Any:
    """The case, opened again."""
    opened.evaluate("picked.length = 0")
    show(opened, ROUTE)
    return opened


def box(page: Any, implementation: str, index: int) -> Any:
    heads = page.locator(".dr-chip").all_inner_texts()
    return page.locator(f'.dr-box[data-key="{heads.index(implementation)}.{index}"]').first


def test_boxes_cover_their_stages(page: Any) -> None:
    stages = {stage.inner_text(): stage.bounding_box() for stage in page.locator(".dr-stage").all()[:3]}
    assert list(stages) == ["mean_square", "normalize", "weight"]
    fused = box(page, "triton", 0).bounding_box()
    first, last = stages["mean_square"], stages["weight"]
    assert first["y"] < fused["y"] < first["y"] + first["height"]
    assert last["y"] < fused["y"] + fused["height"] < last["y"] + last["height"]
    apart = box(page, "xla", 0).bounding_box()
    assert apart["y"] + apart["height"] < first["y"] + first["height"]
    drawn = page.locator(".dr-edge:not(.dr-minor)")
    widths = drawn.evaluate_all("e => e.map((x) => parseFloat(x.style.strokeWidth))")
    assert max(widths) > 8 and min(widths) < 5


def test_a_hand_written_kernel_has_the_colour_of_its_work(page: Any) -> None:
    colour = "e => getComputedStyle(e).borderLeftColor"
    of_xla = [box(page, "xla", index) for index in range(8)]
    reduction = next(each for each in of_xla if "reduction" in each.get_attribute("aria-label"))
    assert box(page, "triton", 0).evaluate(colour) == reduction.evaluate(colour)


def test_the_tip_has_bytes_flops_time_and_lines(page: Any, run: Source) -> None:
    xla = next(result for result in run.results if result.name == "xla")
    first = (xla.load().kernels or ())[0]
    box(page, "xla", 0).hover()
    tip = page.locator(".dr-tip")
    tip.wait_for()
    words = tip.inner_text()
    assert formats.microseconds(first.device_time_us) in words
    assert formats.size(first.bytes_read) in words and formats.size(first.bytes_written) in words
    assert formats.flops(first.flops or 0) in words
    assert all(line in words for line in first.lines)
    page.mouse.move(1, 1)
    tip.wait_for(state="hidden")


def test_the_tip_of_a_buffer(page: Any) -> None:
    page.evaluate("""() => { const hit = document.querySelector(".dr-hit");
        hit.dispatchEvent(new PointerEvent("pointerenter", {pointerType: "mouse"})); }""")
    words = page.locator(".dr-tip").inner_text()
    assert "written by" in words and "read by" in words and "MB" in words


def test_a_kernel_leads_to_its_lines_and_back(page: Any) -> None:
    box(page, "xla", 2).click()
    page.locator(".dr-actions button").click()
    assert page.evaluate("picked") == [{"implementation": "xla", "index": 2}]
    chosen = page.locator(".so-chosen")
    chosen.first.wait_for()
    text = "\n".join(chosen.all_text_contents())
    assert "fusion(%inputs__weight__.1" in text and "%fused_convert_multiply" in text
    assert page.locator(".so-code").evaluate("e => e.scrollTop") > 0
    page.locator('.so-mark[title="kernel input_convert_reduce_fusion"]').first.click()
    assert page.evaluate("picked.at(-1)") == {"implementation": "xla", "index": 0}
    assert "dr-on" in box(page, "xla", 0).get_attribute("class")


def test_a_line_leads_to_its_kernel_and_box(page: Any) -> None:
    box(page, "xla", 2).click()
    page.locator(".dr-actions button").click()
    chosen = page.locator(".so-chosen")
    chosen.first.wait_for()
    assert page.evaluate("document.activeElement.className") == "so-code"
    page.locator(".so-choose select").focus()
    page.locator(".so-choose select").select_option("0")
    page.wait_for_function("document.activeElement.tagName === 'SELECT'")
    within = page.locator(".so-line.so-held:not(:has(.so-mark))", has_text="ROOT")
    within.first.locator(".so-text").click()
    picked = page.evaluate("picked.at(-1)")
    number = int(within.first.get_attribute("data-line") or 0)
    spans = page.evaluate(
        "xlafuse.load('sources', 0).then(({records}) => records.find((r) => r.name === 'xla').documents[0].kernels)"
    )
    assert any(first < number <= last for first, last in spans[str(picked["index"])])
    page.locator(".so-jump", has_text="its box in the graph").click()
    key = page.evaluate("document.activeElement.dataset.key")
    assert key == box(page, "xla", picked["index"]).get_attribute("data-key")
    assert "dr-on" in box(page, "xla", picked["index"]).get_attribute("class")


def test_a_line_of_several_kernels_lists_them(page: Any) -> None:
    shared = page.evaluate("""async () => {
        const {records} = await xlafuse.load("sources", 0);
        for (const [r, record] of records.entries()) for (const [d, {kernels}] of record.documents.entries()) {
          const all = Object.entries(kernels).flatMap(([k, spans]) => spans.map(([a, b]) => [Number(k), a, b]));
          for (const [, a] of all) {
            const of = new Set(all.filter(([, c, e]) => c <= a && a <= e).map(([k]) => k));
            if (of.size > 1) return {record: r, document: d, line: a, of: [...of]};
          }
        }
        return null; }""")
    page.locator(".so > .so-tabs .so-tab").nth(shared["record"]).click()
    page.locator(".so-head .so-tab").nth(shared["document"]).click()
    page.locator(f'.so-line[data-line="{shared["line"]}"] .so-text').click()
    page.wait_for_function("picked.length")
    first = page.evaluate("picked.at(-1)")["index"]
    others = [index for index in shared["of"] if index != first]
    assert f"line {shared['line']} is also of" in page.locator(".so-jumps").inner_text()
    page.locator(".so-jump", has_text=f"kernel {others[0] + 1}").last.click()
    assert page.evaluate("picked.at(-1)")["index"] == others[0]


def test_hlo_leads_to_the_program(page: Any) -> None:
    page.locator("button.so-place").first.click()
    page.locator(".so-target").wait_for()
    assert page.locator('.so-tab[aria-pressed="true"]').nth(1).inner_text() == "xlafuse/blocks/rmsnorm.py"
    assert page.locator(".so-mark").count() > 3


def test_a_line_in_a_tip_is_a_link(page: Any) -> None:
    box(page, "triton", 1).click()
    page.locator(".dr-tip dd button").first.click()
    assert page.evaluate("picked")[0]["line"].startswith("triton_side/kernels/rmsnorm.py:")
    page.locator(".so-chosen").first.wait_for()
    seen = """() => {
        const [line, code] = [".so-target", ".so-code"].map((s) => document.querySelector(s).getBoundingClientRect());
        return line.top >= code.top && line.bottom <= code.bottom; }"""
    page.wait_for_function(seen)
    assert "def rmsnorm_backward_kernel" in "\n".join(page.locator(".so-chosen").all_text_contents())


def test_kernels_link_their_ptx_and_sass(page: Any, path: Path) -> None:
    box(page, "triton", 0).click()
    page.locator(".dr-actions button").click()
    links = page.locator(".so-files > p a")
    links.first.wait_for()
    assert [link.inner_text().rpartition(".")[2] for link in links.all()] == ["ptx", "sass"]
    hrefs = links.evaluate_all("e => e.map((x) => x.getAttribute('href'))")
    assert all((path.parent / href).is_file() for href in hrefs)


def test_the_keyboard_reaches_everything(page: Any) -> None:
    box(page, "xla", 0).focus()
    page.keyboard.press("ArrowDown")
    page.locator(".dr-tip").wait_for()
    assert page.evaluate("document.activeElement.dataset.key") == "0.1"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.column") != "0"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "its source →"
    page.keyboard.press("Escape")
    assert page.locator(".dr-tip").is_hidden()
    assert page.evaluate("document.activeElement.dataset.column") == "0"
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.evaluate("picked")[0]["implementation"] == "xla"
    page.locator(".so-choose select").select_option("3")
    assert page.evaluate("picked.at(-1)") == {"implementation": "xla", "index": 3}


def test_columns_fold_unfold_and_hide(page: Any) -> None:
    shown = page.locator(".dr-head").count()
    page.locator(".dr-chip", has_text="eager").click()
    assert page.locator(".dr-head").count() == shown + 1
    fold = page.locator(".dr-fold")
    folds, boxes = fold.count(), page.locator(".dr-box").count()
    assert folds > 0
    fold.first.click()
    assert fold.count() == folds - 1 and page.locator(".dr-box").count() > boxes
    page.get_by_text("every kernel").click()
    assert fold.count() == 0
    page.locator(".dr-button", has_text="fit").click()
    assert page.locator(".dr-scroll").evaluate("e => e.scrollWidth - e.clientWidth") <= 2


def test_a_track_may_be_empty(page: Any) -> None:
    """A fold stands at the first box of a split kernel, so later tracks can be empty."""
    units = [{"piece": [0, 0, 1]}, {"piece": [2, 0, 0]}]
    assert page.evaluate("units => xlafuse.drawn.tracksOf(units).map((track) => track?.length)", units) == [1, 0, 1]


def test_the_drawing_as_tables(page: Any) -> None:
    page.locator(".dr-table summary").click()
    tables = page.locator(".dr-table table")
    tables.nth(1).wait_for()
    assert tables.nth(0).locator("td", has_text="backward: weight").count() == 1
    assert "saved" in tables.nth(1).inner_text()


def test_dark_and_touch(visit: Any, path: Path) -> None:
    with visit(path, ROUTE, ready="article[data-shown]", color_scheme="dark", has_touch=True) as page:
        dark = page.locator(".dr-head").first.evaluate("e => getComputedStyle(e).backgroundColor")
        assert dark == "rgb(29, 33, 39)"
        box(page, "inductor", 0).tap()
        assert "FLOPs" in page.locator(".dr-tip").inner_text()
        box(page, "inductor", 0).tap()
        assert page.locator(".dr-tip").is_hidden()
