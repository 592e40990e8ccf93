"""Progress: a line for each block when its last record is done, and for each record that has a problem."""

from __future__ import annotations

import pytest
from made_records import made_record

from xlafuse.compare.record.record import Record
from xlafuse.compare.run.progress import Progress
from xlafuse.compare.spec.blocks import BLOCKS


def finished(block: str, implementation: str, status: str = "compiled") -> Record:
    return made_record(BLOCKS[block].cases("tour")[0], implementation, "xla", status, detail="no ptxas was found")


def test_a_block_has_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress({"gelu": 2, "rope": 3}) as progress:
        for record in (finished("rope", "xla"), finished("gelu", "xla"), finished("gelu", "cuda", "skipped")):
            progress.done(record)
            if record.implementation == "xla":  # a record that is made again counts once
                progress.done(record)
        (line,) = capfd.readouterr().err.splitlines()
        assert "gelu" in line and "1 compiled" in line and "1 skipped" in line and "3/5" in line
        progress.skip("rope")
        progress.done(finished("rope", "triton", "failed"))
    failed, rope = capfd.readouterr().err.splitlines()
    assert "failed" in failed and "rope/llama-8b/bf16/fwd/triton" in failed and "no ptxas" in failed
    assert "5/5" in rope and "1 done before" in rope


def test_a_record_has_one_line_if_asked(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress({"gelu": 2}, verbose=True) as progress:
        progress.done(finished("gelu", "xla"))
        progress.done(finished("gelu", "triton"))
    first, second, block = capfd.readouterr().err.splitlines()
    assert "1/2" in first and "gelu/llama-8b/bf16/fwd/xla" in first and "2/2" in second and "2 compiled" in block
