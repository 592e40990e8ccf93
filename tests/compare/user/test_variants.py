"""`xlafuse explain` with settings: the variants that it reads, and what it shows of them without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli.main import cli
from xlafuse.compare.graph.analyse.diff import diff
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, SourceOp
from xlafuse.compare.sources.explained import Explained
from xlafuse.compare.user.variants import DEFAULT, Comparison, Difference, parse_variants

CODE = Path(__file__).parent / "user_code"


def test_each_option_is_a_variant_and_values_may_hold_commas() -> None:
    first, second = parse_variants(["--xla_a=false, xla_disable_hlo_passes=fusion,dce", "xla_a=1"], [])
    assert first.framework == second.framework == "jax"
    assert first.settings == {"xla_a": "false", "xla_disable_hlo_passes": "fusion,dce"}
    assert second.settings == {"xla_a": "1"}
    (torch,) = parse_variants([], ["triton.cudagraphs=1"])
    assert torch.framework == "torch" and torch.settings == {"triton.cudagraphs": "1"}


@pytest.mark.parametrize(
    ("flags", "inductor"),
    [(["a=1"], ["b=1"]), (["a"], []), (["a=1,a=2"], []), (["a=1,b=2", "b=2,a=1"], []), (["=1"], [])],
)
def test_unclear_variants_are_refused(flags: list[str], inductor: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_variants(flags, inductor)


SIZE = 2 * 8192 * 8192
EXP, TANH = (SourceOp(op, line=f"f.py:{line}") for line, op in enumerate(("exp", "tanh"), 1))


def streaming(read: str, written: str, *ops: SourceOp, launches: int | None = 1) -> Kernel:
    inputs, outputs = (Access(read, SIZE),), (Access(written, SIZE),)
    name = f"{read}_{written}"
    return Kernel(name, "elementwise", source_ops=ops, inputs=inputs, outputs=outputs, launches=launches)


def compared(default: list[Kernel], variant: list[Kernel], target: str = "h200") -> Comparison:
    roles = {"x": "input", "mid": "intermediate", "y": "output"}
    buffers = tuple(Buffer(name, (8192, 8192), "bf16", SIZE, role) for name, role in roles.items())  # type: ignore[arg-type]
    before, after = (FusionGraph("f", "xla", tuple(each), buffers, target=target) for each in (default, variant))
    return Comparison(Explained({DEFAULT: before, "new": after}), {"new": Difference(diff(before, after), None)})


def test_a_predicted_verdict_is_marked_and_needs_intervals_that_do_not_overlap() -> None:
    two, one = [streaming("x", "mid", EXP), streaming("mid", "y", TANH)], [streaming("x", "y", EXP, TANH)]
    faster, slower = compared(two, one).predicted_verdict("new"), compared(one, two).predicted_verdict("new")
    assert faster.startswith("~") and "faster" in faster and "slower" in slower
    assert compared([streaming("x", "y", EXP)], [streaming("x", "y", TANH)]).predicted_verdict("new") == "unresolved"


def test_without_a_difference_or_a_prediction_there_is_no_predicted_verdict() -> None:
    two, one = [streaming("x", "mid", EXP), streaming("mid", "y", TANH)], [streaming("x", "y", EXP, TANH)]
    assert compared(two, two).predicted_verdict("new") == ""
    assert compared(two, one, target="b200").predicted_verdict("new") == ""
    assert compared(two, [streaming("x", "y", EXP, TANH, launches=None)]).predicted_verdict("new") == ""


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["explain", *words, "--target", "h200"])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_flags_of_xla_change_only_their_variant() -> None:
    pytest.importorskip("jax")
    code, out, _ = run(
        f"{CODE / 'jax_code.py'}:gelu", "--args", "f32[64,128]", "--json",
        "--xla-flag", "xla_disable_hlo_passes=fusion,priority-fusion", "--xla-flag", "xla_gpu_enable_triton_gemm=false",
    )
    assert code == 0
    found = json.loads(out)
    unfused, same = found["differences"].values()
    assert unfused["differs"] and not same["differs"] and unfused["speedup"] is None and not found["times"]
    assert all(time["low_us"] < time["us"] < time["high_us"] for time in found["predicted"].values())
    kernels = {name: len(graph["kernels"]) for name, graph in found["graphs"].items()}
    assert kernels["default"] == kernels["xla_gpu_enable_triton_gemm=false"] == 1 and max(kernels.values()) > 1


@pytest.mark.full
@pytest.mark.slow
def test_options_of_inductor_change_only_their_variant() -> None:
    pytest.importorskip("torch")
    where = f"{CODE / 'torch_code.py'}:normed"
    code, out, _ = run(
        where, "--args", "f32[64,128]", "--inductor", "max_fusion_size=1", "--inductor", "epilogue_fusion=true",
    )
    assert code == 0
    rows = [line.split() for line in out.splitlines()[2:5]]
    assert [(row[0], row[-1]) for row in rows] == [
        ("1", "default"), ("2", "max_fusion_size=1"), ("1", "epilogue_fusion=true"),
    ]
    code, _, err = run(where, "--args", "f32[64,128]", "--inductor", "max_fusion_siz=1")
    assert code == 1 and "max_fusion_size" in err


@pytest.mark.slow
def test_an_unknown_flag_of_xla_is_one_line() -> None:
    pytest.importorskip("jax")
    code, _, err = run(f"{CODE / 'jax_code.py'}:gelu", "--args", "f32[64,128]", "--xla-flag", "xla_no_flag=1")
    assert code == 1 and "xla_no_flag" in err.splitlines()[-1]
