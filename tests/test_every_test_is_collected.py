"""Pytest enters every folder that has tests. Its default leaves out folders such as `build`."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    folders = {folder for file in TESTS.rglob("test_*.py") for folder in file.relative_to(TESTS).parts[:-1]}
    assert "build" in folders
    assert not [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in left_out)]
