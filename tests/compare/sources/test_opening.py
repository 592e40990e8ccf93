"""The graphs of a path. Listing reads no graph, and a bad file gives an error of one line."""

from __future__ import annotations

import gzip
import io
import json
import time
import zipfile
from pathlib import Path

import pytest
from commands import xlafuse
from examples import INDUCTOR, XLA

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.graph import store
from xlafuse.compare.sources.opening import open_source

PROJECT = Path(__file__).resolve().parents[3]
HLO = PROJECT / "tests" / "data" / "xla" / "softmax.hlo.txt"
RUN = PROJECT / "tests" / "data" / "runs" / "h200-small"


def after_optimizations(folder: Path, number: int, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / f"module_{number:04d}.{name}.sm_9.0a_gpu_after_optimizations.txt"
    path.write_text(text)


@pytest.mark.parametrize("packed", [False, True])
def test_hlo_text(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "anything"
    path.write_bytes(gzip.compress(HLO.read_bytes()) if packed else HLO.read_bytes())
    (found,) = open_source(path).results
    graph = found.load()
    assert graph.compiler == "xla" and graph.kernels


@pytest.mark.parametrize("name", ["g.json", "g.json.gz"])
def test_json_of_a_graph(tmp_path: Path, name: str) -> None:
    store.save(XLA, tmp_path / name)
    (found,) = open_source(tmp_path / name).results
    assert found.load() == XLA


def test_an_xla_dump_lists_modules_by_cost_without_reading_them(tmp_path: Path) -> None:
    text = HLO.read_text()
    after_optimizations(tmp_path, 3, "jit_small", text)
    after_optimizations(tmp_path, 7, "jit_large", text + "\n" * 5000)
    after_optimizations(tmp_path, 9, "jit_bad", "no HLO at all" * 5000)
    found = open_source(tmp_path).results
    assert [(each.number, each.name, each.order) for each in found] == [
        (1, "jit_bad", 9), (2, "jit_large", 7), (3, "jit_small", 3),
    ]
    assert found[1].load().kernels
    with pytest.raises(UsageError, match="jit_bad.*neither HLO text nor an HLO proto"):
        found[0].load()


def test_a_capture_without_a_profile_says_why(tmp_path: Path) -> None:
    message = "nothing was profiled: the program ended after 2 steps, before step 3"
    (tmp_path / "capture.json").write_text(json.dumps({"schema": "xlafuse.capture/1", "message": message}))
    with pytest.raises(UsageError, match=f"no graph was captured, and {message}"):
        open_source(tmp_path)
    (tmp_path / "xla").mkdir()
    after_optimizations(tmp_path / "xla", 0, "jit_main", HLO.read_text())
    opened = open_source(tmp_path)
    assert opened.warnings == (f"{tmp_path}: {message}",) and [each.id for each in opened.results] == ["jit_main"]
    shown, remedies = xlafuse("inspect", tmp_path), xlafuse("inspect", tmp_path, "--view", "remedies")
    assert shown.exit_code == 0 and message in shown.stderr
    assert remedies.exit_code == 2 and message in remedies.stderr and "xlafuse capture takes" not in remedies.stderr


def test_choosing_modules(tmp_path: Path) -> None:
    for number in range(4):
        after_optimizations(tmp_path, number, "jit_f" if number else "jit_main", HLO.read_text())
    opened = open_source(tmp_path)
    assert [each.order for each in opened.modules("jit_main")] == [0]
    assert [each.order for each in opened.modules("1")] == [opened.results[0].order]
    with pytest.raises(UsageError, match="3 modules are called 'jit_f'; choose by number: "):
        opened.modules("jit_f")
    with pytest.raises(UsageError, match="no module 'jit_g'; did you mean jit_f"):
        opened.modules("jit_g")


@pytest.mark.parametrize(("implementation", "compiler"), [("xla", "xla"), ("inductor", "inductor")])
def test_a_records_archive_packed_and_unpacked(
    artifacts: Path, tmp_path: Path, implementation: str, compiler: str
) -> None:
    archive = artifacts / f"rmsnorm-llama-8b-bf16-fwd-{implementation}.zip"
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path)
    graphs = []
    for path in (archive, tmp_path):
        (found,) = open_source(path).results
        graphs.append(found.load())
    for graph in graphs:
        assert graph.compiler == compiler and graph.kernels
        assert "norm" in " ".join(stage for kernel in graph.kernels for stage in kernel.stages)
    assert graphs[0].kernels == graphs[1].kernels


def test_phases_of_a_training_step_are_two_graphs(artifacts: Path) -> None:
    opened = open_source(artifacts / "rmsnorm-llama-8b-bf16-train-xla.zip")
    found = opened.results
    assert "efficiencies exceed the step's" in " ".join(opened.warnings)
    for each in found:
        assert {kernel.phase for kernel in each.load().kernels or ()} == {each.name}
    assert {each.name for each in found} == {"forward", "backward"}


def test_a_file_of_inductors_code(artifacts: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(artifacts / "rmsnorm-llama-8b-bf16-fwd-inductor.zip") as packed:
        (tmp_path / "code.py").write_bytes(packed.read("forward/output_code.py"))
    (found,) = open_source(tmp_path / "code.py").results
    graph = found.load()
    assert graph.compiler == "inductor" and graph.kernels


@pytest.mark.parametrize("name", ["log.txt", "log", "log.bin.gz", "log.zip", "folder/worker0.txt"])
def test_a_log_of_torch_trace_is_known_by_its_content(tmp_path: Path, name: str) -> None:
    (log,) = (PROJECT / "tests/data/inductor/torch-2.13.0/trace").glob("*.log")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    packed = {".gz": gzip.compress, ".zip": lambda data: zipped(**{"a/log.dat": data})}
    path.write_bytes(packed.get(path.suffix, bytes)(log.read_bytes()))
    (found,) = open_source(tmp_path / name.split("/")[0]).results
    assert len(found.load().kernels or ()) == 14


def test_a_folder_of_graphs(tmp_path: Path) -> None:
    store.save(XLA, tmp_path / "a.json")
    store.save(INDUCTOR, tmp_path / "b.json.gz")
    found = open_source(tmp_path).results
    assert [(each.name, each.load()) for each in found] == [("a", XLA), ("b", INDUCTOR)]


def test_a_folder_of_hlo_files_and_archives(artifacts: Path, tmp_path: Path) -> None:
    (tmp_path / "a.hlo.txt").write_bytes(HLO.read_bytes())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(HLO.read_bytes()))
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8bbroken")
    for direction, implementation in (("train", "xla"), ("fwd", "xla"), ("fwd", "inductor")):
        name = f"rmsnorm-llama-8b-bf16-{direction}-{implementation}.zip"
        (tmp_path / name).write_bytes((artifacts / name).read_bytes())
    opened = open_source(tmp_path)
    names = [each.name for each in opened.results]
    step = "rmsnorm-llama-8b-bf16-train-xla"
    assert set(names) == {
        "a.hlo.txt", "b.txt.gz", "rmsnorm-llama-8b-bf16-fwd-inductor", "rmsnorm-llama-8b-bf16-fwd-xla",
        f"{step}/forward", f"{step}/backward",
    }
    assert len(names) == 6 and all(each.load().kernels for each in opened.results)
    assert {kernel.phase for kernel in opened.module(f"{step}/backward").load().kernels or ()} == {"backward"}


def test_compiled_modules_of_a_record() -> None:
    found = {each.id: each for each in open_source(RUN).results}
    (module,) = found["rmsnorm/llama-8b/bf16/fwd/xla"].compiled()
    assert module[0] == "rmsnorm/llama-8b/bf16/fwd/xla" and module[1].snapshots()
    step = "rmsnorm/llama-8b/bf16/train/xla"
    assert [name for name, _ in found[step].compiled()] == [f"{step} forward", f"{step} backward"]
    assert found["rmsnorm/llama-8b/bf16/fwd/inductor"].compiled() == []


def test_ceilings_of_the_target(tmp_path: Path) -> None:
    store.save(XLA, tmp_path / "a.json")
    (found,) = open_source(tmp_path / "a.json").results
    ceilings, whose = found.priced_for(None)
    assert ceilings is not None and ceilings.bandwidth(1, 1) > 1e12 and whose == "h200"


HLO_FILES = PROJECT / "tests" / "data" / "hlo"


@pytest.mark.parametrize("path", sorted(HLO_FILES.glob("jax-*/*.txt.gz")), ids=lambda path: path.name)
def test_a_module_names_its_platform(path: Path) -> None:
    (found,) = open_source(path).results
    graph = found.load()
    platform = path.name.split("-")[0]
    assert graph.target == (platform if platform in ("cpu", "tpu") else "")
    assert found.priced_for(None) == (None, "")  # the module of a GPU does not say which one
    if graph.target:
        with pytest.raises(UsageError, match=f"compiled for the {platform.upper()}"):
            found.priced_for("h200")
    if platform == "tpu":
        assert found.priced_for("tpu-v5e")[1] == "the data sheet of tpu-v5e"


def zipped(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name, data in members.items():
            packed.writestr(name, data)
    return stream.getvalue()


HOSTILE = {
    "empty": b"",
    "binary": bytes(range(256)) * 40,
    "text": b"just some words\n",
    "json": b'{"schema": ',
    "other json": b'{"schema": "something else"}',
    "deep json": b'{"schema": ' + b"[" * 100_000,
    "many, none of them a graph": b'{"schema": "xlafuse.explained/1", "graphs": [1]}',
    "cut gzip": gzip.compress(b"HloModule x\n" * 1000)[:40],
    "cut zip": zipped(a=b"b" * 1000)[:60],
    "zip of others": zipped(a=b"b"),
    "zip that leaves its folder": zipped(**{"../../x/forward/optimized.hlo.txt": b"HloModule x"}),
    "mlir": b"module @jit_f {\n}\n",
    "cut hlo": HLO.read_bytes()[:700],
    "python": b"import os\nos.system('touch /tmp/should-not-exist')\n",
}


UNREAD = {
    "brackets": "(" * 20_000,
    "huge": "f32[999999999999,999999999999] add(a, a)",
}


@pytest.mark.parametrize("line", UNREAD)
def test_hlo_of_which_nothing_was_understood_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "unread.hlo.txt"
    path.write_text(f"HloModule x, is_scheduled=true\nENTRY e {{\n ROOT b = {UNREAD[line]}\n}}\n")
    (found,) = open_source(path).results
    with pytest.raises(UsageError, match="no kernels found, and 1 line could not be read"):
        found.load()


def test_malformed_hlo_is_counted_as_unparsed(tmp_path: Path) -> None:
    path = tmp_path / "brackets.hlo.txt"
    lines = ["HloModule x, is_scheduled=true", "ENTRY e {", " a = f32[8] iota()", f" ROOT b = {'(' * 20_000}", "}"]
    path.write_text("\n".join(lines))
    (found,) = open_source(path).results
    assert len(found.load().unparsed) == 1


BODY = """%f (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} WORK
}
"""


def test_a_program_before_fusion_is_no_kernels(tmp_path: Path) -> None:
    path = tmp_path / "module_0001.jit_f.before_optimizations.txt"
    path.write_text("HloModule m\n" + BODY.replace("WORK", "copy(%x)"))
    (found,) = open_source(path).results
    with pytest.raises(UsageError, match="before fusion"):
        found.load()
    path.write_text("HloModule m, is_scheduled=true\n" + BODY.replace("WORK", "copy(%x)"))
    (found,) = open_source(path).results
    assert len(found.load().kernels or ()) == 1 and not found.load().notes


def test_a_module_between_passes_says_so(tmp_path: Path) -> None:
    path = tmp_path / "between.txt"
    path.write_text("HloModule m\n" + BODY.replace("WORK", "fusion(%x), kind=kLoop, calls=%f"))
    (found,) = open_source(path).results
    graph = found.load()
    assert len(graph.kernels or ()) == 1 and "no schedule" in " ".join(graph.notes)
    assert store.from_json(store.to_json(graph)) == graph


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("suffix", ["", ".py", ".json", ".zip", ".hlo.pb"])
def test_hostile_files_give_one_line_with_the_path(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / f"hostile{suffix}"
    path.write_bytes(HOSTILE[name])
    start = time.process_time()
    with pytest.raises(UsageError) as refused:
        for found in open_source(path).results:
            found.load()
    assert time.process_time() - start < 5
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name, data, expected", [
    ("list.json", b"[]", "a trace of torch.profiler"), ("object.json", b'{"a": 1}', "a trace of torch.profiler"),
    ("run.nsys-rep", b"NV\x00\x01", "nsys export --type sqlite"),
    ("two.zip", zipped(**{"0.json": b"[]", "1.json": b"[]"}), "nor one profile alone"),
])
def test_other_files_are_refused_with_what_was_expected(
    tmp_path: Path, name: str, data: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=expected):
        open_source(tmp_path / name)


def test_folders_without_graphs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no graph found; expected a run folder"):
        open_source(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps({"schema": "another"}))
    with pytest.raises(UsageError, match="no graph found; expected a run folder"):
        open_source(tmp_path)
    (tmp_path / "b.json").write_text(json.dumps({"schema": store.SCHEMA}))
    with pytest.raises(UsageError, match="b.json: .*name"):
        open_source(tmp_path).results[0].load()
