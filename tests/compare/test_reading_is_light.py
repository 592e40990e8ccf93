"""Commands that read import no framework: they run one after the other in a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_records import made_record

from xlafuse.compare.record import run_folder
from xlafuse.compare.spec.blocks import BLOCKS

PROJECT = Path(__file__).resolve().parents[2]
HEAVY = ("jax", "jaxlib", "torch", "triton", "flax")
DRIVER = """
import contextlib, io, json, sys
from xlafuse.compare.cli.main import cli

for words in json.loads(sys.argv[1]):
    printed, status = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            cli(words)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, bool(printed.getvalue()), sorted(sys.modules)]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 200 records with times."""
    path = tmp_path / "run"
    run_folder.create(path, {"segments": []})
    samples = [[1e-4 + i * 1e-8 for i in range(40)]] * 5
    rows = [(c, i) for block in BLOCKS.values() for c in block.cases("quick") for i in block.implementations]
    with (path / "records.jsonl").open("w") as file:
        for case, i in rows[:200]:
            parts = {
                part: {"device_time": samples, "busy_time": samples, "launches": 1, "records": []}
                for part in case.phases
            }
            measurement = {"timer": "cupti", "phases": parts, "wall_time": [1e-4] * 5}
            kernels = {part: {"launches": 1, "bytes_declared": 9, "provenance": {}} for part in case.phases}
            result = made_record(case, i.name, i.backend_name, measurement=measurement, kernels=kernels)
            file.write(json.dumps(result.to_json()) + "\n")
    return path


WITHOUT_NUMPY = [["--help"], ["run", "--help"], ["list"], ["list", "--json"], ["inspect", "RUN"],
                 ["inspect", "RUN", "--json"], ["inspect", "HLO"], ["inspect", "HLO", "--why"],
                 ["inspect", "HLO", "HLO"], ["inspect", "--help"], ["diff", "HLO", "HLO"]]
WITH_NUMPY = [["report", "RUN", "-o", "OUT.csv"], ["report", "RUN", "-o", "OUT.md"],
              ["inspect", "RUN", "--view", "times"], ["inspect", "RUN", "--view", "matrix", "--json"]]  # intervals


def test_commands_import_no_framework(folder: Path, tmp_path: Path) -> None:
    paths = {"RUN": str(folder), "HLO": str(PROJECT / "tests" / "data" / "xla" / "softmax.hlo.txt")}
    paths |= {name: str(tmp_path / name) for name in ("OUT.csv", "OUT.md")}
    commands = [[paths.get(word, word) for word in words] for words in (*WITHOUT_NUMPY, *WITH_NUMPY)]
    process = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(commands)], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    for words, (status, printed, modules) in zip(commands, answers, strict=True):
        assert not status and printed, (words, process.stderr)
        assert not {*modules} & {*HEAVY}, words
    assert "numpy" not in answers[len(WITHOUT_NUMPY) - 1][2]
