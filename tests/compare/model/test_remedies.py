"""Remedies: the gain that measured rows promise, scaled by work, and never more than the part takes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import xlafuse
from kineto_events import kernel, span, trace

from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel
from xlafuse.compare.model.advice import ADVICE
from xlafuse.compare.model.evidence import nearest
from xlafuse.compare.model.parts import Piece
from xlafuse.compare.model.places import Sources
from xlafuse.compare.model.remedies import Remedy, at_their_best, changes, measured_remedies
from xlafuse.compare.model.step import Step, step_of
from xlafuse.compare.model.used_blocks import UsedBlock, used_blocks
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.user.switches import MEANINGS

HEADS = {"batch": 8, "heads": 16, "kv_heads": 16, "sequence": 1024, "head_dim": 64, "causal": 1, "window": 0}


def attention(time_us: float, *phases: str, **sizes: int) -> UsedBlock:
    kernel = Kernel("k", "attention", device_time_us=time_us)
    piece = Piece("step", 0, kernel, "train.py:8 f", "forward")
    return UsedBlock("attention", HEADS | sizes, "bfloat16", 6, frozenset(phases), (piece,), {})  # type: ignore[arg-type]


def of_xla(used: UsedBlock, step_us: float = 34e3) -> list[Remedy]:
    found = measured_remedies([used], "xla", "h200", step_us)
    return found[0] if found else []


def eager_update(time_us: float) -> UsedBlock:
    """Return an AdamW of 64 Mi bfloat16 elements, operation by operation, which one kernel does in 343 µs."""
    piece = Piece("", 0, Kernel("foreach", "library", device_time_us=time_us), "AdamW.step", "update")
    return UsedBlock("adamw", {"elements": 1 << 26}, "bfloat16", 1, frozenset({"update"}), (piece,), {})


def test_an_eager_update_of_arrays_that_no_program_shows_has_no_remedy() -> None:
    """It moves three times the bytes of one kernel; one that takes much longer has other arrays, too."""
    ((remedy,),) = measured_remedies([eager_update(900.0)], "inductor", "h200", 10e3)
    assert remedy.after_us == pytest.approx(343.0, rel=0.05)
    assert not measured_remedies([eager_update(9000.0)], "inductor", "h200", 100e3)


def test_a_line_of_two_products_is_compared_with_the_row_of_one(gpt: Path) -> None:
    """Line 14 has both products of the layer, and linear_gelu has the first one."""
    rows = json.loads(xlafuse("inspect", gpt, "--view", "remedies", "--json").stdout)["rows"]
    parts = json.loads(xlafuse("inspect", gpt, "--view", "parts", "--json").stdout)["rows"]
    (part,) = (part for part in parts if part["where"] == "train_gpt.py:14")
    (row,) = (row for row in rows if row["block"] == "linear_gelu")
    assert 0.4 * part["device_time_us"] < row["before_us"] < 0.75 * part["device_time_us"]


def test_the_advice_names_rows_of_the_suite() -> None:
    for advice in ADVICE:
        assert advice.row in {row.name for row in BLOCKS[advice.block].implementations}, advice
        assert advice.change and advice.compiler in ("xla", "inductor", "eager")
        assert advice.switch in ("", *MEANINGS)


def test_the_nearest_case_is_scaled_by_work() -> None:
    small = nearest("h200", "attention", HEADS, "bfloat16", "train")
    large = nearest("h200", "attention", HEADS | {"batch": 16}, "bfloat16", "train")
    assert small is not None and large is not None and small.measured == large.measured
    assert small.measured.sizes["sequence"] == 1024 and small.measured.sizes["head_dim"] == 64
    own = small.times_us["xla-cudnn"]
    batches = HEADS["batch"] * HEADS["heads"] / (small.measured.sizes["batch"] * small.measured.sizes["heads"])
    row, twice = small.measured_row("xla-cudnn"), large.measured_row("xla-cudnn")
    assert row is not None and row.scaled_us == pytest.approx(own * batches, rel=0.01)
    assert twice is not None and twice.scaled_us == pytest.approx(2 * own * batches, rel=0.01)
    assert small.measured_row("no such row") is None


@pytest.mark.parametrize("sizes", [{"causal": 0, "window": 0, "head_dim": 8192, "batch": 4096}, {"sequence": 1 << 24}])
def test_a_case_far_from_all_measured_ones_has_no_evidence(sizes: dict[str, int]) -> None:
    assert nearest("h200", "attention", HEADS | sizes, "bfloat16", "train") is None
    assert not of_xla(attention(1e5, "forward", "backward", **sizes))


def test_a_mask_is_never_evidence_for_another_one() -> None:
    for sizes in ({"causal": 0}, {"causal": 1, "window": 512}):
        found = nearest("h200", "attention", HEADS | sizes, "bfloat16", "fwd")
        assert found is not None
        masked = bool(found.measured.sizes["causal"]), bool(found.measured.sizes["window"])
        assert masked == (bool(sizes["causal"]), bool(sizes.get("window")))


def test_a_mask_that_is_data_is_compared_with_a_causal_one() -> None:
    """The remedies for attention are causal, and say so."""
    known = attention(17.58e3, "forward", "backward")
    sizes = {name: size for name, size in known.sizes.items() if name not in ("causal", "window")}
    first, other = of_xla(known)[0], of_xla(replace(known, sizes=sizes, attributes={"mask": "data"}))[0]
    assert (other.after_us, other.evidence) == (first.after_us, first.evidence) and other.limits != first.limits


def test_the_captured_decoders_attention_becomes_cudnns() -> None:
    """On an H200 the step of 34.1 ms, whose attention takes 17.6, took 18.1 with that argument."""
    first = of_xla(attention(17.58e3, "forward", "recompute", "backward"))[0]
    assert first.advice.row == "xla-cudnn" and 'implementation="cudnn"' in first.advice.change
    assert 34.1e3 - first.gain_us == pytest.approx(18.1e3, rel=0.15)
    assert "attention/gpt2 train" in first.evidence


def test_a_layer_that_is_computed_again_costs_its_forward_once_more() -> None:
    again = of_xla(attention(17e3, "forward", "recompute", "backward"))[0].after_us
    once = of_xla(attention(17e3, "forward", "backward"))[0].after_us
    forward = of_xla(attention(17e3, "forward"))[0].after_us
    assert again == pytest.approx(once + forward)


def test_a_switch_is_named_where_the_program_calls_what_it_changes(nnx: Path, tmp_path: Path) -> None:
    """Attention that is written out takes the same library's call by an edit alone."""
    written_out = tmp_path / "nnx"
    shutil.copytree(nnx, written_out)
    program = (nnx.parent / "train_nnx.py").read_text()
    (tmp_path / "train_nnx.py").write_text(program.replace("dot_product_attention", "own_written_attention"))
    own = json.loads(xlafuse("inspect", written_out, "--view", "remedies", "--json").stdout)["rows"][0]
    assert "own_written" in own["part"] and "cudnn" in own["change"]
    assert (own["try"], own["kind"]) == ("", "library")


def test_what_is_fast_already_has_no_remedy() -> None:
    assert not of_xla(attention(2e3, "forward", "recompute", "backward"))
    assert not of_xla(attention(17.58e3, "forward", "backward"), step_us=1e8)  # below a hundredth of the step


def test_later_remedies_of_a_block_gain_more_and_none_gains_more_than_the_part() -> None:
    found = of_xla(attention(17.58e3, "forward", "backward"))
    gains = [remedy.gain_us for remedy in found]
    assert gains == sorted(gains) and all(0 < gain < 17.58e3 for gain in gains)
    kinds = [remedy.advice.kind for remedy in found]
    assert kinds == sorted(kinds, key=("switch", "library", "kernel").index)


def test_a_compiler_without_advice_and_a_block_without_rows_have_none() -> None:
    assert not measured_remedies([attention(1e5, "forward")], "eager", "h200", 1e5)
    assert not measured_remedies([attention(1e5, "forward")], "xla", "tpu-v5e", 1e5)


def test_the_first_screens_name_the_change_to_attention(nnx: Path, gpt: Path) -> None:
    """The decoder's kernels then took 17.6 ms; the other program's mask is data, which the remedy says."""
    done = xlafuse("inspect", nnx, "--view", "remedies", "--json")
    first = json.loads(done.stdout)["rows"][0]
    assert (first["where"], first["part"], first["layers"]) == ("train_nnx.py:8", "jax.nn.dot_product_attention", 6)
    assert 33.6e3 - first["gain_us"] == pytest.approx(17.55e3, rel=0.15) and "cudnn" in first["change"]
    other = json.loads(xlafuse("inspect", gpt, "--view", "remedies", "--json").stdout)["rows"][0]
    assert other["block"] == "attention" and "scaled_dot_product_attention" in other["change"]
    assert "mask" in other["limits"] and "mask" not in first["limits"]
    assert 18.5e3 - other["gain_us"] == pytest.approx(13.8e3, rel=0.15)  # by the host's clock, before and after
    screen = xlafuse("inspect", nnx).output.partition(str(nnx))[0]
    assert first["change"].partition("(")[0] in screen
    assert first["try"] == "attention:cudnn" and "(--try attention:cudnn)" in " ".join(screen.split())
    assert not other["try"]


def test_a_joint_case_is_evidence_for_training_and_half_types_for_each_other() -> None:
    sizes = {"tokens": 8192, "width": 1024, "classes": 32000}
    found = nearest("h200", "linear_cross_entropy", sizes, "bfloat16", "train")
    assert found is not None and found.measured.direction == "joint"
    # 8192 x 1024 x 32000 against 8192 x 4096 x 128256: a sixteenth of the work
    assert found.work_ratio == pytest.approx(1 / 16, rel=0.05)
    mlp = nearest("h200", "swiglu_mlp", {"tokens": 8192, "width": 1024, "hidden": 4096}, "bfloat16", "train")
    assert mlp is not None and mlp.measured.dtype == "float16" and mlp.work_ratio == pytest.approx(8 / 3, rel=0.05)


def test_changes_that_presuppose_others_say_so(captures: Path) -> None:
    """By the root operation of each kernel, the step computes 7.5 ms again, 4.8 of them in attention."""
    step = step_of(open_source(captures / "nnx"))
    first, second, *_ = [of_block[0] for of_block in changes(step, used_blocks(step))]
    assert first.advice.block == "attention" and second.advice.kind == "checkpoint"
    assert second.gain_us == pytest.approx(7.5e3 - 4.83e3, rel=0.03)
    assert second.memory_bytes == pytest.approx(2.0e9, rel=0.1)
    assert "then" in second.advice.change and "nnx.remat" in second.advice.change
    after = step_of(open_source(captures / "nnx_cudnn"))
    first = changes(after, used_blocks(after))[0][0]
    assert first.advice.kind == "checkpoint" and "then" not in first.advice.change


def test_the_first_change_to_attention_gains_what_it_promises(captures: Path) -> None:
    """Each pair of captures is a program as it was, and with the first remedy."""
    for name, changed in (("nnx", "nnx_cudnn"), ("gpt", "gpt_sdpa")):
        before, after = step_of(open_source(captures / name)), step_of(open_source(captures / changed))
        promised = before.time_us - changes(before, used_blocks(before))[0][0].gain_us
        assert promised == pytest.approx(after.time_us, rel=0.15)


def test_what_is_as_fast_as_the_fastest_measured_is_left(captures: Path) -> None:
    step = step_of(open_source(captures / "nnx_cudnn"))
    blocks = used_blocks(step)
    made = [remedy for of_block in changes(step, blocks) for remedy in of_block]
    best = {one.used.block: one for one in at_their_best(step, blocks, made)}
    assert {"adamw", "swiglu_mlp", "attention"} <= set(best) and "rmsnorm" not in best
    assert best["adamw"].used.time_us == pytest.approx(1.09e3, rel=0.03)
    assert best["adamw"].least_us == pytest.approx(1.02e3, rel=0.06)
    assert all(one.least_us <= one.used.time_us for one in best.values())


def test_no_gain_exceeds_its_part_and_nothing_is_listed_below_a_hundredth(captures: Path) -> None:
    for name in ("nnx", "nnx_cudnn", "gpt"):
        step = step_of(open_source(captures / name))
        for of_block in changes(step, used_blocks(step)):
            for remedy in of_block:
                assert 0.01 * step.time_us <= remedy.gain_us <= remedy.before_us and remedy.evidence


def test_an_update_of_many_kernels_becomes_one(gpt: Path) -> None:
    """Reading and writing 81.9 million parameters with their moments in float32 takes 28 bytes each."""
    step = step_of(open_source(gpt))
    (adam,) = (used for used in used_blocks(step) if used.block == "adamw")
    assert adam.sizes == {"elements": 81_887_233} and adam.time_us == pytest.approx(1.89e3, rel=0.01)
    (remedy,) = next(own for own in changes(step, used_blocks(step)) if own[0].advice.block == "adamw")
    assert remedy.advice.change.startswith("torch.compile(optimizer.step)")
    assert remedy.after_us == pytest.approx(81_887_233 * 28 / 4.3e12 * 1e6, rel=0.1)


def test_a_dump_has_the_captures_first_remedy_by_predicted_times(compiled: Path, nnx: Path) -> None:
    """The attention takes 17.6 ms."""
    predicted, measured = (
        json.loads(xlafuse("inspect", path, "--view", "remedies", "--json").stdout)["rows"][0]
        for path in (compiled, nnx)
    )
    assert (predicted["predicted"], measured["predicted"]) == ("yes", None)
    assert predicted["change"] == measured["change"] and predicted["after_us"] == measured["after_us"]
    assert predicted["before_us"] != measured["before_us"] == pytest.approx(17.6e3, rel=0.01)
    assert predicted["before_us"] == pytest.approx(measured["before_us"], rel=0.4)
    text = " ".join(xlafuse("inspect", compiled, "--view", "remedies").stdout.split())
    assert f"~{predicted['before_us'] / 1e3:.1f} → ~" in text


def test_graphs_without_times_have_no_remedies(nnx: Path) -> None:
    (module,) = (nnx / "xla").glob("*.hlo.pb")
    assert xlafuse("inspect", module, "--view", "remedies").exit_code == 2


SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(...)"
FFMA = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4"


def step(*names: str, compiler: str = "inductor", moved: int = 0) -> Step:
    """Return a step of kernels of 1 ms, each of which reads and writes an array of as many bytes."""
    made = tuple(
        Kernel(
            f"k{number}", "gemm", runtime_name=name, device_time_us=1e3, flops=1e9, inputs=(Access("a", moved),),
            outputs=(Access("a", moved),),
        )
        for number, name in enumerate(names)
    )
    array = Buffer("a", (moved // 4,), "f32", moved, "input")
    return Step({"step": FusionGraph("step", compiler, made, (array,), target="NVIDIA H200")}, Sources())


def in_tf32(step: Step, *blocks: UsedBlock) -> Remedy | None:
    found = [own[0] for own in changes(step, blocks) if own[0].advice.switch == "matmul:tf32"]
    return found[0] if found else None


def test_products_in_ieee_float32_gain_as_the_measured_pair() -> None:
    others = "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n", "cutlass_80_tensorop_s1688gemm_64x128", "nvjet_sm90_tst_128x256"
    for compiler, before, after in (("inductor", 1732, 421), ("xla", 1713, 361)):
        remedy = in_tf32(step(SIMT, FFMA, "ampere_sgemm_32x128_tn", *others, compiler=compiler))
        assert remedy is not None and [piece.index for piece in remedy.pieces] == [0, 1, 2]
        assert remedy.before_us == 3e3 and remedy.after_us == pytest.approx(3e3 * after / before, rel=0.003)
        assert f"{before} → {after} µs" in remedy.evidence
    assert in_tf32(step(*others)) is None


def test_pytorch_without_a_compiler_has_the_switch_and_its_gain(tmp_path: Path) -> None:
    names = SIMT, "nvjet_sm90_tst_128x256", SIMT
    events = [
        each for number, name in enumerate(names) for at in (2000 * number,) for each in (
            span("cpu_op", "aten::mm", at, 20), span("cuda_runtime", "cudaLaunchKernel", at + 1, 5, correlation=number),
            kernel(name, at + 10, 1000, number),
        )
    ]
    (tmp_path / "trace.json").write_text(json.dumps(trace(*events)))
    found = json.loads(xlafuse("inspect", tmp_path / "trace.json", "--json").stdout)["step"]
    assert found["model_flops"] is None  # nothing tells the sizes of products outside of graphs
    (row,) = found["remedies"]
    assert (row["try"], row["before_us"]) == ("matmul:tf32", pytest.approx(2000))
    assert row["after_us"] == pytest.approx(2000 * 451 / 1765, rel=0.003)  # library's rows


def test_a_product_in_tf32_takes_at_least_its_bytes() -> None:
    moved = 1_600_000_000
    remedy = in_tf32(step(SIMT, moved=moved))
    assert remedy is not None and remedy.after_us == pytest.approx(2 * moved / 4.3e12 * 1e6, rel=0.1)
    assert in_tf32(step(SIMT, moved=10 * moved)) is None


def test_tf32_does_not_count_what_another_remedy_changes() -> None:
    whole = step(SIMT, FFMA, SIMT)
    sizes = {"batch": 2, "heads": 16, "sequence": 1024, "head_dim": 64, "hidden": 0}
    block = UsedBlock("attention_bias", sizes, "float32", 1, frozenset({"forward"}), tuple(whole.pieces[:2]), {})
    found = [own[0] for own in changes(whole, [block])]
    assert {remedy.advice.block: [piece.index for piece in remedy.pieces] for remedy in found} == {
        "attention_bias": [0, 1], "": [2],
    }
    assert sum(remedy.gain_us for remedy in found) < whole.time_us


def test_a_block_in_tf32_is_compared_with_rows_in_tf32() -> None:
    sizes = {"tokens": 8192, "width": 768, "hidden": 2048}
    ieee, tf32 = (
        nearest("h200", "swiglu_mlp", sizes, "float32", "fwd", precision) for precision in ("ieee", "tf32")
    )
    assert ieee is not None and tf32 is not None
    assert ieee.times_us["xla"] == pytest.approx(1713, abs=1) and tf32.times_us["xla"] == pytest.approx(361, abs=1)


@pytest.mark.parametrize("case", ["attention/gpt2-fp32", "attention_bias/t5-large-fp32", "attention_packed/gpt2-fp32"])
@pytest.mark.parametrize("phase", ["fwd", "train"])
def test_a_runs_calls_take_in_tf32_what_the_remedy_promises(committed_run: Any, case: str, phase: str) -> None:
    """The remedy's own evidence is another block."""
    names = [f"{case}/{dtype}/{phase}/inductor" for dtype in ("fp32", "fp32-tf32")]
    graphs = {result.id: result.graph for result in committed_run.results if result.id in names}
    before, after = (Step({"call": replace(graphs[name], target="NVIDIA H200")}, Sources()) for name in names)
    remedy = in_tf32(before)
    assert remedy is not None and before.time_us - remedy.gain_us == pytest.approx(after.time_us, rel=0.12)
