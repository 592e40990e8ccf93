"""Remedies: the gain that measured rows promise, scaled by work, and never more than the part takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import xlafuse

from xlafuse.compare.graph.model import Kernel
from xlafuse.compare.model.advice import ADVICE
from xlafuse.compare.model.evidence import nearest
from xlafuse.compare.model.parts import Piece
from xlafuse.compare.model.remedies import Remedy, remedies
from xlafuse.compare.model.used_blocks import UsedBlock
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.user.switches import MEANINGS

HEADS = {"batch": 8, "heads": 16, "kv_heads": 16, "sequence": 1024, "head_dim": 64, "causal": 1, "window": 0}


def attention(time_us: float, *phases: str, **sizes: int) -> UsedBlock:
    kernel = Kernel("k", "attention", device_time_us=time_us)
    piece = Piece("step", 0, kernel, "train.py:8 f", "forward")
    return UsedBlock("attention", HEADS | sizes, "bfloat16", 6, frozenset(phases), (piece,), {})  # type: ignore[arg-type]


def of_xla(used: UsedBlock, step_us: float = 34e3) -> list[Remedy]:
    found = remedies([used], "xla", "h200", step_us)
    return found[0] if found else []


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
    assert small.scaled_us("xla-cudnn") == pytest.approx(own * batches, rel=0.01)
    assert large.scaled_us("xla-cudnn") == pytest.approx(2 * own * batches, rel=0.01)
    assert small.scaled_us("no such row") is None


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
    assert not remedies([attention(1e5, "forward")], "eager", "h200", 1e5)
    assert not remedies([attention(1e5, "forward")], "xla", "tpu-v5e", 1e5)


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


def test_graphs_without_times_have_no_remedies(nnx: Path) -> None:
    (module,) = (nnx / "xla").glob("*.hlo.pb")
    assert xlafuse("inspect", module, "--view", "remedies").exit_code == 2
