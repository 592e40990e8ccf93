"""Untested versions become tested ones in a checkout, and tested ones change no file."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
import torch

from tools import accept_installed
from xlafuse.triton_side.versions import TORCH_BUILDS, TRITON
from xlafuse.versions import JAX

CONFIG = f"compare/targets/h200/xla/gpu_target_config-{JAX[-1]}.pbtxt"
FILES = ("xlafuse/versions.py", "triton_side/versions.py", CONFIG)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(accept_installed.ROOT / name, tmp_path / name)
    return tmp_path


def test_untested_versions_are_added(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_installed, "version", lambda package: {"jax": "9.1.2.dev3", "triton": "8.4.0"}[package])
    monkeypatch.setattr(torch, "__version__", "7.1.0.dev20261130+cpu")
    accept_installed.main(checkout)
    jax, of_torch = (runpy.run_path(str(checkout / name)) for name in FILES[:2])
    assert jax["JAX"] == (*JAX, "9.1") and of_torch["TRITON"] == (*TRITON, "8.4")
    assert of_torch["TORCH_BUILDS"] == (*TORCH_BUILDS, ("7.1.0.dev20261130", torch.version.cuda))
    assert (checkout / CONFIG.replace(JAX[-1], "9.1")).read_text() == (checkout / CONFIG).read_text()


def test_tested_versions_change_nothing(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_installed, "version", lambda package: {"jax": f"{JAX[0]}.1", "triton": "3.6.0"}[package])
    monkeypatch.setattr(torch, "__version__", TORCH_BUILDS[0][0])
    monkeypatch.setattr(torch.version, "cuda", TORCH_BUILDS[0][1])
    accept_installed.main(checkout)
    files = {str(file.relative_to(checkout)) for file in checkout.rglob("*") if file.is_file()}
    assert files == set(FILES)
    assert all((checkout / name).read_text() == (accept_installed.ROOT / name).read_text() for name in FILES)
