"""The sources of a page, and the lines of each kernel."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from xlafuse.compare.base import program
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph.model import Kernel, SourceOp
from xlafuse.compare.record.run_files import RunFile
from xlafuse.compare.report.page.listings import extra_files, programs, sources
from xlafuse.compare.report.page.listings import listing as listings
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.result import Result

RUN = PROJECT / "tests" / "data" / "runs" / "h200-small"
CASE = "rmsnorm/llama-8b/bf16/train"

HLO = """HloModule jit_f, is_scheduled=true

FileNames
1 "model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=55 end_column=92}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0), metadata={scheduling_name="p"}
  ROOT %exp.1 = f32[8]{0} exponential(%p), metadata={op_name="jit(f)/exp \\"}\\"" stack_frame_id=1}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %loop_fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/exp" stack_frame_id=1}, backend_config={"device_type":"DEVICE_TYPE_INVALID","force_earliest_schedule":false,"operation_queue_id":"0","reification_cost":[]}
}
"""  # noqa: E501

CODE = """# AOT ID: ['0_forward']
import torch
async_compile = AsyncCompile()

# kernel path: abc.py
# Graph fragment:
#   %x : Tensor = PlaceHolder[target=x]
triton_poi_fused_exp_0 = async_compile.triton('triton_poi_fused_exp_0', '''
import triton

@triton.jit
def triton_poi_fused_exp_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + x0, xmask)
''', device_str='cuda')

def call(args):
    buf0 = empty_strided_cuda((8, ), (1, ), torch.float32)
    # [Provenance debug handles] triton_poi_fused_exp_0:1
    stream0 = get_raw_stream(0)
    triton_poi_fused_exp_0.run(arg0_1, buf0, 8, stream=stream0)
    extern_kernels.mm(buf0, arg1_1, out=buf1)
    extern_kernels.mm(buf1, arg1_1, out=buf2)
    # [Provenance debug handles] aten.sum:4
    buf3 = workspace.view(4, 2).sum(dim=0)
    return (buf2, )

def benchmark_compiled_module(times=10, repeat=10):
    return 0
"""


def numbered(text: str, line: str) -> int:
    return next(n for n, found in enumerate(text.split("\n"), 1) if found.startswith(line))


def test_hlo_keeps_line_numbers_and_drops_metadata() -> None:
    listing = listings.hlo(HLO)
    fusion = numbered(HLO, "  ROOT %loop_fusion")
    assert listing.lines[fusion] == "  ROOT %loop_fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused"
    assert listing.spans["loop_fusion"] == [(fusion, fusion), (numbered(HLO, "%fused"), fusion - 4)]
    assert listing.places == {numbered(HLO, "  ROOT %exp.1"): "model.py:9", fusion: "model.py:9"}
    text = "\n".join(listing.lines.values())
    assert "metadata" not in text and "StackFrames" not in text and "model.py" not in text


def test_a_configuration_that_is_no_default_stays() -> None:
    line = HLO.replace('"reification_cost":[]', '"gemm_backend_config":{"alpha_real":1}')
    assert '"gemm_backend_config":{"alpha_real":1}' in "\n".join(listings.hlo(line).lines.values())


def test_output_code_has_kernels_and_their_calls() -> None:
    listing = listings.output_code(CODE)
    run = numbered(CODE, "    triton_poi_fused_exp_0.run")
    assert listing.spans["call triton_poi_fused_exp_0"] == [(run, run)]
    assert listing.spans["triton_poi_fused_exp_0"] == [(5, numbered(CODE, "'''"))]
    assert listing.spans["call extern_kernels.mm"] == [(run + 1, run + 1), (run + 2, run + 2)]
    assert listing.spans["call aten.sum"] == [(run + 3, run + 4)]
    text = "\n".join(listing.lines.values())
    assert "import" not in text and "benchmark" not in text and "PlaceHolder" not in text


def test_functions_by_name() -> None:
    python = "import x\n\n@jit\ndef f(\n    a,\n):\n    return a\n\n\ndef g():\n    pass\n"
    assert listings.program(python, "python").spans == {"f": [(3, 7)], "g": [(10, 11)]}
    decorated = "@declare(\n    flops=1,\n)\n@jit\ndef f():\n    pass\n"
    assert listings.program(decorated, "python").spans == {"f": [(1, 6)]}
    assert listings.program("print 'Python 2'\ndef f():\n    pass\n", "python").spans == {}
    cuda = "template <int N>\n__global__ void __launch_bounds__(N)\nadd(float* x) {\n  x[0] = 1;\n}\n\nint other;\n"
    assert listings.program(cuda, "cuda").spans == {"add": [(1, 5)]}


def test_long_and_malformed_texts_are_cut() -> None:
    unended = '  %a = f32[] add(%b), metadata={op_name="' + "\\" * 20000
    odd = "\n".join([unended, "}" * 9000, "metadata={" * 5000, "\x00<script>"])
    for read in (listings.hlo, listings.output_code):
        assert all(len(line) < listings.LONGEST + 40 for line in read(odd).lines.values())


def of(name: str, line: str, **more: object) -> Kernel:
    return Kernel(name, "custom", source_ops=(SourceOp("mul", line=line),), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [
    "/etc/passwd", "../../etc/passwd", "xlafuse/../../../etc/passwd.py", "tests/conftest.py", "xlafuse", "",
])
def test_only_source_files_of_the_project_are_read(name: str) -> None:
    assert list(programs.of_kernels([of("k", f"{name}:1")])) == []


def test_changed_programs_are_noted_and_kernels_found_by_name() -> None:
    path = "triton_side/kernels/rmsnorm.py"
    kernel = of("rmsnorm_forward_kernel", f"{path}:1", facts={"language": "triton"})
    ((name, listing, spans, note),) = programs.of_kernels([kernel])
    (first, last), = spans[0]
    assert name == path and programs.BY_NAME in note
    assert any("def rmsnorm_forward_kernel(" in listing.lines[n] for n in range(first, last))
    declared = next(n for n, text in listing.lines.items() if "def rmsnorm_forward_kernel(" in text)
    ((_, _, _, note),) = programs.of_kernels([of("rmsnorm_forward_kernel", f"{path}:{declared}")])
    assert note == ""


@pytest.mark.parametrize("case", ["again", "other"])
@pytest.mark.parametrize("recorded", ["present", "another", None])
def test_lines_of_another_program_are_called_so(tmp_path: Path, case: str, recorded: str | None) -> None:
    """A run's file may have changed since, also where each recorded line is still code."""
    present = {"commit": "1" * 40, "sources": program.sources_in(PROJECT)}
    made = {"present": present, "another": {"commit": "2" * 40, "sources": "3" * 64}, None: {}}[recorded]
    run = json.loads((RUN / "run.json").read_text())
    again = {"case": CASE, "reason": "r", **made}
    shutil.copytree(RUN, tmp_path / "run")
    entries = run | ({**present, "again": [again]} if case == "again" else {**made, "again": [again | {"case": "x"}]})
    (tmp_path / "run" / "run.json").write_text(json.dumps(entries))
    results = [each for each in open_source(tmp_path / "run").results if each.record and each.record.case.id == CASE]
    shown = sources.of_cases({CASE: results}, None).cases[CASE]["records"]
    notes = {d["title"]: d["note"] for record in shown for d in record["documents"] if "text" not in d}
    assert "xlafuse/blocks/rmsnorm.py" in notes
    for note in notes.values():
        assert ("installed version" in note) == (recorded != "present")
        assert ("2" * 12 in note) == (recorded == "another") and "1" * 12 not in note


@pytest.fixture(scope="module")
def train() -> list[Result]:
    return [each for each in open_source(RUN).results if each.record and each.record.case.id == CASE]


@pytest.fixture(scope="module")
def kept(train: list[Result], tmp_path_factory: pytest.TempPathFactory) -> tuple[sources.Sources, Path]:
    folder = tmp_path_factory.mktemp("page") / "a page's files"
    return sources.of_cases({CASE: train}, folder), folder


def test_every_compiled_kernel_has_lines(kept: tuple[sources.Sources, Path]) -> None:
    shown = {record["name"]: record for record in kept[0].cases[CASE]["records"]}
    for name in ("xla", "xla-remat", "inductor", "triton"):
        held = {int(i) for document in shown[name]["documents"] for i in document["kernels"]}
        assert held == set(range(len(shown[name]["kernels"]))), name
    titles = [document["title"] for document in shown["xla"]["documents"]]
    assert titles == ["forward/optimized.hlo.txt", "backward/optimized.hlo.txt", "xlafuse/blocks/rmsnorm.py"]


def test_files_next_to_the_page_are_linked_and_readable(kept: tuple[sources.Sources, Path]) -> None:
    data, folder = kept
    hrefs = set()
    for record in data.cases[CASE]["records"]:
        for file in record["files"]:
            assert file["href"].startswith("a%20page%27s%20files/")
            hrefs.add(file["href"].partition("/")[2])
    assert {path.name for path in folder.iterdir()} == hrefs
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    sass = [text for name, text in texts.items() if name.endswith(".sass.txt")]
    ptx = [text for name, text in texts.items() if name.endswith(".ptx.txt")]
    assert sass and ptx
    assert all("/*0000*/" in text and "/* 0x" not in text for text in sass)
    assert all(".entry" in text and ".debug_info" not in text for text in ptx)


def test_equal_texts_are_embedded_once(kept: tuple[sources.Sources, Path]) -> None:
    texts = [json.dumps(text) for text in kept[0].cases[CASE]["texts"]]
    assert len(texts) == len(set(texts)) > 5


@pytest.mark.parametrize(
    ("place", "words"),
    [("folder", ["separate files"]), (None, ["are left out"]), ("in the way", ["left out", "cannot be written"])],
)
def test_texts_beyond_the_budget_go_to_files(
    place: str | None, words: list[str], train: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder, or with one that cannot be made, they are left out, and a note says so."""
    monkeypatch.setattr(sources, "BUDGET", 6_000)
    folder = None if place is None else tmp_path / place
    (tmp_path / "in the way").write_text("a file")
    records = {record["name"]: record for record in sources.of_cases({CASE: train}, folder).cases[CASE]["records"]}
    assert any("text" in document for document in records["xla"]["documents"])
    last = records["xla-remat"]
    assert not any("text" in document for document in last["documents"])
    assert all(word in last["note"] for word in words)
    assert any(record["files"] for record in records.values()) == (place == "folder")
    assert ("cannot be written" in records["xla"]["note"]) == (place == "in the way")
    if folder is not None and folder.is_dir():
        moved = next(file for file in last["files"] if file["title"].endswith("optimized.hlo.txt"))
        assert "HloModule" in (folder / moved["href"].partition("/")[2]).read_text()


def test_a_broken_archive_leaves_a_note(train: list[Result], tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "dumps").mkdir(parents=True)
    records = []
    for each in train[:3]:
        assert each.record is not None
        records.append(replace(each, path=run, record=structs.replace(each.record, dumps=f"dumps/{len(records)}.zip")))
    (run / "dumps" / "0.zip").write_bytes(b"PK\x03\x04 and no more")
    dumps = next(each.record.dumps for each in train if each.record and each.record.dumps)
    packed = bytearray(RunFile(RUN, str(dumps)).read_bytes())
    packed[60 : len(packed) // 2] = bytes(len(packed) // 2 - 60)
    (run / "dumps" / "1.zip").write_bytes(packed)
    records.append(replace(records[0], record=structs.replace(records[0].record, dumps="../../etc/x.zip")))  # type: ignore
    notes = [record["note"] for record in sources.of_cases({CASE: records}, tmp_path / "files").cases[CASE]["records"]]
    assert "0.zip" in notes[0] and notes[1] and "has no 2.zip" in notes[2] and "not in the run's folder" in notes[3]


def test_a_hostile_member_stays_in_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../forward/<img src=x onerror=alert(1)>.ptx", ".entry")
        archive.writestr("forward/" + "x" * 3000 + ".ptx", ".entry")
    with zipfile.ZipFile(path) as archive:
        links = list(extra_files.write(archive, [], tmp_path / "files"))
    assert len(list((tmp_path / "files").iterdir())) == len(links) == 2
    assert not any(set("<> ") & set(link["href"]) for link in links)
