"""The Markdown of a pull request: a toy repository with two commits, compiled for an absent GPU; and action.yml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare.base.paths import PROJECT

SCRIPT = PROJECT / "tools" / "pull_request.sh"
LAYERS = """\
import jax
import jax.numpy as jnp

def norm(x):
    with jax.named_scope("norm"):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        return wide.astype(x.dtype)

def gated(x):
    with jax.named_scope("gate"):
        hidden = jnp.exp(x)
        return HIDDEN * x
"""
TESTS = """\
import jax.numpy as jnp
from layers import gated

def test_gated(fusion):
    assert fusion(gated, jnp.zeros((256, 512), jnp.bfloat16)).kernel_count == 1
"""
CONFTEST = """\
def pytest_addoption(pluginmanager):
    from xlafuse import pytest_plugin
    if not pluginmanager.is_registered(pytest_plugin):
        pluginmanager.register(pytest_plugin)
"""
SHAPE = "--args 'bf16[4096, 4096]' --target h200"


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder: Path, **files: str) -> str:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "a change")
    return git(folder, "rev-parse", "HEAD")


def compared(folder: Path, base: str, head: str, *lines: str) -> subprocess.CompletedProcess[str]:
    # pytest prints longer summaries where CI is set.
    environment = {**os.environ, "CI": "true", "PYTHON": sys.executable, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(
        [SCRIPT, base, head], cwd=folder, input="\n".join(lines), capture_output=True, text=True, env=environment,
        timeout=280,
    )


def table(markdown: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if line[:2] == "| "]
    return {row[0]: row[1:] for row in rows[1:]}


@pytest.mark.slow
def test_the_kernels_of_two_commits_in_markdown(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    git(tmp_path, "init", "--quiet")
    base = commit(
        tmp_path, layers=LAYERS.replace("HIDDEN", "hidden"), test_fusion=TESTS, conftest=CONFTEST,
    )
    barrier = LAYERS.replace("HIDDEN", "jax.lax.optimization_barrier(hidden)")
    head = commit(tmp_path, layers=f"# Moves all lines.\n{barrier}\ndef added(x):\n    return x + 1\n")
    done = compared(
        tmp_path, base, head, "# our layers", "", f"layers.py:norm {SHAPE}", f"layers:gated {SHAPE}",
        f"layers.py:added {SHAPE}", "pytest test_fusion.py -p no:cacheprovider",
    )
    found = table(done.stdout)
    assert set(found) == {"norm", "gated", "added", "test\\_fusion.test\\_gated"}, done.stdout + done.stderr
    assert found["norm"][0] == "1" and "→" not in "".join(found["norm"]) and found["norm"][-1] == "same"
    kernels, size, time, word = found["gated"]
    assert (kernels, size, word) == ("1 → 2", "67.1 MB → 168 MB", "differs")
    fused, apart = (float(us) for us in re.findall(r"~([\d.]+) µs", time))
    assert apart > 1.5 * fused
    assert found["added"][-1] == "new" and found["test\\_fusion.test\\_gated"][0] == "1 → 2"
    assert "wrapped_exponential" in done.stdout and " layers.py:13\n" in done.stdout and "/tmp" not in done.stdout
    assert done.returncode == 1  # the fusion test fails at head
    failed_before, failed_after = done.stdout.split("Failed at base:")[1].split("Failed at head:")
    assert "no name 'added'" in failed_before and "assert 2 == 1" in failed_after and "added" not in failed_after
    assert git(tmp_path, "worktree", "list").count("\n") == 0 and git(tmp_path, "status", "--short") == ""


def test_a_function_that_does_not_compile_is_named(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    only = commit(tmp_path, layers=LAYERS)
    done = compared(tmp_path, only, only, f"layers.py:missing {SHAPE}")
    assert done.returncode == 1 and "nothing to compare" in done.stdout
    assert done.stdout.count("no name 'missing'") == 2


def test_no_line_is_an_error(tmp_path: Path) -> None:
    done = compared(tmp_path, "a", "b", "# none")
    assert done.returncode == 2 and "expected lines" in done.stderr and done.stdout == ""


def test_the_action_runs_the_script_with_its_inputs() -> None:
    yaml: Any = pytest.importorskip("yaml")
    action = yaml.safe_load((PROJECT / "action.yml").read_text())
    steps = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite" and all({"shell", "run"} <= set(step) for step in steps)
    text = "".join(f"{step.get('if')} {step.get('env')}" for step in steps)
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action["inputs"])
    for step in steps:
        assert "${{" not in step["run"]  # an input in a script would be code
        subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)
        for program in re.findall(r"\$GITHUB_ACTION_PATH/([\w./-]+)", step["run"]):
            assert os.access(PROJECT / program, os.X_OK)
