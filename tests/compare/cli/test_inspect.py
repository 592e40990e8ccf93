"""`xlafuse inspect`: selection of graphs, views, and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from examples import EAGER, INDUCTOR, XLA
from made_records import append_malformed, made_record

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli.main import cli
from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse import missed_fusions
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.record import run_folder
from xlafuse.compare.report.graph_views import MOST_LISTED, MOST_TREES, in_stage
from xlafuse.compare.sources.target_ceilings import target_ceilings
from xlafuse.compare.spec.blocks import BLOCKS

CASE = next(c for c in BLOCKS["swiglu_mlp"].cases("quick") if c.direction == "train")
OTHER = BLOCKS["gelu"].cases("quick")[0]
REPORT = Path(__file__).parents[2] / "data" / "runs" / "h200-small"


def inspect(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["inspect", *map(str, words)])


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").replace("├──", " ").replace("└──", " ").split())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    run_folder.create(folder, {"segments": []})
    for graph, name in ((XLA, "xla"), (INDUCTOR, "inductor"), (XLA, "xla-unfused")):
        store.save(graph, folder / "graphs" / f"{name}.json.gz")
        unjoined = ["[memset]", "surprise"] if name == "inductor" else []
        forward = {"launches": 1, "bytes_declared": 1, "provenance": {}, "unjoined": unjoined}
        kernels: Any = {"forward": forward}
        graph_file = f"graphs/{name}.json.gz"
        flops = BLOCKS["swiglu_mlp"].phase_flops(CASE)
        run_folder.append(
            folder, made_record(CASE, name, name, "ok", target="h200", graph=graph_file, kernels=kernels, flops=flops)
        )
    run_folder.append(folder, made_record(OTHER, "cuda", "cuda", "skipped", detail="no [red]kernel[/red] \x1b[31m"))
    run_folder.append(folder, made_record(OTHER, "triton", "triton", "ok", dumps="dumps/x.zip"))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    store.save(XLA, tmp_path / "graph.json")
    return tmp_path / "graph.json"


def test_a_run_shows_every_record_with_its_graph(run: Path) -> None:
    result = inspect(run)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout
    text = flat(result.stdout)
    for part in (
        "swiglu_mlp/llama-8b/bf16/train/xla xla for h200, jax 0.11.2 ok, for h200", "1. input_convert_reduce_fusion",
        "extern_kernels.addmm", "forward: ran on the device without a kernel in this graph: [memset], surprise",
        "skipped: no [red]kernel[/red] [31m no graph recorded", "no graph recorded; its compiler's files:",
        "what stands out", "the kernels' times add up to 1364 µs", "above their roofline times",
        "roofline time of the whole function",
    ):
        assert part in text, part


def test_filters(run: Path) -> None:
    text = inspect(run, "--block", "swiglu_mlp", "-i", "inductor").stdout
    assert "extern_kernels.addmm" in text and "input_convert" not in text
    for view in (["--kernel", "1"], ["--kernel", "norm"], ["--why"]):
        shown = inspect(run, "--block", "swiglu_mlp", "-i", "inductor", *view)
        assert f"{CASE.id}/inductor" in flat(shown.stdout), view
    refused = inspect(run, "-i", "egaer")
    assert refused.exit_code == 2 and "no implementation 'egaer'" in refused.stderr
    left = inspect(run, "--block", "swiglu_mlp", "--direction", "fwd")  # which other records may have
    assert left.exit_code == 2 and "no direction 'fwd' among these records; directions: train" in left.stderr


def test_a_case_has_a_name_and_a_full_id(run: Path) -> None:
    by_name, by_id = (inspect(run, "--case", name) for name in (CASE.name, CASE.id))
    assert by_name.exit_code == by_id.exit_code == 0 and CASE.name == OTHER.name
    assert CASE.id in by_name.stdout and OTHER.id in by_name.stdout
    assert CASE.id in by_id.stdout and OTHER.id not in by_id.stdout
    refused = inspect(run, "--case", CASE.id + "x")
    assert refused.exit_code == 2 and CASE.id in refused.stderr


def test_a_measured_call_is_shown_next_to_the_sum_of_its_kernels(run: Path) -> None:
    assert "a call takes" not in inspect(run, "-i", "xla").stdout
    unseen = {"busy_time": None, "launches": None}
    parts = {
        "forward": {"device_time": [[700e-6, 500e-6, 501e-6, 502e-6]], **unseen},
        "backward": {"device_time": [[2e-3, 800e-6, 799e-6, 801e-6]], **unseen},
    }
    measurement: Any = {"timer": "cuda-events", "phases": parts}
    run_folder.append(run, made_record(CASE, "xla", "xla", "ok", graph="graphs/xla.json.gz", measurement=measurement))
    text = flat(inspect(run, "-i", "xla").stdout)
    assert "the kernels' times add up to 1364 µs" in text
    assert "a call takes 1301 µs on the device, from the first kernel to the last of each phase" in text


def test_many_records_are_listed_one_line_each(run: Path) -> None:
    for number in range(MOST_TREES):
        run_folder.append(run, made_record(OTHER, f"more{number}", "xla", "compiled"))
    text = flat(inspect(run).stdout)
    assert "xla 8 1.36 GB 51% 1364" in text
    assert "--direction and -i select records and show their kernels" in text
    assert "extern_kernels" not in text
    for words in (["--all"], ["--case", "llama-8b"]):
        assert "extern_kernels" in inspect(run, *words).stdout


def test_json_of_a_run_is_a_list_of_records(run: Path) -> None:
    listed = json.loads(inspect(run, "--json").stdout)["records"]
    assert [entry["implementation"] for entry in listed] == ["xla", "inductor", "xla-unfused", "cuda", "triton"]
    assert store.from_json(listed[0]["graph"]) == XLA
    assert listed[3]["graph"] is None


def test_a_file_has_no_roofline_time_of_the_function_and_its_json_is_its_graph(file: Path) -> None:
    text = flat(inspect(file).stdout)
    assert "above their roofline times" in text and "whole function" not in text
    assert store.from_json(json.loads(inspect(file, "--json").stdout)) == XLA


def test_unread_parts_are_in_the_json_and_in_the_exit_code_of_strict(tmp_path: Path) -> None:
    whole, torn, nothing = (tmp_path / name for name in ("whole", "torn", "nothing"))
    head, body = "HloModule x, is_scheduled=true\nENTRY e {\n", " ROOT a = f32[8] iota()\n"
    whole.write_text(f"{head}{body}}}")
    torn.write_text(f"{head} b = ((\n{body}}}")
    nothing.write_text(f"{head} ROOT b = ((\n}}")
    assert inspect(whole, "--strict").exit_code == 0
    assert inspect(torn).exit_code == 0
    shown = inspect(torn, "--json", "--strict")
    assert shown.exit_code == 1 and len(json.loads(shown.stdout)["unparsed"]) == 1
    refused = inspect(nothing)
    assert refused.exit_code == 2 and refused.stdout == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("graph", 3), ("dumps", []), ("detail", {}), ("kernels", {"forward": [1]}),
     ("kernels", {"forward": {"unjoined": 1}}), ("bytes_compulsory", {"forward": "many"}),
     ("flops", ["many"]), ("measurement", {"timer": None, "phases": {"forward": {"device_time": "soon"}}})],
)
def test_a_malformed_record_is_left_out(run: Path, name: str, value: object) -> None:
    append_malformed(run, made_record(OTHER, "odd"), **{name: value})
    result = inspect(run)
    assert result.exit_code == 0, result.output
    assert "/odd: " in result.stderr and f"$.{name}" in result.stderr
    assert "extern_kernels.addmm" in result.stdout


@pytest.mark.parametrize(
    ("path", "problem"), [("../graph.json", "is not in the run's folder"), ("graphs/none.json", "No such file")]
)
def test_an_unreadable_graph_costs_its_own_record(run: Path, file: Path, path: str, problem: str) -> None:
    run_folder.append(run, made_record(OTHER, "xla", "xla", "ok", graph=path))
    result = inspect(run)
    assert result.exit_code == 0
    assert problem in result.stderr and f"{OTHER.id}/xla" in result.stderr
    assert "its graph cannot be read" in result.stdout and "extern_kernels.addmm" in result.stdout
    assert inspect(run, "--block", "gelu", "-i", "xla", "--why").exit_code == 2


@pytest.mark.parametrize(
    "wanted", ["5", "loop_convert_multiply_fusion.1", "loop_convert_multiply_fusion_1", "*fusion.1"]
)
def test_one_kernel_by_number_name_and_pattern(file: Path, wanted: str) -> None:
    text = inspect(file, "--kernel", wanted).stdout
    assert text.startswith("5. loop_convert_multiply_fusion.1\n")
    assert text.count("profilers call it") == 1
    (kernel,) = json.loads(inspect(file, "--kernel", wanted, "--json").stdout)["kernels"]
    assert kernel["index"] == 4


def test_a_stage_with_the_kernels_that_hold_it(file: Path) -> None:
    text = flat(inspect(file, "--kernel", "norm").stdout)
    assert "norm: in 2 kernels of 8, 101 MB declared, 7% of all" in text
    assert "2. loop_convert_multiply_fusion" in text and "custom-call" not in text


@pytest.mark.parametrize(
    ("stage", "wanted", "held"),
    [("norm", "norm", True), ("norm/scale", "norm", True), ("layer/norm/scale", "norm", True), ("norm2", "norm", False),
     ("layer/norm", "layer/norm", True), ("norm", "norm/scale", False)],
)
def test_stages_match_whole_scopes(stage: str, wanted: str, held: bool) -> None:
    assert in_stage(stage, wanted) is held


def test_missed_fusions_are_ranked_and_priced(file: Path) -> None:
    ceilings = target_ceilings("h200")
    bandwidth, launch = ceilings.bandwidth(1, 1), ceilings.launch_us or 0.0
    sizes = 117_440_512, 67_125_248
    prices = [size / bandwidth * 1e6 + launch for size in sizes]
    text = flat(inspect(file, "--why").stdout)
    first, second = (text.index(f"{i}. {size} MB, {price:.1f} µs") for i, size, price in zip(
        (1, 2), (117, 67.1), prices, strict=True
    ))
    assert first < text.index("loop_add_fusion → gemm_fusion_dot_general.11") < second
    assert f"{bandwidth / 1e12:.2f} TB/s and {launch:.3g} µs a launch of h200" in text
    assert f"all of them together: 185 MB, {sum(prices):.1f} µs; 2 launches fewer" in text
    assert "the compiler's estimate: 41 µs fused, 27.5 µs unfused" in text
    (answer,) = json.loads(inspect(file, "--why", "--json").stdout)["graphs"]
    assert [each["saves_us"] for each in answer["missed"]] == pytest.approx(prices)
    assert [each["saves_bytes"] for each in answer["missed"]] == list(sizes)
    assert answer["together"]["saves_launches"] == 2 and answer["together"]["saves_us"] == pytest.approx(sum(prices))


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (replace(XLA, reasons=()), "the compiler's log was not requested or not kept"),
        (replace(XLA, reasons=(), kernels=(XLA.kernels or ())[:1]), "one kernel: nothing is left to fuse"),
        (replace(XLA, reasons=(), compiler="triton"), "no compiler chose what to fuse"),
    ],
)
def test_a_graph_without_reasons_says_why(tmp_path: Path, graph: FusionGraph, words: str) -> None:
    store.save(graph, tmp_path / "graph.json")
    assert words in flat(inspect(tmp_path / "graph.json", "--why").stdout)


def test_prices_carry_their_measured_error(file: Path) -> None:
    assert flat(inspect(file, "--why").stdout).count(missed_fusions.PRICE_ERRORS[False]) == 1


def test_implementations_of_a_run_side_by_side(run: Path) -> None:
    result = inspect(run, "-i", "xla,inductor", "--view", "stages")
    assert result.exit_code == 0, result.output
    text = flat(result.stdout)
    assert "norm/normalize 2 1: joined" in text
    assert "backward: act 7 6: recomputed" in text
    (answer,) = json.loads(inspect(run, "-i", "xla,inductor", "--view", "stages", "--json").stdout)["cases"]
    assert answer["graphs"] == ["xla", "inductor"] and answer["case"] == CASE.id
    assert "what fusion saves" in inspect(run, "-i", "xla,xla-unfused", "--view", "stages").stdout
    three = flat(inspect(run, "--view", "stages").stdout)
    assert "stage xla inductor xla-unfused" in three and "norm/normalize 2 1: joined 2 " in three


def test_passes_of_a_runs_records() -> None:
    chosen = ("--block", "rmsnorm", "--case", "llama-8b", "--direction", "train", "--view", "passes")
    result = inspect(REPORT, *chosen, "-i", "xla,inductor")
    assert result.exit_code == 0, result.output
    text = flat(result.stdout)
    step = "rmsnorm/llama-8b/bf16/train/xla"
    assert text.index(f"{step} forward") < text.index(f"{step} backward") < text.index("no XLA dump")
    assert "priority-fusion" in text and text.endswith("no XLA dump: rmsnorm/llama-8b/bf16/train/inductor")
    answers = json.loads(inspect(REPORT, *chosen, "-i", "xla", "--json").stdout)["modules"]
    assert [answer["module"] for answer in answers] == [f"{step} forward", f"{step} backward"]
    assert all(answer["passes"] for answer in answers)
    refused = inspect(REPORT, *chosen, "-i", "inductor")
    assert refused.exit_code == 2 and "no XLA dump of rmsnorm/llama-8b/bf16/train/inductor" in refused.stderr


def test_two_files_side_by_side(file: Path, tmp_path: Path) -> None:
    store.save(INDUCTOR, tmp_path / "b.json.gz")
    assert "norm/normalize 2 1: joined" in flat(inspect(file, tmp_path / "b.json.gz").stdout)


def test_two_runs_side_by_side(run: Path, tmp_path: Path) -> None:
    """Records that both runs have are paired, and the targets head the columns."""
    other = tmp_path / "tpu"
    run_folder.create(other, {"segments": []})
    graph = replace(INDUCTOR, compiler="xla", target="tpu-v5e")
    store.save(graph, other / "graphs" / "xla.json.gz")
    run_folder.append(other, made_record(CASE, "xla", "xla", "compiled", target="tpu-v5e", graph="graphs/xla.json.gz"))
    (answer,) = json.loads(inspect(run, other, "--json").stdout)["cases"]
    assert answer["case"] == f"{CASE.id}/xla"
    assert answer["graphs"] == [f"xla {XLA.target or run.name}", "xla tpu-v5e"]
    text = flat(inspect(run, other, "-i", "xla").stdout)
    assert f"stage xla {XLA.target or run.name} xla tpu-v5e" in text
    refused = inspect(run, other, "-i", "inductor")
    assert refused.exit_code == 2 and "no implementation 'inductor'" in refused.stderr


def test_a_tpus_bytes_are_priced_by_a_tpu_only(tmp_path: Path) -> None:
    store.save(replace(XLA, target="tpu-v5e"), tmp_path / "tpu.json")
    assert "at 0.82 TB/s of the data sheet of tpu-v5e" in flat(inspect(tmp_path / "tpu.json", "--why").stdout)
    refused = inspect(tmp_path / "tpu.json", "--price-as", "h200")
    assert refused.exit_code == 2 and "compiled for the TPU; h200 cannot price its bytes" in flat(refused.stderr)
    store.save(XLA, tmp_path / "gpu.json")
    assert inspect(tmp_path / "gpu.json", "--price-as", "tpu-v5e").exit_code == 2


def test_graphs_of_one_saved_explanation(tmp_path: Path) -> None:
    both = {"a": store.to_json(XLA), "b": store.to_json(EAGER)}
    (tmp_path / "both.json").write_text(json.dumps({"schema": "xlafuse.explained/1", "graphs": both, "notes": []}))
    text = inspect(tmp_path / "both.json").stdout
    assert "input_convert_reduce_fusion" in text and "aten.tanh" in text


def test_lists_name_the_number_of_entries_left_out(tmp_path: Path) -> None:
    """Graphs of a folder are listed by name, not by size."""
    for number in range(MOST_LISTED + 3):
        store.save(XLA, tmp_path / f"{number:03}.json")
    listed = inspect(tmp_path).stdout.splitlines()
    assert listed[0].split() == ["number", "module", "size"] and len(listed) == MOST_LISTED + 3
    assert "… and 3 more; --all lists them" in listed[-2]
    assert inspect(tmp_path, "--module", "x").stderr.rstrip().endswith(", 008, 009 and 43 more")
    assert inspect(tmp_path, "--module", "*").stderr.rstrip().endswith("7, 8, 9, 10 and 43 more")
    assert "(1 000, 2 001, 3 002, 4 003, 5 004 and 48 more)" in inspect(tmp_path, tmp_path).stderr
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for number in range(3):
        (dumps / f"module_000{number}.jit_f.sm_9.0_gpu_after_optimizations.txt").write_text("HloModule jit_f\n")
    assert "XLA's id" in inspect(dumps).stdout.splitlines()[0]
    many = replace(XLA, kernels=tuple(replace((XLA.kernels or ())[0], name=f"k{i}") for i in range(20)))
    store.save(many, tmp_path / "many.json")
    assert inspect(tmp_path / "many.json", "--kernel", "x").stderr.rstrip().endswith(", k10, k11 and 8 more")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/none"], "no such file or folder"),
        (["{file}", "--why", "--view", "kernels"], "leave it or --view kernels out"),
        (["{file}", "--view", "why", "--kernel", "1"], "leave --view why out"),
        (["{file}", "--block", "gelu"], "no run folder"),
        (["{file}", "--view", "passes"], "no XLA dump of "),
        (["{file}", "--view", "times"], "no run, so it has no records to list"),
        (["{file}", "--view", "steps"], "no profile, so it has no steps"),
        (["{file}", "--view", "stages"], "no case has several graphs"),
        (["{file}", "--kernel", "lop_add_fusion"], "did you mean loop_add_fusion"),
        (["{file}", "--kernel", "actt"], "did you mean act"),
        (["{file}", "--why", "--price-as", "h20"], "no target 'h20'; did you mean h200"),
        (["{run}", "-i", "xla,cuda", "--view", "stages"], "no case has several graphs"),
        (["{run}", "{file}"], "and one is needed: --module NUMBER or NAME; to compare two runs: `xlafuse diff`"),
        (["{run}", "--block", "gelu", "--why"], "none of 2 records has a graph that can be read"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    run: Path, file: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    result = inspect(*(word.format(tmp=tmp_path, run=run, file=file) for word in words))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_rank_of_a_torch_trace_is_chosen(tmp_path: Path, file: Path) -> None:
    (log,) = (Path(__file__).parents[2] / "data/inductor/torch-2.13.0/trace").glob("*.log")
    folder = tmp_path / "trace"
    folder.mkdir()
    for rank, name in enumerate(("addmm", "baddbmm")):
        text = log.read_text().replace("extern_kernels.addmm", f"extern_kernels.{name}")
        (folder / f"dedicated_log_torch_trace_rank_{rank}_x.log").write_text(text)
    default, chosen = inspect(folder), inspect(folder, "--rank", 1)
    assert "rank 0 of 2 ranks" in flat(default.stdout) and "extern_kernels.addmm" in default.stdout
    assert "rank 1 of 2 ranks" in flat(chosen.stdout) and "extern_kernels.baddbmm" in chosen.stdout
    for path, rank, message in ((folder, 5, "it has ranks 0, 1"), (file, 0, "--rank chooses in a TORCH_TRACE folder")):
        refused = inspect(path, "--rank", rank)
        assert refused.exit_code == 2 and message in flat(refused.output)


_RUN, _PROFILE = "tests/data/runs/h200-rmsnorm", "tests/data/profiles/torch"
_HLO, _DUMP = "tests/data/xla/softmax.hlo.txt", "tests/data/xla_reasons/jax-0.11.2/mlp"


@pytest.mark.parametrize("words", [
    f"inspect {_PROFILE} -i xla", f"inspect {_PROFILE} --case llama-8b", f"inspect {_HLO} -i xla",
    f"inspect {_HLO} --dump {_DUMP}", f"inspect {_HLO} --rank 0", f"inspect {_RUN} --rank 0",
    f"inspect {_RUN} --dump {_DUMP}", f"inspect {_HLO} --price-as h100 --json",
    f"inspect {_RUN} -i xla --price-as h100 --kernel normalize", f"inspect {_HLO} --price-as h100 --view passes",
    f"inspect {_HLO} --price-as h100 --kernel 1 --json", f"inspect {_RUN} --price-as h100 --json",
    f"inspect {_RUN} --price-as h100 --view times", f"inspect {_HLO} {_HLO} --price-as h100 --json",
    f"inspect {_RUN} -i xla,triton --view stages --price-as h100 --json",
    "inspect tests/data/runs/tour --price-as h100", "inspect tests/data/hlo/jax-0.11.2 --price-as h100",
    f"inspect {_RUN} --kernel 1 --view times", f"report {_RUN} --kernel 1 --view times -o x.md",
    f"report {_RUN} --price-as h100 -o x.md", f"report {_RUN} --price-as h100 -o x.svg",
    f"report {_RUN} --kernel 1 -o x.svg", f"report {_RUN} --price-as h100", f"report {_HLO} --kernel 1",
    f"diff {_HLO} {_HLO} --all", f"diff {_HLO} {_HLO} --tolerance 5%", f"diff {_PROFILE} {_PROFILE} --fail-on slower",
])
def test_an_option_without_an_effect_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, [word if "/" not in word else str(PROJECT / word) for word in words.split()])
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.output
    assert any(word in done.stderr for word in words.split() if word.startswith("-") and word != "--json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [
    f"inspect {_HLO} --price-as h100 --why --json", f"inspect {_HLO} --price-as h100 --kernel 1",
    f"inspect {_PROFILE} --price-as h100 --json", f"inspect {_HLO} --all --why",
])
def test_an_option_with_an_effect_stays(words: str) -> None:
    done = CliRunner().invoke(cli, [word if "/" not in word else str(PROJECT / word) for word in words.split()])
    assert done.exit_code == 0, done.output
