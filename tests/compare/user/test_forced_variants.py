"""`xlafuse explain --force`: two kernels of a user's function as one, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from output_schemas import assert_valid

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli.main import cli
from xlafuse.compare.user.variants import parse_variants

JAX = f"{Path(__file__).parent / 'user_code/jax_code.py'}:normed_gelu_apart"
TORCH = f"{Path(__file__).parent / 'user_code/torch_code.py'}"
ARGS = ("--args", "f32[64,128], f32[128]")


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["explain", *words, "--target", "h200"])
    return result.exit_code, result.stdout, result.stderr


def found(*words: str) -> Any:
    code, out, err = run(*words, "--json")
    assert code == 0, err
    data = json.loads(out)
    assert_valid(data)
    return data


def test_forced_kernels_are_variants_of_either_compiler() -> None:
    flag, forced = parse_variants(["a=1"], [], ["1+2"])
    assert flag.framework == "jax" and (forced.name, forced.framework, forced.force) == ("1+2", None, "1+2")
    with pytest.raises(UsageError, match="--force"):
        parse_variants([], [], ["1+2", "1+2"])


@pytest.mark.slow
def test_two_kernels_of_xla_become_one_and_compute_the_same(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    page = tmp_path / "page.html"
    data = found(JAX, *ARGS, "--force", "1+2", "-o", str(page))
    (difference,) = data["differences"].values()
    before, after = (data["graphs"][name]["kernels"] for name in ("default", "1+2"))
    assert len(before) == len(after) + 1 and "forced_fusion" in [kernel["name"] for kernel in after]
    saving, (check,) = difference["saving"], data["agreement"]
    assert saving["kernels"] == [kernel["name"] for kernel in before[:2]]
    assert saving["predicted"]["bytes"] == saving["actual"]["bytes"] > 0
    assert saving["predicted"]["launches"] == saving["actual"]["launches"] == 1
    assert saving["device_us"] is None and saving["roofline_us"] > 0
    assert check["name"] == "1+2" and check["agrees"] and check["tolerance"] > 0
    assert "the price of the missed fusion is" in page.read_text() and "agree on the CPU" in page.read_text()


@pytest.mark.slow
def test_a_wrong_name_is_one_line() -> None:
    pytest.importorskip("flax")
    code, _, err = run(JAX, *ARGS, "--force", "1+nothing")
    assert code == 2 and "no kernel 'nothing'; kernels: " in err.splitlines()[-1]


@pytest.mark.full
@pytest.mark.slow
def test_kernels_of_two_phases_stay_two_and_those_of_backward_become_one() -> None:
    pytest.importorskip("flax")
    words = (JAX, *ARGS, "--grad")
    kernels = found(*words)["graphs"]["normed_gelu_apart"]["kernels"]
    phases = [kernel["phase"] for kernel in kernels]
    first = phases.index("backward") + 1
    code, _, err = run(*words, "--force", f"1+{first}")
    assert code == 1 and "is of forward and" in err.splitlines()[-1]
    data = found(*words, "--force", f"{first}+{first + 1}")
    (check,) = data["agreement"]
    assert check["agrees"] and len(data["graphs"][f"{first}+{first + 1}"]["kernels"]) == len(kernels) - 1


@pytest.mark.slow
def test_two_kernels_of_inductor_become_one_and_compute_the_same() -> None:
    pytest.importorskip("torch")
    data = found(f"{TORCH}:sharing_a_scalar", "--args", "f32[64,128], f32[64,128], f32[]", "--force", "1+2")
    (kernel,) = data["graphs"]["1+2"]["kernels"]
    (check,) = data["agreement"]
    assert {op["op"] for op in kernel["source_ops"]} >= {"aten.mul", "aten.tanh", "aten.add"}
    assert kernel["launch"]["registers"] > 0 and check["agrees"] and "ATen operations" in check["other"]
    assert data["differences"]["1+2"]["saving"]["actual"]["launches"] == 1


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [("two_reductions", "f32[64,128], f32[128]", "memory deps did not match"), ("mlp()", "bf16[32,64]", "is extern")],
)
def test_inductors_reason_says_why_two_kernels_stay_two(name: str, args: str, reason: str) -> None:
    pytest.importorskip("torch")
    code, out, err = run(f"{TORCH}:{name}", "--args", args, "--force", "1+2")
    assert code == 1 and not out
    assert f"1+2: Inductor cannot fuse them: node1 {reason}".replace("node1 mem", "mem") in err.splitlines()[-1]
