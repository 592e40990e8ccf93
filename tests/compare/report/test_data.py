"""A run as data and as pictures: documented columns, the same numbers in every form, hostile text as text."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_records import made_record
from made_rows import rows_shown, written, xlafuse

from tools import tables
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.record import run_folder
from xlafuse.compare.report import picture
from xlafuse.compare.report.charts import PALETTE
from xlafuse.compare.report.columns import COLUMNS, as_data
from xlafuse.compare.report.outline import of_rows
from xlafuse.compare.report.views import rows_of
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.row import Row
from xlafuse.compare.sources.source import Source
from xlafuse.compare.spec.blocks import BLOCKS

RUN = PROJECT / "tests" / "data" / "runs" / "h200-small"
DOCUMENT = PROJECT / "docs" / "report-data.md"
HOSTILE = "<script>alert('1')</script>\"&\r\n\0,=1+1|" + "x" * 10_000
CASE = next(case for case in BLOCKS["softmax"].cases("quick") if case.direction == "fwd")


def csv_of(path: Path, folder: Path, *words: object) -> io.StringIO:
    """Return the CSV of the times that `report` writes into the folder."""
    return io.StringIO(written(path, folder / "times.csv", "--view", "times", *words))


def test_the_document_is_generated_from_the_columns() -> None:
    """`python -m tools.tables` writes it again."""
    assert tables.with_tables(DOCUMENT.read_text()) == DOCUMENT.read_text()


@pytest.mark.parametrize(
    ("table", "view"),
    [("records", "times"), ("kernels", "kernel-roofline"), ("authorship", "authorship"), ("findings", "findings")],
)
def test_json_has_the_columns_of_the_table(table: str, view: str) -> None:
    first, *_ = rows_shown(RUN, view, "--block", "softmax")
    assert list(first) == [column.name for column in tables.COLUMNS[table]]


def test_units_are_those_of_the_names() -> None:
    units = {"_us": "µs", "_bytes": "bytes", "_s": "s"}
    for column in COLUMNS:
        for ending, unit in units.items():
            if column.name.endswith(ending) and not column.name.endswith("gflop_per_s"):
                assert column.unit == unit, column.name


def test_csv_and_json_have_the_values_of_the_rows(tmp_path: Path) -> None:
    rows = as_data(rows_of(open_source(RUN).select({"block": ["softmax"]})))
    as_json = rows_shown(RUN, "times", "--block", "softmax")
    as_csv = list(csv.DictReader(csv_of(RUN, tmp_path, "--block", "softmax")))
    assert len(rows) == len(as_json) == len(as_csv) > 20
    for row, entry, line in zip(rows, as_json, as_csv, strict=True):
        assert list(entry) == list(line)
        for name, value in entry.items():
            assert not isinstance(value, dict | list), name
            assert value == row[name], name
            if isinstance(value, float):
                assert float(line[name]) == value, name
            else:
                assert line[name] == ("" if value is None else str(value)), name


def test_pandas_reads_both_as_one_table(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frames = [pandas.DataFrame(rows_shown(RUN, "times")), pandas.read_csv(csv_of(RUN, tmp_path))]
    assert frames[0].shape == frames[1].shape == (75, len(COLUMNS))
    for frame in frames:
        assert frame["device_time_us"].dtype == "float64" and frame["kernels"].sum() > 75
        assert not any(isinstance(value, dict | list) for column in frame for value in frame[column])
        fastest = frame.loc[frame[frame.block == "softmax"].device_time_us.idxmin()]
        assert fastest.implementation and fastest.device_time_us > 0
    assert frames[0].device_time_us.tolist() == frames[1].device_time_us.tolist()


def hostile_run(folder: Path) -> Path:
    run_folder.create(folder, {"segments": []})
    parts = {"forward": {"device_time": [[1e-4] * 5] * 5, "busy_time": [[1e-4] * 5] * 5, "launches": 1}}
    measured: dict[str, Any] = {"timer": "cupti", "phases": parts, "wall_time": [math.inf]}
    run_folder.append(folder, made_record(CASE, HOSTILE, "xla", "ok", detail=HOSTILE, measurement=measured))
    run_folder.append(folder, made_record(replace(CASE, name=HOSTILE), "xla", "xla", "ok", measurement=measured))
    return folder


def test_hostile_text_is_one_cell(tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "run")
    found = list(csv.DictReader(csv_of(folder, tmp_path)))
    assert [row["implementation"] for row in found] == [HOSTILE.replace("\0", "").replace("\r", ""), "xla"]
    assert found[0]["wall_time_us"] == "" and found[1]["case"].endswith("x" * 10_000)
    assert rows_shown(folder, "times")[0]["detail"] == HOSTILE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "x.csv", "--view", "stages", "--block", "softmax"], "no flat table"),
        (["-o", "x.svg", "--view", "traffic"], "a picture draws times"),
        (["-o", "x.jpg", "--block", "softmax"], "expected .html"),
        (["-o", "x.svg"], "cases are too many for a picture"),
        (["-o", "{tmp}/file/x.svg", "--block", "softmax"], "cannot be written"),
        (["-o", "{tmp}/file/x.csv", "--view", "times"], "cannot be written"),
        (["-o", "x.svg", "-i", "xlaa"], "did you mean xla"),
        (["-o", "x.svg", "--no-files"], "--no-files goes with a page"),
    ],
)
def test_refusals(tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(picture, "MOST_CASES", 5)
    monkeypatch.chdir(tmp_path)
    if "{tmp}" in str(words):
        pytest.importorskip("vl_convert")
    result = xlafuse("report", RUN, *(word.format(tmp=tmp_path) for word in words))
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_without_times_cannot_be_drawn() -> None:
    result = xlafuse("report", PROJECT / "tests" / "data" / "runs" / "jax-0.11", "-o", "x.svg")
    assert result.exit_code == 2 and "no row here has device_time_us" in result.stderr


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    result = xlafuse("report", RUN, "--block", "softmax", "-o", "x.svg")
    assert result.exit_code == 2 and "pip install 'xlafuse[html]'" in result.stderr


def words_of(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_bars_have_the_rows_times(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    file = tmp_path / "times.svg"
    words = ("--block", "attention", "--case", "llama-8b", "--direction", "train")
    text = written(RUN, file, *words)
    told = words_of(text)
    for word in ("attention / llama-8b / bf16 / train", "sdpa-cudnn", "1915 µs !", "2542 µs", "61413 µs"):
        assert word in told, word
    assert any(word.startswith("!: in some round") for word in told)
    assert told.index("sdpa-cudnn") < told.index("triton") < told.index("eager")  # fastest first
    assert "<script" not in text and "href=\"http" not in text
    again = [sys.executable, "-m", "xlafuse", "report", str(RUN), *words, "-o", str(tmp_path / "again.svg")]
    subprocess.run(again, check=True, cwd=PROJECT, capture_output=True, timeout=60)
    assert (tmp_path / "again.svg").read_text() == text


def test_the_roofline_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    file = tmp_path / "roof.png"
    words = ("--block", "softmax", "--case", "gpt2-scores", "--view", "roofline")
    result = xlafuse("report", RUN, *words, "-o", file)
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")
    told = words_of(written(RUN, file.with_suffix(".svg"), *words))
    assert {"reached", "roofline", "triton", "GFLOP/s", "FLOP per declared byte"} <= set(told)


def selected(run: Path, **wanted: str) -> tuple[Source, list[Row]]:
    source = open_source(run).select({name: [value] for name, value in wanted.items()})
    return source, rows_of(source)


def test_the_roof_is_the_segments() -> None:
    source, rows = selected(RUN, block="attention", case="llama-8b", direction="fwd")
    (chart,) = picture.roofline(rows, source.ceilings, picture.colours(rows))["vconcat"]
    roof = chart["layer"][0]["data"]["values"]
    segment = source.ceilings[rows[0].segment or ""]
    assert max(corner["gflops"] for corner in roof) == pytest.approx(segment.products["bfloat16"] / 1e9)
    slope = roof[0]["gflops"] * 1e9 / roof[0]["intensity"]
    assert slope == pytest.approx(segment.bandwidth(1, 1))
    points = chart["layer"][1]["data"]["values"]
    assert {p["gflops"] for p in points if p["kind"] == "reached"} == {row.gflop_per_s for row in rows}


def test_fp8_products_have_their_own_roof() -> None:
    source, rows = selected(PROJECT / "reports" / "h200", block="matmul_fp8", case="square-8k")
    (chart,) = picture.roofline(rows, source.ceilings, picture.colours(rows))["vconcat"]
    roof = max(corner["gflops"] for corner in chart["layer"][0]["data"]["values"])
    assert roof == pytest.approx(source.ceilings[rows[0].segment or ""].products["float8_e4m3fn"] / 1e9)
    assert all(point["gflops"] <= roof for point in chart["layer"][1]["data"]["values"])


def test_an_implementation_keeps_its_colour_in_every_selection() -> None:
    colours = picture.colours(rows_of(open_source(RUN)))
    for block in ("softmax", "attention"):
        for chart in picture.times(selected(RUN, block=block)[1], colours)["vconcat"]:
            scale = chart["layer"][0]["encoding"]["color"]["scale"]
            assert dict(zip(scale["domain"], scale["range"], strict=True)).items() <= colours.items()


def contrast(colour: str, ground: str) -> float:
    def luminance(text: str) -> float:
        channels = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("ground", ["#ffffff", "#0d1117"])
def test_pictures_can_be_read_on_light_and_dark(ground: str) -> None:
    assert contrast(picture.INK, ground) > 4.2
    assert all(contrast(colour, ground) > 2.2 for colour in PALETTE)


def test_hostile_names_are_text_in_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    text = written(hostile_run(tmp_path / "run"), tmp_path / "x.svg")
    ElementTree.fromstring(text)
    assert "<script" not in text and len(text) < 100_000


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r=", "\n=", "\0@", "＝"])
def test_csv_has_no_formulas(start: str) -> None:
    text = f"{start}HYPERLINK(1)"
    rows = [{"detail": text, "ratio": -1.5, "note": "-1.5", "of": "a=b"}]
    outline = of_rows("times", lambda: rows, lambda markdown: "")
    (line,) = csv.DictReader(io.StringIO(outline.csv()))
    assert line["detail"].startswith("'") and line["detail"].endswith("HYPERLINK(1)")
    assert (line["ratio"], line["note"], line["of"]) == ("-1.5", "-1.5", "a=b")
    assert json.loads(outline.json())["rows"] == rows
