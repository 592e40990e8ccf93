"""`xlafuse run --traffic` on a GPU: the record's bytes are those that its graph declares."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from xlafuse.compare.cli import main
from xlafuse.compare.graph import store
from xlafuse.compare.record import run_files, run_folder
from xlafuse.compare.run import ncu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ncu.ncu_missing() is not None, reason=str(ncu.ncu_missing())),
]

L2_BYTES = 60 << 20  # of an H200; what a kernel wrote last may still lie there


def test_recorded_bytes_are_the_declared_ones(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["run", "vector_add", "softmax", "--direction", "fwd", "--case", "64Mi,gpt2-scores"]
    result = CliRunner().invoke(
        main.cli, [*arguments, "-i", "xla,inductor,triton,eager", "--traffic", "--out", str(folder)]
    )
    assert result.exit_code == 0, result.output
    records, _ = run_folder.read_records(folder)
    assert len(records) == 8
    for each in records:
        assert each.traffic is not None
        for way in ("alone", "call"):
            phases = each.traffic[way].phases
            assert phases, (each.id, way, each.traffic[way])
            forward = phases["forward"]
            assert forward.unjoined == [] and (forward.l2 or 0) > 0, (each.id, way, forward)
            assert sum(k.launches or 0 for k in forward.kernels) == each.kernels["forward"].launches, (each.id, way)
        if each.implementation in ("xla", "inductor", "triton"):  # one kernel each, which reads and writes once
            assert each.graph is not None
            (kernel,) = store.load(run_files.recorded_file(folder, each, each.graph)).kernels or ()
            assert kernel.bytes_read and kernel.bytes_written
            alone = (each.traffic["alone"].phases or {})["forward"]
            assert alone.dram_read == pytest.approx(kernel.bytes_read, rel=0.05), each.id
            written = alone.dram_written or 0
            assert abs(written - kernel.bytes_written) <= 0.05 * kernel.bytes_written + L2_BYTES, each.id
            assert (alone.l2 or 0) >= 0.95 * (kernel.bytes_read + kernel.bytes_written), each.id
