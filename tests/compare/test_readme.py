"""The README's tables are what their commands print, of the committed run and of the blocks that there are."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from compare.graph import store
from compare.record import run_readme
from compare.record.run_files import recorded_file
from compare.record.run_folder import read_records
from compare.spec.blocks import BLOCKS

PROJECT = Path(__file__).parents[2]
RUNS = list((PROJECT / "reports").glob("*/run.json"))


@pytest.mark.parametrize("what", ["results", "blocks"])
def test_a_table_is_what_its_command_prints(what: str) -> None:
    readme = (PROJECT / "README.md").read_text()
    found = re.search(rf"<!-- {what}: xlafuse (.*?) -->\n\n(.*?)\n\n<!-- /{what} -->", readme, re.DOTALL)
    assert found, f"README.md has no {what}"
    command = [sys.executable, "-m", "compare", *shlex.split(found[1])]
    printed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert found[2] == printed.strip()


@pytest.mark.parametrize("run", sorted(path.parent for path in RUNS), ids=lambda run: run.name)
def test_a_committed_run_is_packed_and_described(run: Path) -> None:
    assert len(list(run.iterdir())) <= 8 and (run / "report.html").is_file()
    assert (run / "README.md").read_text() == run_readme.text(run)
    records, warnings = read_records(run)
    assert records and not warnings
    for record in records[::100]:
        if record.graph is not None:
            assert store.load(recorded_file(run, record, record.graph)).name, record.id


def test_committed_runs_are_few_and_small_files() -> None:
    found = [path for path in (PROJECT / "reports").rglob("*") if path.is_file()]
    assert len(found) <= 40 and sum(path.stat().st_size for path in found) <= 45e6


@pytest.mark.parametrize("page", ["README.md", "reports/README.md", "reports/index.html"])
def test_links_lead_somewhere(page: str) -> None:
    text = (PROJECT / page).read_text()
    found = re.findall(r"\]\(([^)#]+)\)|(?:href|src)=\"([^\"#]+)\"", text)
    links = [link for pair in found for link in pair if link and "://" not in link]
    assert [link for link in links if not (PROJECT / page).parent.joinpath(link).exists()] == []
    assert links


def test_every_committed_run_is_linked() -> None:
    text = (PROJECT / "reports" / "index.html").read_text()
    assert len(RUNS) >= 2
    assert [path for path in RUNS if f'href="{path.parent.name}/report.html"' not in text] == []


@pytest.mark.parametrize("name", ["h200-quick", "h200-blocks", "h200-full"])
def test_pages_have_as_many_records_as_the_run(name: str) -> None:
    records, _ = read_records(PROJECT / "reports" / name)
    right = sum(each.status == "ok" for each in records)
    every = f"all {right} records `ok`" if right == len(records) else f"{right} of {len(records)} records `ok`"
    assert every in (PROJECT / "reports" / "README.md").read_text()
    for page in ("README.md", "CHANGELOG.md", "reports/index.html"):
        assert re.search(rf"\b{len(records)} (records|results)\b", (PROJECT / page).read_text()), page


def test_leads_and_lags_are_the_full_suites() -> None:
    """Each line has the call's and the kernels' own time of `triton` and of the best other one, by its name; no lag is
    left out."""
    command = [sys.executable, "-m", "compare", "report", str(PROJECT / "reports" / "h200-full"), "--json"]
    printed = json.loads(subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout)
    main = {(name, block.cases("quick")[0].name) for name, block in BLOCKS.items()}
    timed: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for row in printed:
        if (row["block"], row["case"]) in main and row["device_time_us"] is not None:
            times = row["device_time_us"], row["busy_time_us"]
            timed.setdefault((row["block"], row["direction"]), {})[row["implementation"]] = times
    shown: dict[str, dict[tuple[str, str], tuple[str, str, str]]] = {"ahead": {}, "behind": {}}
    numbers, case = r"([\d.]+ \([\d.]+\))(?: !)?", r"`(\w+)`(?:, `(\w+)`)?"
    for line in (PROJECT / "README.md").read_text().splitlines():
        if re.match(r"\| (ahead|behind) ", line):
            table = shown[line.split()[1]]
        elif found := re.match(rf"\| {case} +\| {numbers} +\| {numbers} `([\w+-]+)`", line):
            table[found[1], found[2] or "fwd"] = found[3], found[4], found[5]

    def best(times: dict[str, tuple[float, float]]) -> tuple[tuple[float, float], str]:
        return min((pair, name) for name, pair in times.items() if name != "triton")

    for at, written in {**shown["ahead"], **shown["behind"]}.items():
        other, name = best(timed[at])
        assert written == (_both(timed[at]["triton"]), _both(other), name), at
    lags = {at for at, times in timed.items() if times["triton"][0] >= 1.05 * best(times)[0][0]}
    assert set(shown["behind"]) == lags
    assert shown["ahead"] and all(timed[at]["triton"] < best(timed[at])[0] for at in shown["ahead"])


def _both(times: tuple[float, float]) -> str:
    call, kernels = (f"{time:.3g}" if time < 1000 else f"{time:.0f}" for time in times)
    return f"{call} ({kernels})"
