from __future__ import annotations

import lzma
import tarfile
from pathlib import Path

import pytest

CAPTURES = Path(__file__).parents[2] / "data" / "captures"


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The captured steps of `tests/data/captures`, with their programs."""
    folder = tmp_path_factory.mktemp("captures")
    for file in CAPTURES.glob("*.tar.xz"):
        with lzma.open(file) as packed, tarfile.open(fileobj=packed) as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def nnx(captures: Path) -> Path:
    return captures / "nnx"


@pytest.fixture(scope="session")
def gpt(captures: Path) -> Path:
    return captures / "gpt"
