"""Tables of documents have the values of the committed runs, links lead somewhere, and committed runs are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import tables
from xlafuse.compare.graph import store
from xlafuse.compare.record import run_readme
from xlafuse.compare.record.run_files import recorded_file
from xlafuse.compare.record.run_folder import read_records
from xlafuse.compare.sources.source import Source
from xlafuse.compare.spec.blocks import BLOCKS

PROJECT = Path(__file__).parents[2]
RUNS = list((PROJECT / "reports").glob("*/run.json"))


@pytest.mark.parametrize("page", [str(path.relative_to(PROJECT)) for path in tables.DOCUMENTS])
def test_tables_have_the_values_that_the_runs_have(page: str) -> None:
    """`python -m tools.tables` writes them again."""
    text = (PROJECT / page).read_text()
    assert _values(tables.with_tables(text)) == _values(text)


def _values(text: str) -> list[str]:
    """Return the words and numbers of a document, without the lines and spaces of its tables."""
    return re.sub(r"[|\s]|-{3,}", " ", text).split()


def test_wins_and_losses_leave_no_loss_out() -> None:
    found = tables.wins_and_losses()
    ratios = [float(ratio) for *_, ratio in found]
    assert ratios == sorted(ratios, reverse=True)
    assert all(ratio <= tables.BEHIND or ratio >= tables.AHEAD for ratio in ratios)
    shown = {case for case, *_ in found}
    assert {"`moe`", "`moe`, train", "`cross_entropy`"} <= shown and "`vector_add`" not in shown
    assert all(pallas for case, _, pallas, *_ in found if case.startswith("`moe`"))


def test_the_readme_names_every_loss(committed_run: Source) -> None:
    times: dict[str, dict[str, float]] = {}
    for row in (result.row for result in committed_run.results):
        if row.case_name == BLOCKS[row.block].shapes[0].name and row.device_time_us is not None:
            case = f"`{row.block}`" + ("" if row.direction == "fwd" else f", {row.direction}")
            times.setdefault(case, {})[row.implementation] = row.device_time_us
    text = (PROJECT / "README.md").read_text()
    ours = {"triton", "triton-cudagraphs", "cuda", "pallas", "xla+triton", "xla+pallas"}
    for case, found in times.items():
        own = min(time for name, time in found.items() if name in ("triton", "triton-cudagraphs"))
        loses = own >= min(time for name, time in found.items() if name not in ours) / 0.95
        assert not loses or f"| {case} " in text, case


def test_blocks_whose_launches_cost_time_have_replays_of_cuda_graphs() -> None:
    gaps = tables.launch_gaps()
    assert len(gaps) == sum(not block.spans_gpus for block in BLOCKS.values())
    assert [block for block, *_, over, has in gaps if over and not has] == []


def test_the_readme_is_short() -> None:
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 120


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
    assert len(found) <= 40 and sum(path.stat().st_size for path in found) <= 20e6


@pytest.mark.parametrize("page", ["README.md", "docs/README.md", "reports/README.md", "reports/index.html"])
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


@pytest.mark.parametrize("run", sorted(path.parent for path in RUNS), ids=lambda run: run.name)
def test_the_index_has_as_many_records_as_the_run(run: Path) -> None:
    records, _ = read_records(run)
    right = sum(each.status == "ok" for each in records)
    every = f"all {right} records `ok`" if right == len(records) else f"{right} of {len(records)} records `ok`"
    assert every in (PROJECT / "reports" / "README.md").read_text()
    assert re.search(rf"\b{len(records)} (records|results)\b", (PROJECT / "reports" / "index.html").read_text())
