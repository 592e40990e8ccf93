"""Selection: known names give a plan, unknown ones a one-line error with the possible names."""

import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from xlafuse.compare import targets
from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.plan import selection
from xlafuse.compare.plan.plan import Plan
from xlafuse.compare.plan.selection import resolve
from xlafuse.compare.plan.timing_modes import OTHER_MODES, Timing
from xlafuse.compare.record.run_folder import RunFolderError
from xlafuse.compare.run.output_folder import output_folder, resumed_folder
from xlafuse.compare.spec.blocks import BLOCKS

NOW = datetime(2030, 1, 2, 3, 4, 5)


def ids(plan: Plan) -> list[str]:
    return [case.id for case, _ in plan.work]


def test_blocks_over_several_gpus_are_in_their_own_suite_alone() -> None:
    assert {case.block for case, _ in resolve([], suite="parallel").work} == {"mlp_parallel", "moe_parallel"}
    for suite in ("tour", "quick", "full", "check"):
        assert not any(case.ranks > 1 for case, _ in resolve([], suite=suite).work)
    assert ids(resolve(["moe_parallel"], suite="check"))


def test_no_filter_selects_the_whole_suite() -> None:
    plan = resolve([], suite="quick")
    one_gpu = [block for block in BLOCKS.values() if not block.spans_gpus]
    assert ids(plan) == [case.id for block in one_gpu for case in block.cases("quick")]
    for case, found in plan.work:
        block = BLOCKS[case.block]
        assert found == tuple(i for i in block.implementations if block.takes(case, i, "quick"))


def test_expensive_implementations_run_only_main_cases_by_default() -> None:
    def taking_part(suite: str, name: str, block: str = "swiglu_mlp", direction: str = "fwd") -> set[str]:
        plan = resolve([block], suite=suite, directions=[direction])
        return {case.name for case, found in plan.work if name in {i.name for i in found}}

    for suite in ("quick", "full"):
        assert taking_part(suite, "inductor-max") == {"llama-8b"}
        assert taking_part(suite, "inductor-max", direction="train") == set(), "a step of products tunes too long"
        for baseline in ("eager", "xla-unfused"):
            assert taking_part(suite, baseline) == {"llama-8b"}, "baselines run bfloat16 cases of the quick suite"
    assert taking_part("full", "inductor-max", "gelu", "train") == taking_part("full", "inductor-max", "swiglu")
    for name, direction in (("gelu", "train"), ("swiglu", "fwd")):
        assert taking_part("quick", "inductor-max", name, direction) == set()
    assert {"llama-8b", "gpt2", "one-token"} < taking_part("full", "triton")
    assert taking_part("check", "eager") == taking_part("check", "inductor-max") == taking_part("check", "triton")


def test_a_shape_may_name_its_implementations() -> None:
    def rows(suite: str, **filters: list[str]) -> dict[str, set[str]]:
        return {case.id: {i.name for i in found} for case, found in resolve(["attention"], suite=suite, **filters).work}

    public = {id: found for id, found in rows("full").items() if id.startswith("attention/public-")}
    assert {id.rpartition("/")[2] for id in public} == {"fwd", "train"}
    scored = {"xla", "xla-remat", "eager", "inductor", "triton-cudagraphs"}
    assert all({"triton", "fa4", "sdpa-cudnn"} <= found and not found & scored for found in public.values())
    assert not any("public-" in case for suite in ("tour", "quick", "check") for case in rows(suite))
    named = rows("full", cases=["public-llama-3.1-2k"], implementations=["xla", "triton"])
    assert set(map(frozenset, named.values())) == {frozenset({"xla", "triton"})}


def test_an_implementation_may_belong_to_named_shapes_alone() -> None:
    def having(suite: str, **filters: list[str]) -> set[str]:
        work = resolve(["attention"], suite=suite, **filters).work
        return {case.id for case, found in work if "triton-deterministic" in {i.name for i in found}}

    cases = {f"attention/public-{name}/bf16/train" for name in ("llama-3.1-8k", "qwen-3.5-2k")}
    assert having("full") == cases and not having("quick") and not having("check")
    assert len(having("quick", implementations=["triton-deterministic"])) > 2


def test_without_a_gpu_replays_of_graphs_run_only_by_name() -> None:
    def names(plan: Plan) -> set[str]:
        return {i.name for _, found in plan.work for i in found}

    plan = resolve(["rmsnorm"], suite="quick")
    assert names(plan) - names(selection.without_replays(plan, [])) == {"triton-cudagraphs", "inductor-cudagraphs"}
    named = resolve(["rmsnorm"], suite="quick", implementations=["triton-cudagraphs", "xla"])
    assert selection.without_replays(named, ["triton-cudagraphs", "xla"]) == named


def test_a_named_implementation_runs_every_case() -> None:
    plan = resolve(["swiglu_mlp"], suite="full", implementations=["inductor-max", "eager"], cases=["one-token"])
    assert [len(found) for _, found in plan.work] == [2, 2]


def test_the_tour_has_the_main_case_of_six_blocks_by_four_implementations() -> None:
    plan = resolve([], suite="tour")
    assert {case.block for case, _ in plan.work} == {*selection.TOUR}
    for case, found in plan.work:
        assert case.name == BLOCKS[case.block].shapes[0].name
        assert [i.name for i in found] in (["xla", "inductor", "triton"], ["xla", "inductor", "triton", "cuda"])
    assert {case.direction for case, _ in plan.work if case.block == "cross_entropy"} == {"fwd", "train", "joint"}
    (rope,) = {case.name for case, _ in resolve(["rope"], suite="tour").work}
    assert rope == BLOCKS["rope"].shapes[0].name


def test_a_size_of_the_users_own_replaces_the_suites_and_can_be_resumed() -> None:
    sizes = [{"sequence": 512}, {"heads": 4}]
    plan = resolve(["attention"], suite="quick", sizes=sizes, dtypes=["fp16"], directions=["fwd"])
    assert [(case.sizes["sequence"], case.sizes["kv_heads"], case.dtype) for case, _ in plan.work] == [
        (512, 32, "float16"), (4096, 4, "float16")
    ]
    assert {"xla", "triton", "flex"} <= {i.name for i in plan.work[0][1]}
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(UsageError, match="needs a block"):
        resolve([], suite="tour", sizes=sizes)


def test_filters_combine() -> None:
    plan = resolve(
        ["softmax", "gelu"], suite="full", implementations=["triton", "xla"], cases=["gpt2", "4096-columns"],
        directions=["train"], dtypes=["fp32"],
    )
    assert ids(plan) == ["gelu/gpt2/fp32/train", "softmax/4096-columns/fp32/train"]
    assert plan.record_ids == {f"{case}/{name}" for case in ids(plan) for name in ("xla", "triton")}
    assert [[i.name for i in found] for _, found in plan.work] == [["xla", "triton"], ["xla", "triton"]]


def test_a_case_may_be_named_by_its_id_and_a_dtype_by_its_long_name() -> None:
    assert ids(resolve([], suite="quick", cases=["gelu/gpt2/fp32/fwd"])) == ["gelu/gpt2/fp32/fwd"]
    assert resolve([], suite="full", dtypes=["float16"]) == resolve([], suite="full", dtypes=["fp16"])


def test_blocks_without_the_implementation_are_left_out() -> None:
    plan = resolve([], suite="quick", implementations=["flex"])
    having = {name for name, block in BLOCKS.items() if "flex" in (i.name for i in block.implementations)}
    assert {case.block for case, _ in plan.work} == having and "attention" in having and "gelu" not in having


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        (["sofmax"], {}, r"no block 'sofmax'; did you mean softmax\? blocks: vector_add, gelu"),
        (["zzz"], {}, "no block 'zzz'; blocks: vector_add"),
        ([], {"implementations": ["trtion"]}, "no implementation 'trtion'; did you mean triton"),
        ([], {"cases": ["lama-8b"]}, "no case 'lama-8b'; did you mean llama-8b"),
        ([], {"cases": ["gelu/gtp2/fp32/fwd"]}, "did you mean gelu/gpt2/fp32/fwd"),
        ([], {"cases": ["one-token"]}, "case 'one-token' is not in suite quick, but in suite full: add --suite full"),
        ([], {"dtypes": ["fp8"]}, "no dtype 'fp8'.* dtypes: bfloat16, float16, float32"),
        ([], {"directions": ["bwd"]}, "no direction 'bwd'; did you mean fwd"),
        ([], {"suite": "qick"}, "no suite 'qick'; did you mean quick"),
        (
            ["softmax"], {"implementations": ["fa4"]},
            "'fa4' belongs to attention, attention_packed, decode_attention, not to softmax",
        ),
        (["layernorm"], {"dtypes": ["fp16"]}, "no case of layernorm with dtype 'float16'; --suite check has it"),
        (["vector_add"], {"directions": ["train"]}, "no case of vector_add with direction 'train'; no suite has it"),
        (["gelu", "softmax"], {"cases": ["gpt2-scores"]}, "nothing of block 'gelu' is left .* gelu/llama-8b/bf16/fwd"),
        ([], {"cases": ["gpt2"], "dtypes": ["bf16"]}, "nothing of case 'gpt2' is left"),
        (["evil\x1b[31m\nname"], {}, r"no block 'evil\\x1b\[31m\\nname'"),
    ],
)
def test_refusals(blocks: list[str], options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        resolve(blocks, **({"suite": "quick"} | options))
    assert "\n" not in str(refusal.value)


def test_a_plan_survives_its_json() -> None:
    plan = resolve(["attention"], suite="full", implementations=["xla", "flex"])
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(UsageError, match="cannot be repeated here"):
        Plan.from_json({"suite": "quick", "work": [{"case": plan.work[0][0].to_json(), "implementations": ["gone"]}]})


def test_a_plan_of_other_sizes_is_refused() -> None:
    """Attention cases of an older version's run lack the size `kv_heads`."""
    case = resolve(["attention"], suite="quick").work[0][0]
    older = case.to_json() | {"sizes": {name: size for name, size in case.sizes.items() if name != "kv_heads"}}
    plan = {"suite": "quick", "work": [{"case": older, "implementations": ["xla"]}]}
    with pytest.raises(UsageError, match=rf"cannot be repeated here: its case {case.id}, .*, has sizes .*kv_heads"):
        Plan.from_json(plan)
    plan["work"][0]["case"] = case.to_json() | {"name": "no-more"}  # type: ignore[index]
    with pytest.raises(UsageError, match="attention/no-more/.* is unknown to this installation; select by name"):
        Plan.from_json(plan)


def test_a_resumed_run_keeps_its_own_selection_unless_one_is_named() -> None:
    own = resolve(["gelu"], suite="full", directions=["fwd"])
    run = {"suite": "full", "plan": own.to_json(), "command": "xlafuse run gelu --suite full"}
    assert selection.resolve_again(run, [], None, directions=[]) == own
    assert selection.resolve_again(run, ["softmax"], None) == resolve(["softmax"], suite="full")
    del run["plan"]
    with pytest.raises(UsageError, match="name it again, as in 'xlafuse run gelu --suite full'"):
        selection.resolve_again(run, [], None)


def test_a_suite_has_default_modes_and_restarts() -> None:
    quick, full = resolve(["gelu"], suite="quick"), resolve(["gelu"], suite="full")
    assert (quick.timing.modes, quick.timing.restarts, quick.timing.rounds) == ((), 0, 5)
    assert full.timing.modes == OTHER_MODES and full.timing.restarts == 2
    told = selection.resolve_timing(full, ["graph", "cold"], 0, timed=True)
    assert (told.timing, told.work) == (Timing(("graph",), 0), full.work)
    assert selection.resolve_timing(full, ["cold"], None, timed=True).timing == Timing((), 2)
    assert selection.resolve_timing(full, [], None, timed=False) is full
    with pytest.raises(UsageError, match="no mode 'grahp'; did you mean graph"):
        selection.resolve_timing(full, ["grahp"], None, timed=True)
    for asked in ({"modes": ["warm"], "restarts": None}, {"modes": [], "restarts": 2}):
        with pytest.raises(UsageError, match="times nothing"):
            selection.resolve_timing(full, **asked, timed=False)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="one process for each GPU"):
            selection.resolve_timing(resolve([], suite="parallel"), **asked, timed=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("restarts", "processes"), [(0, [0] * 5), (1, [0, 0, 0, 1, 1]), (2, [0, 0, 1, 1, 2, 2])])
def test_processes_share_the_rounds_evenly(restarts: int, processes: list[int]) -> None:
    timing = Timing(restarts=restarts)
    assert [timing.process_of(number) for number in range(timing.rounds)] == processes


def test_a_resumed_run_is_timed_as_it_was() -> None:
    plan = selection.resolve_timing(resolve(["gelu"], suite="quick"), ["warm"], 3, timed=True)
    run = {"suite": "quick", "plan": plan.to_json()}
    assert selection.resolve_again(run, [], None) == plan
    assert selection.resolve_again(run, ["softmax"], None).timing == plan.timing
    assert selection.resolve_again(run, [], "full").timing == resolve([], suite="full").timing
    del run["plan"]["timing"]  # type: ignore[attr-defined]
    assert selection.resolve_again(run, [], None).timing == Timing()


def test_targets_come_from_the_folders() -> None:
    assert selection.resolve_target("h200") == "h200"
    assert selection.resolve_target(None) is None
    with pytest.raises(UsageError, match="no target 'h20'; did you mean h200"):
        selection.resolve_target("h20")


@pytest.mark.parametrize(
    ("device", "target"),
    [
        ("NVIDIA H200", "h200"), ("h200", "h200"), ("H200", "h200"), ("", None),
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 144G HBM3e", None), ("NVIDIA H200 MIG 1g.18gb", None), ("tpu-v5e", "tpu-v5e"),
        ("TPU v5e", "tpu-v5e"), ("tpu", None),
    ],
)
def test_a_device_is_a_target_by_its_whole_name(device: str, target: str | None) -> None:
    assert targets.of_device(device) == target


def test_a_new_run_goes_to_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_folder(None, suite="quick", now=NOW) == Path("runs/20300102-030405-quick")
    assert list(tmp_path.iterdir()) == []  # nothing is left behind by looking
    assert output_folder(tmp_path / "a" / "b", suite="quick", now=NOW) == tmp_path / "a" / "b"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    for name in ("run", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for name, message in {
        "empty": "exists already: name another --out",
        "run": "--resume goes on with it, or name another --out",
        "file/run": "file' is a file",
        "x" * 5000: "cannot be made: File name too long",
    }.items():
        with pytest.raises(UsageError, match=message):
            output_folder(tmp_path / name, suite="quick", now=NOW)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UsageError, match="run' cannot be made: Permission denied"):
        output_folder(tmp_path / "run", suite="quick", now=NOW)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be written: Permission denied"):
        resumed_folder(tmp_path)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(UsageError, match="1 MB free on its disk, a run needs 200 MB"):
        output_folder(tmp_path / "run", suite="quick", now=NOW)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--resume needs --out"):
        resumed_folder(None)
    with pytest.raises(UsageError, match="no run to resume; leave --resume out"):
        resumed_folder(tmp_path / "none")
    with pytest.raises(RunFolderError, match="not a run folder"):
        resumed_folder(tmp_path)


def test_suite_parallel_takes_more_gpus_where_none_is() -> None:
    plan = selection.over_absent_gpus(resolve([], suite="parallel"))
    assert {case.ranks for case, _ in plan.work} == {2, 4, 8}
    assert len({case.id for case, _ in plan.work}) == len(plan.work)
    named = resolve(["moe_parallel"], suite="parallel", sizes=[{"ranks": 4}])
    quick = resolve(["gelu"], suite="quick")
    assert [selection.over_absent_gpus(each) for each in (named, quick)] == [named, quick]
