from __future__ import annotations

import lzma
import tarfile
from pathlib import Path

import pytest

CAPTURES = Path(__file__).parents[2] / "data" / "captures"


@pytest.fixture(scope="session")
def nnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The captured step of a flax nnx decoder, with its program beside it."""
    folder = tmp_path_factory.mktemp("captures")
    with lzma.open(CAPTURES / "nnx.tar.xz") as packed, tarfile.open(fileobj=packed) as archive:
        archive.extractall(folder, filter="data")
    return folder / "nnx"
