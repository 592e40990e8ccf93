"""Graphs of captured modules of two jax versions equal the stored ones, without any framework.

tests/data/capture.py writes both; a difference is a change in what users read.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare.graph import store
from xlafuse.compare.graph.build.from_hlo import from_hlo
from xlafuse.hlo import file_reader, proto_reader, text_reader

ROOT = Path(__file__).parents[4]
DATA = ROOT / "tests" / "data"
MODULES = sorted(path.relative_to(DATA) for path in DATA.glob("hlo/jax-*/*.hlo.txt.gz"))

DRIVER = """
import json, sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "torch", "triton", "google", "numpy"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, "tests/data")
import capture
print(json.dumps({path: capture.expected(capture.HLO.parent / path) for path in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def read_without_frameworks() -> dict[str, Any]:
    command = [sys.executable, "-c", DRIVER, *map(str, MODULES)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_as_stored(path: Path, read_without_frameworks: dict[str, Any]) -> None:
    stored = json.loads((DATA / path).with_name("expected.json").read_text())
    assert read_without_frameworks[str(path)] == stored[path.name.removesuffix(".hlo.txt.gz")]


def test_both_versions_are_here() -> None:
    assert {path.parent.name for path in MODULES} >= {"jax-0.10.2", "jax-0.11.2"}
    for path in MODULES:
        assert (DATA / path).with_name(path.name.replace(".txt", ".pb")).exists()


def test_nothing_is_unparsed() -> None:
    for path in DATA.glob("hlo/jax-*/expected.json"):
        for name, module in json.loads(path.read_text()).items():
            assert module["unparsed"] == [], name


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_text_and_proto_give_one_graph(path: Path) -> None:
    try:
        proto_reader.message_type("xla.HloProto")
    except proto_reader.ProtoError as problem:
        pytest.skip(str(problem))
    text = from_hlo(file_reader.read(DATA / path))
    proto = from_hlo(file_reader.read((DATA / path).with_name(path.name.replace(".txt", ".pb"))))
    assert store.to_json(text) == store.to_json(proto)


def test_an_unknown_line_is_unparsed() -> None:
    text = gzip.decompress((DATA / "hlo/jax-0.11.2/h200-softmax-fwd.hlo.txt.gz").read_bytes()).decode()
    whole = from_hlo(text_reader.parse(text))
    assert whole.kernels and not whole.unparsed
    lines = text.splitlines()
    (at,) = (number for number, line in enumerate(lines) if " fusion(" in line)
    lines[at] = lines[at].replace("fusion(", "fusion[")
    broken = from_hlo(text_reader.parse("\n".join(lines)))
    assert broken.kernels is not None and len(broken.kernels) == len(whole.kernels) - 1
    assert any(f"line {at + 1}" in text for text in broken.unparsed)
