"""The programs of blocks that span ranks, on two CPU processes: gloo, memory that both map, Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("rank_program.py")
SECONDS = 240.0
EXACT, ROUNDED = 2e-5, 3e-2  # over the root mean square: float32, and float16 after three products


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, dict[str, float]]]]:
    """Return each rank's errors, by case and program, then by output or gradient."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore::FutureWarning", str(PROGRAM), str(rank), "2", str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(printed)[-6000:]
    finally:
        for rank in ranks:
            rank.kill()
    yield [json.loads((folder / f"errors-{rank}.json").read_text()) for rank in range(2)]


def test_outputs_and_gradients_are_those_of_the_float64_reference(errors: list[dict[str, dict[str, float]]]) -> None:
    for of_rank in errors:
        compared = {name: found for name, found in of_rank.items() if not name.endswith(" alone")}
        assert {name.rpartition(" ")[2] for name in compared} == {
            "eager", "inductor", "inductor_async", "triton", "triton_put", "triton_in_order"
        }
        for name, found in compared.items():
            limit = ROUNDED if "tiles" in name else EXACT
            assert {of: error for of, error in found.items() if not error <= limit} == {}, name


def test_programs_run_without_exchanges(errors: list[dict[str, dict[str, float]]]) -> None:
    """Each result is finite, has the right shape, and lacks the other rank's rows."""
    for of_rank in errors:
        alone = {name: found for name, found in of_rank.items() if name.endswith(" alone")}
        assert len(alone) == 4
        for name, found in alone.items():
            assert all(error < 1e3 for error in found.values()) and max(found.values()) > 0.1, name
