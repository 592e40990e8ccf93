"""`xlafuse diff` of two runs: its text, JSON and HTML, and its exit code."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from examples import XLA
from made_records import append_malformed, with_fields
from made_runs import SEGMENT, changed, diff, flat, record

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli import diff as diff_command
from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.record import run_folder as folders
from xlafuse.compare.record.record import Record
from xlafuse.compare.report.diff.runs import REGRESSIONS

DATA = Path(__file__).parents[3] / "data" / "runs"
KERNELS = {"forward": {"launches": 8, "bytes_declared": 1000, "provenance": {"device": 8}}}


def named(name: str, us: float = 100.0, launches: int = 1, **fields: Any) -> Record:
    made = with_fields(record(us), implementation=name, **{"kernels": KERNELS, **fields})
    made.times["forward"].launches = launches
    return made


def run(folder: Path, *records: Record, graphs: dict[str, FusionGraph] | None = None, **about: Any) -> Path:
    """Write a run's folder. graphs: by implementation."""
    folders.create(folder, {"segments": [SEGMENT], **about})
    for each in records:
        if graph := (graphs or {}).get(each.implementation):
            each = with_fields(each, graph=f"graphs/{each.implementation}.json.gz")
            store.save(graph, folder / str(each.graph))
        folders.append(folder, each)
    return folder


def kernels_of(launches: int, declared: int) -> dict[str, Any]:
    return {"forward": {"launches": launches, "bytes_declared": declared, "provenance": {"device": launches}}}


def test_two_versions_of_jax() -> None:
    """jax 0.11 fuses two of the three records in tests/data/runs differently from 0.10."""
    result = diff(DATA / "jax-0.10", DATA / "jax-0.11")
    assert result.exit_code == 1, result.output
    text = flat(result.stdout)
    assert text.index("jax 0.10.2 → 0.11.2") < text.index("swiglu_mlp")  # the environment comes first
    for part in (
        "swiglu_mlp/llama-8b/bf16/fwd/xla: 5 → 7 kernels, declared bytes 805 MB → 872 MB",
        "+ 2. fusion.12 elementwise 33.6 MB", "written to memory now: 2 buffers, 33.6 MB",
        "geglu/prime/fp32/train/xla 2 → 2 kernels, 334 MB → 301 MB declared",
        "no longer written to memory: 1 buffer, 16.7 MB", "with: mul (xlafuse/blocks/gelu.py:15)",
        "not autotuned 4, compiled 1 → replayed 4, compiled 3", "2 records fused differently, 1 fused the same",
    ):
        assert part in text, part


def test_equal_runs_have_no_regression(tmp_path: Path) -> None:
    a, b = (run(tmp_path / name, named("xla"), graphs={"xla": XLA}) for name in "ab")
    result = diff(a, b)
    assert result.exit_code == 0, result.output
    text = flat(result.stdout)
    for part in ("1 time compared: 1 tied (tolerance 5%)", "1 fused the same", "no regression", "same packages"):
        assert part in text


# By kind of regression, the record of the later run.
WORSE = {
    "slower": named("it", 120.0),
    "launch-gap": with_fields(named("it"), measurement=record(130, busy=100).measurement),
    "status": named("it", status="wrong", detail="out: error 3 over tolerance 1"),
    "kernels": named("it", launches=2),
    "bytes": named("it", kernels=kernels_of(8, 1060)),
    "missing": None,
}


@pytest.mark.parametrize("kind", WORSE)
def test_fail_on_selects_each_regression(tmp_path: Path, kind: str) -> None:
    other = named("other")
    worse = WORSE[kind]
    a, b = run(tmp_path / "a", named("it"), other), run(tmp_path / "b", *([worse] if worse else []), other)
    answer = json.loads(diff(a, b, "--json").stdout)
    by_id = {each["id"].rpartition("/")[2]: each for each in answer["records"]}
    assert by_id["it"]["regressions"] == [kind] and by_id["other"]["regressions"] == []
    assert diff(a, b).exit_code == (0 if kind == "launch-gap" else 1)
    assert diff(a, b, "--fail-on", kind).exit_code == 1
    rest = ",".join(each for each in WORSE if each != kind)
    assert diff(a, b, "--fail-on", rest).exit_code == 0
    assert diff(b, a, "--fail-on", ",".join(WORSE)).exit_code == 0  # the other way round is an improvement


@pytest.mark.parametrize("kind", WORSE)
def test_another_card_is_named_and_nothing_regresses(tmp_path: Path, kind: str) -> None:
    worse = WORSE[kind]
    small = {**SEGMENT, "environment": {"workers": {"xla": {"device": "NVIDIA L4"}}}}
    a = run(tmp_path / "a", named("it"), named("other"))
    b = run(tmp_path / "b", *([worse] if worse else []), named("other"), segments=[small])
    done = diff(a, b, "-o", tmp_path / "diff.html")
    assert done.exit_code == 0 and "another card: NVIDIA H200 → NVIDIA L4" in flat(done.stdout)
    page = (tmp_path / "diff.html").read_text()
    assert "Another card" in page and "egressed" not in page and "No regression" not in page
    answer = json.loads(diff(a, b, "--json").stdout)
    assert answer["regressed"] == [] and not any(each["regressions"] for each in answer["records"])
    refused = diff(a, b, "--fail-on", "status")
    assert refused.exit_code == 2 and "NVIDIA L4" in refused.stderr


def test_targets_are_cards_and_each_record_has_its_own(tmp_path: Path) -> None:
    def compiled(target: str, launches: int) -> Record:
        made = named("xla", status="compiled", target=target, kernels=kernels_of(launches, 1000))
        return with_fields(made, measurement=None)

    known = {"xla": XLA}
    a, b = (run(tmp_path / name, compiled(name, n), graphs=known) for name, n in (("h200", 8), ("h100", 9)))
    assert diff(a, b).exit_code == 0 and "NVIDIA H200 → NVIDIA H100" in flat(diff(a, b).stdout)
    same = run(tmp_path / "same", compiled("h200", 9), graphs=known)
    assert diff(a, same).exit_code == 1  # the same card
    on_it = run(tmp_path / "on-it", named("xla"), graphs=known)
    assert "another card" not in flat(diff(a, on_it).stdout)  # measured on the GPU that the other was compiled for


def test_the_tolerance_decides(tmp_path: Path) -> None:
    a = run(tmp_path / "a", named("xla", kernels=kernels_of(8, 1000)))
    b = run(tmp_path / "b", named("xla", 104.0, kernels=kernels_of(8, 1040)))
    assert diff(a, b).exit_code == 0
    answer = json.loads(diff(a, b, "--tolerance", "3%", "--json").stdout)
    assert answer["records"][0]["regressions"] == ["slower", "bytes"] and answer["tolerance"] == 0.03
    assert diff(a, b, "--tolerance", "0.03").exit_code == 1


def test_sections_in_the_terminal(tmp_path: Path) -> None:
    about = {"xlafuse": "0.1", "target": None}
    a = run(
        tmp_path / "a", named("slow"), named("fast"), named("gaps"), named("wrong"),
        named("right", status="failed", detail="why"), named("gone"), named("timer"), named("remat"),
        graphs={"remat": XLA}, **about,
    )
    wrong = named("wrong", status="wrong", detail="out: error 3 over tolerance 1")
    gaps = with_fields(named("gaps"), measurement=record(200, busy=100).measurement)
    timer = with_fields(named("timer"), measurement=record(100, timer="cuda-events").measurement)
    b = run(
        tmp_path / "b", named("slow", 150.0), named("fast", 50.0), gaps, wrong, named("right"), named("new"), timer,
        named("remat"), graphs={"remat": changed()}, **{**about, "xlafuse": "0.2"},
    )
    result = diff(a, b)
    text, id = flat(result.stdout), record(1).case.id
    for part in (
        "xlafuse 0.1 → 0.2",
        f"slower: 1 record {id}/slow: 100 → 150 µs, 1.50x slower, ratio 1.498 to 1.502",
        f"faster: 1 record {id}/fast: 100 → 50.0 µs, 2.00x faster",
        f"other launch gaps, unchanged kernel times: 1 record {id}/gaps: 100 → 200 µs",
        "kernel time: tie, ratio 0.999 to 1.001",
        f"{id}/wrong: ok → wrong out: error 3 over tolerance 1", f"{id}/right: failed → ok",
        f"{id}/timer: the timers differ: cupti before, cuda-events after",
        f": 1 record {id}/gone", f": 1 record {id}/new",
        f"{id}/remat 8 → 9 kernels", "split: act",
        "1 with other launch gaps (tolerance 5%); 3 times could not be compared",
        "1 slower (kernels take longer), 1 status", "1 missing (the record is gone)",
    ):
        assert part in text, part


def test_a_remark_on_all_compared_times_is_shown_once(tmp_path: Path) -> None:
    """Neither run has clock rates, and the second record was throttled in one round of the second run."""
    shared, own = "not both runs recorded clock rates", "throttled rounds: 0 → 1"

    def timed(name: str, us: float, throttled: tuple[str, ...] = ()) -> Record:
        conditions = [{"sm_mhz": None, "throttled": list(throttled)}]
        return with_fields(named(name), measurement=record(us, conditions=conditions).measurement)

    before = run(tmp_path / "a", timed("one", 100.0), timed("two", 100.0))
    after = run(tmp_path / "b", timed("one", 150.0), timed("two", 150.0, throttled=("power",)))
    file = tmp_path / "diff.html"
    for text in (flat(diff(before, after, "-o", file).stdout), file.read_text()):
        assert text.count(shared) == 1 and text.count(own) == 1
        assert text.index(shared) < text.index("/one")
    single = flat(diff(before, after, "-i", "one").stdout)
    assert single.index(shared) > single.index("/one")


def test_the_mean_ratio_is_geometric_and_needs_several_records(tmp_path: Path) -> None:
    names, after = ("a", "b", "c", "d", "e"), (200.0, 200.0, 200.0, 50.0, 100.0)
    before = run(tmp_path / "a", *(named(name, 100.0) for name in names))
    now = run(tmp_path / "b", *(named(name, us) for name, us in zip(names, after, strict=True)))
    assert "geometric mean of 5 records: 1.32" in flat(diff(before, now).stdout)  # the fifth root of 4
    few = run(tmp_path / "c", *(named(name, 200.0) for name in names[:4]))
    assert "geometric mean" not in flat(diff(before, few).stdout)


def test_slower_kernels_in_an_unresolved_call_give_no_factor(tmp_path: Path) -> None:
    a, b = (
        with_fields(named("noisy"), measurement=made.measurement)
        for made in (record(100, busy=60), record(115, noise=[0.7, 1.3, 1.0, 0.9, 1.1], busy=70))
    )
    text = flat(diff(run(tmp_path / "a", a), run(tmp_path / "b", b)).stdout)
    assert "/noisy: 100 → 115 µs, call time unresolved, ratio" in text
    assert "kernel time: slower, ratio" in text


def test_records_of_different_sizes_are_not_compared(tmp_path: Path) -> None:
    small = named("xla", 10.0)
    small.case = dataclasses.replace(small.case, sizes={axis: 7 for axis in small.case.sizes})
    a, b = run(tmp_path / "a", small), run(tmp_path / "b", named("xla"))
    result = diff(a, b)
    assert result.exit_code == 2 and "no record has a time or a graph in both runs" in result.stderr
    for folder in (a, b):
        folders.append(folder, named("triton"))
    answer = json.loads(diff(a, b, "--json").stdout)
    assert answer["records"][0]["times"] is None and "sizes differ" in answer["records"][0]["notes"][0]
    assert "sizes differ" in diff(a, b).stdout


def test_only_selected_records_are_compared(tmp_path: Path) -> None:
    a = run(tmp_path / "a", named("xla"), named("triton"))
    b = run(tmp_path / "b", named("xla"), named("triton", 200.0))
    assert diff(a, b).exit_code == 1
    assert diff(a, b, "-i", "xla").exit_code == 0
    assert "triton" not in diff(a, b, "-i", "xla").stdout


def test_variables_and_ceilings_are_part_of_the_environment(tmp_path: Path) -> None:
    def segment(flags: str, stream: float) -> dict[str, Any]:
        host = {"nvidia_driver": "580", "variables": {"XLA_FLAGS": flags}}
        ceilings = {"streams": {"1:1": stream}, "products": {"bfloat16": 8e14}}
        return {**SEGMENT, "environment": {"host": host, "workers": {}}, "ceilings": ceilings}

    a, b = (tmp_path / name for name in "ab")
    for path, flags, stream, rounds in ((a, "--xla_gpu_autotune_level=0", 4.0e12, 5), (b, "", 4.4e12, 7)):
        folders.create(path, {"segments": [segment(flags, stream)], "plan": {"timing": {"rounds": rounds}}})
        folders.append(path, named("xla"))
    answer = json.loads(diff(a, b, "--json").stdout)
    assert answer["environment"] == [
        {"name": "variable XLA_FLAGS", "before": "--xla_gpu_autotune_level=0", "after": ""},
        {"name": "timing rounds", "before": "5", "after": "7"},
        {"name": "ceiling: memory bandwidth, 1:1 reads to writes", "before": "4 TB/s", "after": "4.4 TB/s"},
    ]


HOSTILE = "<script>alert(1)</script>\"'&\n\x1b[31m" + "x" * 10_000


def test_the_page_escapes_all_text(tmp_path: Path) -> None:
    about = {"xlafuse": HOSTILE}
    kernels = tuple(dataclasses.replace(k, name=HOSTILE) for k in changed().kernels or ())
    graph = dataclasses.replace(changed(), kernels=kernels, name=HOSTILE, reasons=())
    a = run(tmp_path / "A", named("xla"), named(HOSTILE), named("gone"), graphs={"xla": XLA})
    b = run(
        tmp_path / "b", named("xla", 150.0, status="ok"), named(HOSTILE, status="failed", detail=HOSTILE),
        graphs={"xla": graph}, **about,
    )
    page = tmp_path / "page.html"
    result = diff(a, b, "-o", page)
    assert result.exit_code == 1, result.output
    text = page.read_text()
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text and "\x1b" not in text + result.stdout
    assert "150" in text and "1.500" in text and "split: act" in text and "http" not in text
    assert f"<h2>Only in {tmp_path / 'A'}: 1</h2>" in text
    assert len(text) < 60_000


def test_no_framework_is_imported() -> None:
    program = (
        "import sys; from xlafuse.compare.cli.main import cli; cli(sys.argv[1:], standalone_mode=False);"
        "assert not {'jax', 'torch', 'numpy', 'vl_convert', 'jinja2'} & set(sys.modules)"
    )
    words = ["diff", str(DATA / "jax-0.10"), str(DATA / "jax-0.10")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "0 records fused differently, 3 fused the same" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/a", "{tmp}/b", "--tolerance", "much"], "expected a share such as 5%"),
        (["{tmp}/a", "{tmp}/b", "--tolerance", "100%"], "below 100%"),
        (["{tmp}/a", "{tmp}/b", "--fail-on", "slow"], "did you mean slower"),
        (["{tmp}/a", "{tmp}/b", "-i", "nobody"], "no implementation 'nobody'"),
        (["{tmp}/a", "{tmp}/b", "-o", "{tmp}/a/run.json/x.html"], "cannot be written"),
        (["{tmp}/a", "{tmp}/b", "-o", "{tmp}/x.svg"], "expected .html, .md, .json"),
        (["{tmp}/a", "{tmp}/empty"], "records.jsonl: missing"),
        (["{tmp}/empty", "{tmp}/empty"], "neither run has a record"),
        (["{tmp}/x.json", "{tmp}/x.json", "--all", "--tolerance", "5%"], "and --all go only with two runs or profiles"),
        (["{tmp}/a", "{tmp}/broken"], "broken/run.json"),
    ],
)
def test_refusals(tmp_path: Path, words: list[str], message: str) -> None:
    for name in "ab":
        run(tmp_path / name, named("xla"))
    run(tmp_path / "empty")
    store.save(XLA, tmp_path / "x.json")
    folders.create(tmp_path / "broken", {})
    (tmp_path / "broken" / "run.json").write_text("[")
    result = diff(*(word.format(tmp=tmp_path) for word in words))
    assert message in result.stderr, result.output
    assert result.exit_code == (1 if "{tmp}/empty" in words and "{tmp}/a" in words else 2)  # 1: a missing record
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "segments", [None, 3, [None], [{"id": "s1", "environment": 7, "ceilings": [], "clocks": "x"}], {"a": 1}]
)
def test_a_malformed_run_json_does_not_crash(tmp_path: Path, segments: Any) -> None:
    a, b = run(tmp_path / "a", named("xla")), run(tmp_path / "b", named("xla"))
    (b / "run.json").write_text(json.dumps({"segments": segments}))
    result = diff(a, b)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 2), result.output


@pytest.mark.parametrize(
    "strange",
    [{"processes": [0]}, {"conditions": [{"sm_mhz": "fast", "throttled": []}] * 5}, {"conditions": 3}, {"timer": []}],
    ids=str,
)
def test_a_malformed_measurement_loses_only_its_own_times(tmp_path: Path, strange: dict[str, Any]) -> None:
    a = run(tmp_path / "a", named("it"), named("other"))
    b = run(tmp_path / "b", named("other", 200.0))
    it = named("it")
    append_malformed(b, it, measurement={**it.to_json()["measurement"], **strange})
    result = diff(a, b, "--json")
    assert result.exit_code == 1, result.output
    answer = {each["id"].rpartition("/")[2]: each for each in json.loads(result.stdout)["records"]}
    assert answer["other"]["times"]["word"] == "slower"
    it = answer.get("it")  # None: the rows left the record out
    assert it is None or it["only_in"] or it["times"] is None or it["times"]["word"] in (None, "tie")


def test_tolerance_is_a_share() -> None:
    assert [diff_command.parse_tolerance(text) for text in ("5%", "0.05", " 2.5 %")] == [0.05, 0.05, 0.025]
    for text in ("", "-1%", "1e3", "5%%", "nan", "5% of it", "0.05%%"):
        with pytest.raises(UsageError, match="expected a share"):
            diff_command.parse_tolerance(text)


def test_the_document_names_every_regression() -> None:
    document = (DATA.parents[2] / "docs" / "diff.md").read_text()
    named = re.findall(r"^\| `([\w-]+)` \|", document.partition("## As JSON")[0], re.MULTILINE)
    assert named == list(REGRESSIONS)
    assert f"`--tolerance`, {diff_command.TOLERANCE:.0%} unless told otherwise" in document


def test_the_document_names_every_field_of_the_json(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", named("xla")), run(tmp_path / "b", named("xla"), xlafuse="0.2")
    answer = json.loads(diff(a, b, "--json").stdout)
    (record,) = answer["records"]
    times = record["times"]
    section = (DATA.parents[2] / "docs" / "diff.md").read_text().partition("## As JSON\n")[2].partition("\n## ")[0]
    for fields in (answer, answer["environment"][0], record, times, times["ratios"]["cold"]):
        for field in fields:
            assert f"`{field}`" in section, field
