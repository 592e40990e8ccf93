"""The facts about the host that a run records."""

from __future__ import annotations

import os

import pytest

from xlafuse.compare.base import host


def test_only_what_is_installed_has_a_version() -> None:
    assert host.installed("no-such-package") == {}
    found = host.installed("pytest", "no-such-package")
    assert found == {"pytest": pytest.__version__}


def test_variables_that_compilers_read_are_recorded_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_dump_to=/home/me/dump")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/home/me/cache")
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert host.host()["variables"] == {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest", "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    }
