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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder with what both ranks write."""
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
    yield folder


@pytest.fixture
def errors(folder: Path) -> list[dict[str, dict[str, float]]]:
    """Return each rank's errors, by case and program, then by output or gradient."""
    return [json.loads((folder / f"errors-{rank}.json").read_text()) for rank in range(2)]


def test_outputs_and_gradients_are_those_of_the_float64_reference(errors: list[dict[str, dict[str, float]]]) -> None:
    for of_rank in errors:
        compared = {name: found for name, found in of_rank.items() if not name.endswith(" alone")}
        assert {name.rpartition(" ")[2] for name in compared} == {
            "eager", "inductor", "inductor_async", "triton", "triton_put", "triton_in_order", "triton_all_slots"
        }
        for name, found in compared.items():
            limit = ROUNDED if "tiles" in name else EXACT
            assert {of: error for of, error in found.items() if not error <= limit} == {}, name


def test_programs_run_without_exchanges(errors: list[dict[str, dict[str, float]]]) -> None:
    """Each result is finite, has the right shape, and lacks the other rank's rows.

    Without the other rank, nothing writes some of the rows that `triton_all_slots` reads, so they hold any bits.
    """
    for of_rank in errors:
        alone = {name: found for name, found in of_rank.items() if name.endswith(" alone")}
        assert "moe one-token triton_all_slots alone" in alone
        del alone["moe one-token triton_all_slots alone"]
        assert len(alone) == 4
        for name, found in alone.items():
            assert all(error < 1e3 for error in found.values()) and max(found.values()) > 0.1, name


def test_a_recorded_step_has_the_exchanges_with_their_stages(folder: Path) -> None:
    """mlp: as many rows as a rank has. moe: the experts' first slots, then rows and weights."""
    for rank in range(2):
        found = json.loads((folder / f"exchanges-{rank}.json").read_text())
        of_mlp = [["forward", "gather"], ["forward", "scatter"], ["backward", "scatter"], ["backward", "gather"]]
        rows = 20 * 64 * 2  # tokens x width x bytes
        for program in ("mlp tiles triton", "mlp tiles triton_put"):
            assert found[program] == [[*step, rows] for step in of_mlp]
        of_moe = [["forward", "dispatch"], ["forward", "combine"], ["backward", "combine"], ["backward", "dispatch"]]
        for program in ("moe tiles triton", "moe odd triton_put"):
            steps = [step for *step, _ in found[program]]
            assert list(dict.fromkeys(map(tuple, steps))) == [*map(tuple, of_moe), ("backward", "router")]
        assert found["moe tiles triton"][0] == ["forward", "dispatch", (8 + 1) * 4]


def test_each_replay_reads_what_the_peers_wrote_in_it(folder: Path) -> None:
    """The ranks call with other arrays each time, and no rank waits for the other one between calls."""
    for rank in range(2):
        replays = json.loads((folder / f"replays-{rank}.json").read_text())
        assert {name: len(found) for name, found in replays.items()} == {
            "mlp odd triton": 5, "mlp odd triton_put": 5, "moe one-token triton_all_slots": 5,
        }
        assert {name: found for name, found in replays.items() if not max(found) <= EXACT} == {}


def test_no_replay_overwrites_what_a_late_peer_still_reads(folder: Path) -> None:
    for rank in range(2):
        sent = [100 * (1 - rank) + 10 * call + n for call in range(5) for n in range(5)]
        assert json.loads((folder / f"late-{rank}.json").read_text()) == [sent, sent]
