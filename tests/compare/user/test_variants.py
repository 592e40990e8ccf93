"""`xlafuse explain` with settings: the variants that it reads, and what it shows of them without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli.main import cli
from xlafuse.compare.user.variants import parse_variants

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
