"""The settings of the process, each tested in a new process, and the merging of autotuning results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xlafuse.compile import autotune

_IMPORT = "from xlafuse.compile.environment import configure_environment; "


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)


@pytest.mark.parametrize(
    "module", ["xlafuse", "xlafuse.hlo.gpu_program", "xlafuse.compile.environment", "xlafuse.compile.autotune"]
)
def test_reading_needs_no_framework(module: str) -> None:
    done = _run(f"import sys, {module}; assert not {{'jax', 'jaxlib', 'numpy'}} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_configuring_after_the_import_of_jax_is_an_error() -> None:
    pytest.importorskip("jax")
    done = _run(
        "import jax; from xlafuse.compile.environment import configure_environment as c; c()", JAX_PLATFORMS="cpu"
    )
    assert "before jax is imported" in done.stderr


def test_the_users_flags_win() -> None:
    done = _run(
        _IMPORT + "import os; configure_environment(deviceless=True); print(os.environ['XLA_FLAGS'])",
        XLA_FLAGS="--xla_gpu_cuda_data_dir=/somewhere",
    )
    assert done.stdout.strip() == "--xla_gpu_cuda_data_dir=/somewhere", done.stderr


def test_results_are_recorded_as_text_only(tmp_path: Path) -> None:
    code = (
        _IMPORT
        + f"import pathlib; configure_environment(record_autotune_to=pathlib.Path({str(tmp_path)!r}, 'a.pb'))"
    )
    assert "recorded to a .textproto file" in _run(code).stderr


def test_earlier_results_are_loaded(tmp_path: Path) -> None:
    done = _run(
        _IMPORT + "import os, pathlib; "
        f"configure_environment(reuse_autotune_from=pathlib.Path({str(tmp_path)!r}, 'a.textproto')); "
        "print(os.environ['XLA_FLAGS'])"
    )
    assert f"--xla_gpu_load_autotune_results_from={tmp_path}/a.textproto" in done.stdout, done.stderr


def _entry(fingerprint: str, backend: str) -> str:
    return (
        f'entries {{\n  key {{\n    target {{\n      hlo_fingerprint: "{fingerprint}"\n    }}\n  }}\n'
        f"  value {{\n    optimal_config {{\n      backend: {backend}\n    }}\n  }}\n}}\n"
    )


def test_merging_keeps_the_later_value_of_each_key() -> None:
    first = _entry("aa", "TRITON") + _entry("bb", "TRITON")
    merged = autotune.merge_results([first, _entry("bb", "CUBLASLT_FISSION") + _entry("cc", "TRITON")])
    assert merged == _entry("aa", "TRITON") + _entry("bb", "CUBLASLT_FISSION") + _entry("cc", "TRITON")


def test_a_recorded_file_merges_into_itself(data: Path) -> None:
    text = (data / "autotune-0.11.2.textproto").read_text()
    merged = autotune.merge_results([text, text])
    assert merged.count("entries {") == text.count("entries {") == 51
    assert sorted(merged.splitlines()) == sorted(text.splitlines())


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="version: 3"):
        autotune.merge_results(["version: 3\n" + _entry("aa", "TRITON")])
