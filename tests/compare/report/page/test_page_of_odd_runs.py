"""Pages of runs with hostile text, of small and large runs, runs without a GPU, and broken runs."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_records import made_record, measurement_of, with_fields, without_kernel_times

from xlafuse.compare.cli import main
from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.summary import summary
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Reason, SourceOp
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import Record
from xlafuse.compare.record.record_fields import PeakMemory
from xlafuse.compare.report.overall import overall
from xlafuse.compare.report.page import page
from xlafuse.compare.report.page.content import case as case_page
from xlafuse.compare.report.page.content import choices, libraries, records
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.spec.case import Case

SCRIPT = "<script>window.broken = true</script>"
HOSTILE = [
    SCRIPT, "\"'><img src=x onerror='window.broken=1'></script><!-- ]]>two\nlines\r\t\x1b[31m${1}{{7*7}}",
    "long" * 2500,
]
CEILINGS = {"streams": {"1:0": 4.4e12, "1:1": 4e12, "0:1": 3e12}, "products": {"bfloat16": 8e14}}
SEGMENTS = {"segments": [{"id": "s1", "environment": {}, "ceilings": CEILINGS}]}


def graph(name: str, *, target: str = "", times: tuple[float | None, float | None] = (None, None)) -> FusionGraph:
    """Return two kernels with an array of 16.8 MB between them; `name` is part of every name."""
    size = 2 * 4096 * 2048
    buffers = (
        Buffer(f"x{name}", (4096, 2048), "bf16", size, "input"),
        Buffer(f"scores{name}", (4096, 2048), "bf16", size, "intermediate"),
        Buffer(f"y{name}", (4096, 2048), "bf16", size, "output"),
    )
    kernels = tuple(
        Kernel(
            f"kernel{number}{name}", "reduction", runtime_name=f"ran{name}",
            source_ops=(SourceOp("exp", f"stage{name}", f"file{name}.py:{number}", site=f"{number}{name}"),),
            inputs=(Access(buffers[number].name, size),), outputs=(Access(buffers[number + 1].name, size),), flops=1e6,
            device_time_us=times[number],
        )
        for number in range(2)
    )
    ends = kernels[0].name, kernels[1].name
    reason = Reason(*ends, "reduction", f"why{name}", f"who{name}", 2 * size, line=f"line{name}")
    return FusionGraph(f"graph{name}", "xla", kernels, buffers, (reason,), target=target, versions={name: name})


def run_of(folder: Path, records: list[Record], graphs: dict[str, FusionGraph] | None = None, **run: Any) -> Path:
    run_folder.create(folder, SEGMENTS | run)
    for name, each in (graphs or {}).items():
        store.save(each, folder / name)
    for each in records:
        run_folder.append(folder, each)
    return folder


def timed(case: Case, implementation: str, us: float, made: FusionGraph | None = None, **fields: Any) -> Record:
    samples = [[us * 1e-6] * 5] * 5
    kernels = (made.kernels or ()) if made else ()
    half = us * 5e-7
    ran = [{"name": k.runtime_name, "start": i * half, "end": (i + 1) * half} for i, k in enumerate(kernels)]
    part = {"device_time": samples, "busy_time": samples, "launches": 2, "records": ran}
    measurement = {"timer": "cupti", "phases": {"forward": part}, "wall_time": [us * 1e-6] * 5}
    return made_record(
        case, implementation, "xla", "ok", segment="s1", measurement=measurement,
        errors=[{"name": f"y{implementation}", "error": 0.1, "tolerance": 0.3}], **fields,
    )


def written(folder: Path, tmp_path: Path, name: str = "page.html") -> Path:
    page.write(open_source(folder), tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_escaped(text: str, tmp_path: Path, visit: Any, ready: Any) -> None:
    case = Case(f"block{text}", f"case{text}", {f"axis{text}": 1}, "bfloat16", "fwd")
    made = {"fast": graph(text, times=(5.0, 5.0)), "slow": graph(text, times=(40.0, 40.0))}
    records = [
        timed(case, f"fast{text}", 10.0, made["fast"], graph="fast.json.gz", dumps="dumps/a.zip"),
        timed(case, f"slow{text}", 80.0, made["slow"], graph="slow.json.gz"),
        made_record(case, f"bad{text}", "eager", "failed", detail=f"no memory {text}", segment="s1"),
    ]
    graphs = {f"{name}.json.gz": each for name, each in made.items()}
    environment = {"host": {text: text}, "workers": {text: {"device": text}}}
    segments = [{"id": "s1", "started": text, "environment": environment, "ceilings": CEILINGS}]
    folder = run_of(tmp_path / "run", records, graphs, command=text, segments=segments)
    (folder / "dumps").mkdir()
    with zipfile.ZipFile(folder / "dumps" / "a.zip", "w") as archive:
        hlo = f"ENTRY %e () -> f32[] {{\n  %g = f32[] add(), {text}\n}}\n"
        archive.writestr(f"forward/{text[:200]}/optimized.hlo.txt", hlo)
        archive.writestr("forward/output_code.py", f"def call(args):\n    g({text}\n")
    file = written(folder, tmp_path)
    with visit(file) as it:
        it.locator("#matrix a").first.click()
        ready(it)
        assert it.locator("#case h1").inner_text().startswith("block")
        assert it.locator('[data-chart="kernels"] svg').count() == 1
        it.locator('[data-chart="kernels"] .mark-rect path').first.hover()
        it.locator("#vg-tooltip-element.visible").wait_for()
        it.locator("a.kernel").first.click()
        it.locator(".dr-box").first.click()
        assert ("<script>" in it.locator(".dr-tip").inner_text()) == (text == SCRIPT)
        it.keyboard.press("Escape")
        it.locator(".dr-table summary").click()
        it.locator(".so > .so-tabs .so-tab").first.click()
        it.locator(".so-line").first.wait_for()
        it.locator(".so-head .so-tab").nth(1).click()
        assert it.locator("[data-view] :is(img, script)").count() == 0
        it.goto(f"file://{file}#/records")
        it.wait_for_selector("#records tbody tr")
        assert it.locator("#records tbody tr").count() == 3
        it.goto(f"file://{file}#/about")
        assert it.evaluate("window.broken") is None
        assert it.locator("img").count() == 0
        if text == SCRIPT:
            assert SCRIPT in it.locator("#about").inner_text()
            assert SCRIPT in it.locator("#case").text_content()


def test_a_block_of_another_release(tmp_path: Path) -> None:
    case = Case("unknown", "tiny", {"rows": 4096}, "bfloat16", "fwd")
    folder = run_of(tmp_path / "run", [timed(case, "xla", 10.0), timed(case, "inductor", 20.0)])
    assert "xla" in written(folder, tmp_path).read_text()


def test_without_a_gpu(tmp_path: Path, visit: Any, ready: Any) -> None:
    """The page has kernels, bytes, reasons and roofline times of the target, and predicted times with their mark."""
    case = Case("softmax", "tiny", {"rows": 4096, "columns": 2048}, "bfloat16", "fwd")
    made = graph("", target="NVIDIA H200")
    compiled = made_record(
        case, "xla", "xla", "compiled", target="h200", graph="a.json.gz", kernels=summary(made, case.phases),
        bytes_compulsory={"forward": 2 * made.buffers[0].bytes},
    )
    skipped = made_record(case, "sdpa", "eager", "skipped", detail="needs a GPU", target="h200")
    folder = run_of(tmp_path / "run", [compiled, skipped], {"a.json.gz": made}, segments=[], target="h200")
    with visit(written(folder, tmp_path)) as it:
        assert "Nothing ran on a GPU" in it.locator("#overview .overall").inner_text()
        *counts, time, unit = it.locator("#matrix td").first.inner_text().split()
        assert (counts[:3], time[0], unit) == (["1.00", "2", "kernels"], "~", "µs")
        assert it.locator("#matrix td").nth(1).inner_text() == "skipped"
        it.locator("#matrix a").click()
        ready(it)
        assert it.locator("#c-time").count() == 0
        assert it.locator('[data-chart="kernels"] svg .mark-rect path').count() == 2
        assert "nothing was measured" in it.locator("#c-kernels").inner_text()
        assert "needs a GPU" in it.locator("#case .warning").inner_text()
        declared = 4 * made.buffers[0].bytes
        assert f"{declared / 1e6:.1f}" in it.locator("#c-bytes tbody tr").first.inner_text()


def test_wrong_results_are_not_compared(tmp_path: Path, tables: Any) -> None:
    """A wrong implementation may declare the fewest bytes because it leaves something out."""
    case = Case("softmax", "tiny", {"rows": 4096, "columns": 2048}, "bfloat16", "fwd")
    made = graph("", target="NVIDIA H200")
    short = replace(made, kernels=(made.kernels or ())[:1])

    def of(name: str, status: str, whose: FusionGraph) -> Record:
        kernels = summary(whose, case.phases)
        return made_record(case, name, "xla", status, target="h200", graph="a.json.gz", kernels=kernels)

    records = [of("xla", "compiled", made), of("inductor", "wrong", short), of("triton", "failed", short)]
    folder = run_of(tmp_path / "run", records, {"a.json.gz": made}, segments=[], target="h200")
    matrix = next(t for t in tables(written(folder, tmp_path).read_text()) if t[0][:2] == ["block", "case"])
    cells = dict(zip(matrix[0][2:], matrix[1][2:], strict=True))
    assert {name: cells[name] for name in ("inductor", "triton")} == {"inductor": "wrong", "triton": "failed"}
    assert "1.00" in cells["xla"]


def test_a_single_record_that_timed_out(tmp_path: Path, visit: Any, ready: Any) -> None:
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "float32", "fwd", "tf32")
    folder = run_of(tmp_path / "run", [made_record(case, "xla", "xla", "timeout", detail="no answer in 600 s")])
    with visit(written(folder, tmp_path), "#/case/softmax/tiny/fp32-tf32/fwd") as it:
        ready(it)
        assert it.locator("#case .warning").inner_text() == "xla: timeout: no answer in 600 s"
        assert it.locator("#c-numerics").count() == it.locator("#c-time").count() == 0


def test_ties_and_flips_are_marked(tmp_path: Path, visit: Any) -> None:
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    best, tie, flip = timed(case, "best", 100.0), timed(case, "tie", 100.2), timed(case, "flip", 150.0)
    measurement_of(flip).wall_time = [50e-6] * 5
    folder = run_of(tmp_path / "run", [best, tie, flip])
    with visit(written(folder, tmp_path)) as it:
        cells = it.locator("#matrix tbody td")
        assert [cells.nth(i).locator(".mark").all_inner_texts() for i in range(3)] == [[], ["≈"], ["⇄"]]
        assert "depends on the timer" in (cells.nth(2).get_attribute("title") or "")
        assert cells.nth(0).get_attribute("class") == "level0 best"


def test_a_tie_names_the_implementations_of_its_segment(tmp_path: Path) -> None:
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    fast, slow = timed(case, "triton", 100.0), timed(case, "xla", 150.0)
    elsewhere = [with_fields(timed(case, name, us), segment="s2") for name, us in (("flex", 200.0), ("fa4", 200.2))]
    run = open_source(run_of(tmp_path / "run", [fast, slow, *elsewhere]))
    assert choices.choices(run.cases[0])[0].endswith("is the fastest: 100 µs.")
    near = open_source(run_of(tmp_path / "near", [fast, timed(case, "xla", 100.2), *elsewhere]))
    assert choices.choices(near.cases[0])[0].endswith("is the fastest: 100 µs (XLA: a tie).")


def test_a_tie_overall_names_the_one_that_it_compares(tmp_path: Path) -> None:
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    folder = run_of(tmp_path / "run", [timed(case, "triton", 100.0), timed(case, "xla", 100.2)])
    text = overall(open_source(folder))
    assert text.startswith("Triton and XLA tie overall, within 1%. By geometric means of device times Triton is 1.00")


@pytest.mark.parametrize("planned", [5_000_000, None])
def test_an_unmeasured_peak_is_planned_or_has_a_reason(
    planned: int | None, tmp_path: Path, embedded: Any, tables: Any
) -> None:
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    blank = timed(case, "xla", 100.0)
    measurement_of(blank).peak_memory = {"forward": PeakMemory(None, planned, "no room")}
    file = written(run_of(tmp_path / "run", [blank]), tmp_path)
    html = embedded(file, "case", 0)["html"]
    heads, line = next(table for table in tables(html) if "wall µs" in table[0])
    shown = dict(zip(heads, line, strict=True))
    assert shown.get("memory MB") == (None if planned is None else "5.00 p")
    assert ("XLA's compiler planned" in html) == (planned is not None)
    assert ("xla: no peak memory: no room" in html) == (planned is None)
    records = embedded(file, "rows")
    titles, (values,) = [column["title"] for column in records["columns"]], records["rows"]
    assert (values[titles.index("memory MB")], values[titles.index("marks")]) == (
        (None, "") if planned is None else (5.0, "p")
    )


def test_times_are_compared_within_one_segment(tmp_path: Path, tables: Any) -> None:
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    apart = [timed(case, "here", 100.0), timed(case, "near", 150.0), timed(case, "elsewhere", 50.0)]
    apart[2].segment = "s2"
    segments = [{"id": name, "environment": {}, "ceilings": CEILINGS} for name in ("s1", "s2")]
    file = written(run_of(tmp_path / "run", apart, segments=segments), tmp_path)
    matrix = next(table for table in tables(file.read_text()) if table[0][:2] == ["block", "case"])
    assert matrix[1][2:] == ["1.00100", "1.50150", "50.0"]


def test_launches_without_records_are_not_shown(tmp_path: Path, tables: Any, embedded: Any) -> None:
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    kernels = {"forward": {"launches": 7, "bytes_declared": 8, "provenance": {}}}
    called, seen = timed(case, "called", 10.0, kernels=kernels), timed(case, "seen", 11.0)
    measurement_of(called).timer = "cuda-events"
    without_kernel_times(called)
    file = written(run_of(tmp_path / "run", [called, seen]), tmp_path)
    glance = tables(embedded(file, "case", 0)["html"].partition('id="c-summary"')[2])[0]
    launches = glance[0].index("launches")
    assert [row[launches] for row in glance[1:]] == ["", "2"]


@pytest.mark.full
def test_two_thousand_records(tmp_path: Path, visit: Any) -> None:
    cases = [Case("softmax", f"case-{i}", {"rows": i, "columns": 2}, "bfloat16", "fwd") for i in range(100)]
    folder = tmp_path / "run"
    run_folder.create(folder, SEGMENTS)
    lines = [timed(case, f"way-{way}", 10.0 + way).to_json() for case in cases for way in range(20)]
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    file = written(folder, tmp_path)
    with visit(file, "#/records") as it:
        it.wait_for_selector("#records tbody tr")
        assert "of 2,000 entries" in it.locator(".dt-info").inner_text()
        took = it.evaluate(
            """() => {
              const from = performance.now();
              const search = document.querySelector(".dt-search input");
              search.value = "case-99 way-17";
              search.dispatchEvent(new Event("input", { bubbles: true }));
              return performance.now() - from;
            }"""
        )
        it.wait_for_function("document.querySelectorAll('#records tbody tr').length === 1")
        assert took < 1000


def test_a_broken_graph_affects_only_its_record(tmp_path: Path) -> None:
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    folder = run_of(tmp_path / "run", [
        timed(case, "xla", 10.0, graph="../outside.json"), timed(case, "triton", 11.0, graph="missing.json.gz"),
    ])
    with (folder / "records.jsonl").open("a") as file:
        file.write("{half a line\n")
    shown = open_source(folder)
    written(folder, tmp_path)
    assert len(shown.results) == 2
    assert [result.unreadable is not None for result in shown.results] == [True, True]
    assert any("line skipped" in warning for warning in shown.warnings)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def xlafuse(*words: object) -> str:
        done = CliRunner().invoke(main.cli, list(map(str, words)))
        assert done.exit_code == 2 and len(done.output.strip().splitlines()) == 1, done.output
        return done.output

    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    folder = run_of(tmp_path / "run", [timed(case, "xla", 10.0)])
    out = tmp_path / "page.html"
    assert "all views" in xlafuse("report", folder, "-o", out, "--view", "matrix")
    assert "softmx" in xlafuse("report", folder, "-o", out, "--block", "softmx")
    assert "no graph found" in xlafuse("report", tmp_path, "-o", out)
    assert "no record to show" in xlafuse("report", run_of(tmp_path / "empty", []), "-o", out)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in xlafuse("report", folder, "-o", tmp_path / "file" / "page.html")
    libraries.read.cache_clear()
    find = libraries.importlib.util.find_spec
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None if name == "itables" else find(name))
    assert "needs itables: pip install 'xlafuse[html]'" in xlafuse("report", folder, "-o", out)
    assert not out.exists()


def test_no_folder_is_made_for_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page /dev/stdout must not make a folder /dev/stdout-files."""
    folders: list[Path | None] = []

    def document(run: Any, packages: Any, folder: Path | None) -> str:
        folders.append(folder)
        return "page"

    monkeypatch.setattr(page, "document", document)
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    folder = run_of(tmp_path / "run", [timed(case, "xla", 10.0)])
    for out in (Path("/dev/null"), tmp_path / "new.html", tmp_path / "new.html"):  # the second time, the file exists
        page.write(open_source(folder), out)
    assert folders == [None, *[tmp_path / "new-files"] * 2] and Path("/dev/null").is_char_device()


def test_static_files_cannot_end_their_elements() -> None:
    files = [*Path(page.__file__).with_name("static").iterdir()]
    assert {file.suffix for file in files} == {".css", ".js"}
    for file in files:
        text = file.read_text().lower()
        assert "</script" not in text and "</style" not in text and "<!--" not in text, file


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("measurement", "phases", "forward", "records", 0), []),
        (("measurement", "phases", "forward", "records", 0, "end"), "late"),
        (("measurement", "wall_time", 2), 0.0),
        (("errors", 0), {"error": 0.1, "tolerance": None}),
        (("traffic",), {"call": {"phases": {"forward": {"kernels": [{"kernel": 0, "dram_read": "x"}]}}}}),
        (("case", "name"), "\ud800"),
        (("checked",), {"device": 5, "case": []}),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_malformed_fields(path: tuple[str | int, ...], value: Any, tmp_path: Path) -> None:
    """A malformed field affects at most its own record."""
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    made = graph("", times=(5.0, 5.0))
    odd = timed(case, "odd", 10.0, made, graph="a.json.gz").to_json()
    at: Any = odd
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    folder = run_of(tmp_path / "run", [timed(case, "even", 11.0, made, graph="a.json.gz")], {"a.json.gz": made})
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps(odd) + "\n")
    shown = open_source(folder)
    written(folder, tmp_path)
    assert "even" in {result.name for result in shown.results}


@pytest.mark.parametrize("segments", [5, [5], [{}], [{"id": "s1", "ceilings": {"streams": {"1:1": 0}}}], None])
def test_malformed_segments(segments: Any, tmp_path: Path) -> None:
    case = Case("softmax", "tiny", {"rows": 2, "columns": 2}, "bfloat16", "fwd")
    made = graph("", times=(5.0, 5.0))
    folder = run_of(tmp_path / "run", [timed(case, "xla", 10.0, made, graph="a.json.gz")], {"a.json.gz": made})
    (folder / "run.json").write_text(json.dumps({"segments": segments}))
    assert written(folder, tmp_path).is_file()
    assert len(open_source(folder).results) == 1


def test_recorded_times_of_a_run_without_a_gpu(tmp_path: Path) -> None:
    """The page shows the times that an H200 recorded, says so, and does not say that there are none."""

    def shown(folder: Path) -> tuple[str, list[str]]:
        run = open_source(folder)
        html = page.render("case.html", **case_page.values(run.cases[0]), drawn_kernels=False, rank_calls=None)
        return html, [column["title"] for column in records.data(run)["columns"]]

    case = Case("softmax", "tiny", {"rows": 4096, "columns": 2048}, "bfloat16", "fwd")
    made = graph("", target="NVIDIA H200")
    known = made_record(
        case, "xla", "xla", "compiled", target="h200", graph="a.json.gz", kernels=summary(made, case.phases),
        recorded={"device_time_us": 82.4},
    )
    other = with_fields(known, implementation="triton", recorded={"unavailable": "other kernels"})
    folder = run_of(tmp_path / "run", [known, other], {"a.json.gz": made}, segments=[], target="h200")
    text = written(folder, tmp_path).read_text()
    assert "1 of 2 records has the time of the same kernels, recorded on an H200." in text
    assert "2 kernels · 82.4 µs" in text and "there are no times" not in text
    of_case, titles = shown(folder)
    assert "µs recorded on an H200" in of_case and "82.4" in of_case and "recorded µs" in titles
    folder = run_of(tmp_path / "other", [other], {"a.json.gz": made}, segments=[], target="h200")
    text = written(folder, tmp_path).read_text()
    assert "so there are no times" in text and "recorded on an" not in text
    of_case, titles = shown(folder)
    assert "recorded on" not in of_case and "recorded µs" not in titles
