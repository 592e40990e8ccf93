"""Kernels written as programs of their own: they run, check themselves, and refuse what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli.main import cli
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.user.extract import extract
from xlafuse.hlo import kernel_extract
from xlafuse.hlo.text_reader import parse

DATA = Path(__file__).parents[2] / "data"
INDUCTOR = DATA / "inductor/torch-2.13.0/debug"

GATHER = """HloModule m

%fused (t: f32[7,3], i: s32[5,1]) -> f32[5,3] {
  %i = s32[5,1]{1,0} parameter(1)
  %t = f32[7,3]{1,0} parameter(0)
  ROOT %g = f32[5,1,3]{2,1,0} gather(%t, %i), GATHERS
}

ENTRY %main (t: f32[7,3], i: s32[5,1]) -> f32[5,3] {
  %t = f32[7,3]{1,0} parameter(0)
  %i = s32[5,1]{1,0} parameter(1)
  ROOT %fusion = f32[5,3]{1,0} fusion(%t, %i), kind=kLoop, calls=%fused
}
""".replace(
    "GATHERS",
    "offset_dims={1,2}, collapsed_slice_dims={}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,3}",
)


def run(file, *arguments):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run(
        [sys.executable, file, *arguments], capture_output=True, text=True, cwd=file.parent, timeout=300,
        env={**environment, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )


def test_a_fusion_of_xla_runs_by_itself_and_checks_a_replacement(tmp_path):
    text = DATA / "xla/softmax.hlo.txt"
    (source,) = open_source(text).results
    kernel = next(each.name for each in source.load().kernels if "fusion" in each.facts["opcode"])
    extract(text, kernel, None, tmp_path / "repro.py")
    (tmp_path / "mine.py").write_text("def wrong(*inputs):\n    return inputs[0] * 0 + 7\n")
    found = run(tmp_path / "repro.py", "--replace", "mine.py:wrong")
    assert "ok kernel" in found.stdout, found.stdout + found.stderr
    assert "WRONG mine.py:wrong" in found.stdout
    assert found.returncode == 1


def test_a_kernel_of_inductor_runs_in_the_interpreter(tmp_path):
    extract(INDUCTOR, "triton_poi_fused_mul_sigmoid_1", None, tmp_path / "repro.py")
    mine = "import torch\n\ndef right(mm, mm_1):\n    return mm * torch.sigmoid(mm) * mm_1\n"
    (tmp_path / "mine.py").write_text(mine)
    found = run(tmp_path / "repro.py", "--replace", "mine.py:right")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "ok triton_poi_fused_mul_sigmoid_1" in found.stdout
    assert "ok mine.py:right" in found.stdout
    assert "not timed" in found.stdout


def test_an_unknown_kernel_lists_the_names(tmp_path):
    with pytest.raises(UsageError, match="triton_poi_fused_mul_sigmoid_1"):
        extract(INDUCTOR, "nothing", None, tmp_path / "repro.py")
    assert not (tmp_path / "repro.py").exists()


def test_a_librarys_kernel_has_no_source(tmp_path):
    with pytest.raises(UsageError, match="library"):
        extract(INDUCTOR / "torchinductor/model__0_forward_1.0", "extern_kernels.addmm", None, tmp_path / "repro.py")


def test_indices_stay_within_the_table():
    extracted = kernel_extract.extract(parse(GATHER, statements=True), "fusion")
    assert extracted.inputs == (((7, 3), "float32", None), ((5, 1), "int32", 7))
    assert extracted.dtype == "float32"


BITCAST = """HloModule m

%fused (a: f32[2,3]) -> f32[3,2] {
  %a = f32[2,3]{0,1:T(2,4)} parameter(0)
  ROOT %b = f32[3,2]{1,0} bitcast(%a)
}

ENTRY %main (x: f32[2,3]) -> f32[3,2] {
  %x = f32[2,3]{0,1} parameter(0)
  ROOT %fusion = f32[3,2]{1,0} fusion(%x), kind=kLoop, calls=%fused
}
"""


def test_a_bitcast_between_layouts_keeps_the_order_in_memory():
    extracted = kernel_extract.extract(parse(BITCAST, statements=True), "fusion")
    assert [line.split("%", 1)[1] for line in extracted.operations.splitlines() if " = " in line] == [
        "a = f32[2,3] parameter(0)", "b.memory = f32[3,2] transpose(%a), dimensions={1,0}",
        "b = f32[3,2] reshape(%b.memory)",
    ]
    assert "row-major" in " ".join(extracted.notes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"s32[5,1]{1,0} parameter(1)\n  %t": "s32[<=5,1]{1,0} parameter(1)\n  %t"}, "dynamic size"),
        ({"%t = f32[7,3]{1,0} parameter(0)\n  ROOT": "%t = f32[7,3]{1,0} constant({...})\n  ROOT"}, "large constant"),
        ({"calls=%fused": "calls=%other"}, "computation is missing"),
        ({"f32[7,3]{1,0} parameter(0)\n  ROOT": "token[] parameter(0)\n  ROOT"}, "an input has the type token"),
        ({"ROOT %fusion": "ROOT %other"}, "no instruction 'fusion'"),
    ],
    ids=["dynamic", "constant", "cut off", "token", "unknown"],
)
def test_a_kernel_that_cannot_be_extracted(changes, problem):
    text = GATHER
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(kernel_extract.NotExtracted, match=problem):
        kernel_extract.extract(parse(text, statements=True), "fusion")


def test_hlo_in_a_short_form_is_extracted_as_xla_prints_it(tmp_path):
    (tmp_path / "short.txt").write_text(
        "HloModule m, is_scheduled=true\nmain {\n  x = f32[12] parameter(0)\n"
        "  c = f32[12] constant({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12})\n  y = add(negate(x), c)\n}\n"
    )
    extract(tmp_path / "short.txt", "y", None, tmp_path / "repro.py")
    assert "ROOT %y = f32[12] add(%input_0, %input_1)" in (tmp_path / "repro.py").read_text()


CAPTURES = DATA / "profiles"


@pytest.mark.parametrize("name", ["11", "fusion_591"])
def test_a_captured_kernel_has_a_number_and_a_profilers_name(name, tmp_path):
    extract(CAPTURES / "jax", name, None, tmp_path / "repro.py")
    first, *rest = (tmp_path / "repro.py").read_text().splitlines()
    assert "fusion.591 of jit_train_step" in first
    assert any(" = f32" in line or " = bf16" in line for line in rest)


def test_a_capture_without_text_is_extracted_from_its_proto(nnx, tmp_path):
    assert not list(nnx.rglob("*.txt"))
    kernels = open_source(nnx).results[0].load().kernels
    name = next(each.name for each in kernels if each.facts["opcode"] == "fusion" and len(each.source_ops) > 3)
    extract(nnx, name, None, tmp_path / "repro.py")
    assert f"The kernel {name} of jit_step" in (tmp_path / "repro.py").read_text()
    (proto,) = nnx.rglob("*.hlo.pb")
    extract(proto, name, None, tmp_path / "of_file.py")
    of_both = [(tmp_path / file).read_text().partition("\n")[2] for file in ("repro.py", "of_file.py")]
    assert of_both[0] == of_both[1]


def test_a_librarys_name_lists_the_calls_that_ran_as_it(tmp_path):
    with pytest.raises(UsageError, match=r"called 'nvjet\S+'; choose one by number or name: \d+ custom-call") as raised:
        extract(CAPTURES / "jax", "nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT", None, tmp_path / "repro.py")
    number = str(raised.value).partition("name: ")[2].split()[0]
    with pytest.raises(UsageError, match="no operations in HLO"):
        extract(CAPTURES / "jax", number, None, tmp_path / "repro.py")


def test_a_shortened_name_finds_a_second_launch_of_inductors_kernel(tmp_path):
    kernels = open_source(CAPTURES / "torch").results[0].load().kernels
    number = next(n for n, each in enumerate(kernels, 1) if each.name.endswith("#2") and "triton_" in each.name)
    extract(CAPTURES / "torch", str(number), None, tmp_path / "by_number.py")
    first = kernels[number - 1].name.removesuffix("#2")
    assert f"kernel {first}#2 " in (tmp_path / "by_number.py").read_text()
    found = CliRunner().invoke(cli, ["inspect", str(CAPTURES / "torch"), "--kernel", f"{first[:12]}…{first[20:]}"])
    assert found.exit_code == 0 and f"{number}. {first}#2" in found.output
