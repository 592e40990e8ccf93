"""Commands that read import no framework: each runs in a fresh process."""

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
import json, sys
from xlafuse.compare.cli.main import cli
try:
    cli(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 200 records with times."""
    path = tmp_path_factory.mktemp("light") / "run"
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


COMMANDS = [["--help"], ["run", "--help"], ["list"], ["list", "--json"], ["report", "RUN", "-o", "OUT.csv"],
            ["report", "RUN", "-o", "OUT.md"], ["inspect", "RUN", "--view", "times"],
            ["inspect", "RUN", "--view", "matrix", "--json"], ["inspect", "RUN"], ["inspect", "RUN", "--json"],
            ["inspect", "HLO"], ["inspect", "HLO", "--why"], ["inspect", "HLO", "HLO"], ["inspect", "--help"],
            ["diff", "HLO", "HLO"]]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_import_no_framework(words: list[str], folder: Path, tmp_path: Path) -> None:
    paths = {"RUN": str(folder), "HLO": str(PROJECT / "tests" / "data" / "xla" / "softmax.hlo.txt")}
    paths |= {name: str(tmp_path / name) for name in ("OUT.csv", "OUT.md")}
    command = [sys.executable, "-c", DRIVER, *(paths.get(word, word) for word in words)]
    process = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout
    imported = set(json.loads(process.stderr.splitlines()[-1]))
    assert "xlafuse.compare.cli.main" in imported
    assert not imported & set(HEAVY)
    assert "numpy" not in imported or {"--view", "-o"} & {*words}  # for the intervals of verdicts
