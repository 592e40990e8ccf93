"""Groups of ranks that answer, refuse, fail apart and hang."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from xlafuse.compare.workers import rank_group
from xlafuse.compare.workers.client import Worker, WorkerDied, WorkerError, WorkerTimeout
from xlafuse.compare.workers.rank_group import RankGroup

# Speaks compare.base.worker_protocol. "fail" fails on rank 1 alone; rank 0 then waits for it for ever.
RANK = """
import json, os, sys, time
rank = int(os.environ["XLAFUSE_RANK"])
print(json.dumps({"result": os.getpid()}), flush=True)
for line in sys.stdin:
    method = json.loads(line)["method"]
    reply = {"result": [rank, os.environ["XLAFUSE_RANKS"], os.environ["NCCL_NVLS_ENABLE"]]}
    if method == "refuse":
        reply = {"error": {"kind": "skipped", "message": "too old"}}
    elif method == "fail" and rank == 1:
        reply = {"error": {"kind": "failed", "message": "no memory"}}
    elif method in ("fail", "hang"):
        time.sleep(600)
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    monkeypatch.setattr(rank_group, "Worker", partial(Worker, command=[sys.executable, "-c", RANK]))
    group = RankGroup("torch-ranks-2", tmp_path / "torch-ranks-2.log", {"XLAFUSE_SCRATCH": str(tmp_path)})
    group.wait_ready(30)
    yield group
    group.kill()


def test_every_rank_answers_or_refuses(group: RankGroup, tmp_path: Path) -> None:
    assert group.ask("trace") == {"ranks": [[0, "2", "0"], [1, "2", "0"]]}
    assert {path.name for path in tmp_path.glob("*.log")} == {
        "torch-ranks-2-rank-0.log", "torch-ranks-2-rank-1.log"
    }
    with pytest.raises(WorkerError, match="too old") as refusal:
        group.ask("refuse")
    assert refusal.value.kind == "skipped" and group.alive  # a refusal by all leaves the group
    assert group.ask("echo") == [0, "2", "0"]


def test_a_failure_of_one_rank_ends_all_at_once(group: RankGroup) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="rank 1 of 2, fail: no memory"):
        group.ask("fail", timeout=60)
    assert time.monotonic() - began < 30 and not group.alive


def test_a_hang_ends_at_the_time_limit(group: RankGroup) -> None:
    with pytest.raises(WorkerTimeout, match="within 1 s"):
        group.ask("hang", timeout=1)
    assert not group.alive
