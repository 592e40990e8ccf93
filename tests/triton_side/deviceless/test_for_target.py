"""Inductor's code for an H200, compiled on a machine that need not have one, in processes that pretend to have one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build fake_cuda_hooks.cpp"),
]

MLP = {
    "x": [64, 128],
    "norm_weight": [128],
    "gate_weight": [128, 256],
    "up_weight": [128, 256],
    "down_weight": [256, 128],
}


def compiled_mlp(folder: Path, fake_gpu: Any, **options: bool) -> Any:
    """The kernels of the swiglu_mlp block in bfloat16; all artifacts are written to `folder`."""
    return fake_gpu.answer(
        f"""
from xlafuse.triton_side.blocks import swiglu_mlp
specs = {{name: (tuple(shape), "bfloat16") for name, shape in {MLP!r}.items()}}
captured = deviceless.compile_inductor(swiglu_mlp.apply, specs, {{"eps": 1e-6}}, **{options!r})
captured.write({str(folder)!r})
print(json.dumps([dataclasses.asdict(kernel) for kernel in captured.kernels]))
""",
    )


def test_the_training_step_of_an_mlp_is_compiled_to_hopper_binaries(fake_gpu, tmp_path):
    kernels = compiled_mlp(tmp_path, fake_gpu, train=True, max_autotune=False)
    triton = {(kernel["part"], kernel["name"]) for kernel in kernels if kernel["name"].startswith("triton_")}
    assert {part for part, _ in triton} == {"forward", "backward"}
    for part, name in triton:
        folder = tmp_path / part / "triton"
        assert (folder / f"{name}.cubin").read_bytes().startswith(b"\x7fELF")
        assert ".target sm_90" in (folder / f"{name}.ptx").read_text()
        assert "EXIT" in (folder / f"{name}.sass").read_text()
        assert json.loads((folder / "resources.json").read_text())[name]["registers"] > 0
    gemms = [kernel for kernel in kernels if kernel["kind"] == "gemm"]
    assert len(gemms) == 9  # three forward, and two gradients for each
    assert all(kernel["is_extern"] and kernel["provenance"] == "compiled" for kernel in gemms)
    assert {stage for kernel in kernels for stage in kernel["stages"]} == {
        "norm",
        "gate",
        "up",
        "act",
        "down",
        "residual",
    }
    assert "empty_strided_cuda" in (tmp_path / "forward/output_code.py").read_text()


def test_max_autotune_takes_templates_that_are_not_autotuned(fake_gpu, tmp_path):
    kernels = compiled_mlp(tmp_path, fake_gpu, train=False, max_autotune=True)
    gemms = [kernel for kernel in kernels if kernel["kind"] == "gemm"]
    assert len(gemms) == 3
    assert all(kernel["is_template"] and kernel["provenance"] == "not autotuned" for kernel in gemms)
    assert all((tmp_path / "forward/triton" / f"{kernel['name']}.cubin").exists() for kernel in gemms)


def test_one_candidate_is_compiled_and_several_are_not_autotuned(fake_gpu):
    # Blocks are no larger than the tensor, so 8 elements leave one candidate. A row of 8192 is reduced in a loop, which
    # also has one candidate, but Inductor may add smaller blocks on a GPU.
    provenance = fake_gpu.answer(
        """
from xlafuse.triton_side.blocks import softmax, vector_add
found = []
for block, names, shape in [(vector_add, "xy", (8,)), (vector_add, "xy", (65536,)), (softmax, "x", (64, 8192))]:
    specs = {name: (shape, "bfloat16") for name in names}
    captured = deviceless.compile_inductor(block.apply, specs, {}, train=False, max_autotune=False)
    found.append([kernel.provenance for kernel in captured.kernels])
print(json.dumps(found))
""",
    )
    assert provenance == [["compiled"], ["not autotuned"], ["not autotuned"]]


PRODUCTS = """
def products(inputs):
    x, a, b = inputs["x"], inputs["a"], inputs["b"]
    return {"y": x @ a, "z": x + x @ b}
"""
ATTENTION = """
def attention(inputs):
    scores = (inputs["q"] @ inputs["k"].transpose(-2, -1)).float() / 8.0
    return {"out": torch.softmax(scores, dim=-1).to(inputs["v"].dtype) @ inputs["v"]}
"""
RMSNORM = """
from xlafuse.triton_side.blocks import rmsnorm
def norm(inputs):
    return rmsnorm.apply(inputs, eps=1e-6)
"""
ROWS, COLUMNS = 16384, 4096
# name -> function, shapes of its inputs, dtype, max_autotune. Inductor pads to 16 bytes, which are four floats:
# 100 = 25 * 4 is aligned, 101 and 257 are not.
COMPILES = {
    "unaligned products": ("products", {"x": (257, 101), "a": (101, 257), "b": (101, 101)}, "float32", False),
    "aligned products": ("products", {"x": (256, 100), "a": (100, 256), "b": (100, 100)}, "float32", False),
    "unaligned attention": ("attention", dict.fromkeys("qkv", (1, 3, 1002, 64)), "float16", False),
    "norm": ("norm", {"x": (ROWS, COLUMNS), "weight": (COLUMNS,)}, "bfloat16", False),
    "autotuned norm": ("norm", {"x": (ROWS, COLUMNS), "weight": (COLUMNS,)}, "bfloat16", True),
}


@pytest.fixture(scope="module")
def compiled(fake_gpu: Any) -> dict[str, Any]:
    """The kernels of the training steps of COMPILES, by name, all compiled in one process."""
    results = fake_gpu.answer(
        f"""
import torch
{PRODUCTS}{ATTENTION}{RMSNORM}
found = {{}}
for name, (function, shapes, dtype, tune) in {COMPILES!r}.items():
    specs = {{key: (tuple(shape), dtype) for key, shape in shapes.items()}}
    captured = deviceless.compile_inductor(globals()[function], specs, {{}}, train=True, max_autotune=tune)
    kernels = [dataclasses.asdict(kernel) for kernel in captured.kernels]
    found[name] = [kernels, [call for graph in captured.graphs for call in graph.unparsed]]
print(json.dumps(found))
""",
    )
    assert all(unparsed == [] for _, unparsed in results.values())
    return {name: kernels for name, (kernels, _) in results.items()}


def test_a_gemm_that_a_gpu_might_pad_is_not_autotuned(compiled):
    unaligned = compiled["unaligned products"]
    gemms = [kernel for kernel in unaligned if kernel["kind"] == "gemm"]
    assert {"extern_kernels.mm", "extern_kernels.addmm"} <= {kernel["name"] for kernel in gemms}
    assert len(gemms) == 6 and {kernel["provenance"] for kernel in gemms} == {"not autotuned"}
    assert not any("aten.constant_pad_nd" in kernel["ops"] for kernel in unaligned)
    aligned = compiled["aligned products"]
    assert {kernel["provenance"] for kernel in aligned if kernel["kind"] == "gemm"} == {"compiled"}


def test_an_odd_attention_compiles_without_measuring(compiled):
    gemms = [kernel for kernel in compiled["unaligned attention"] if kernel["kind"] == "gemm"]
    assert len(gemms) == 6 and {kernel["provenance"] for kernel in gemms} == {"not autotuned"}


@pytest.mark.parametrize(("name", "provenance"), [("norm", "compiled"), ("autotuned norm", "not autotuned")])
def test_a_reduction_over_rows_and_columns_is_recorded_with_its_final_calls(compiled, name, provenance):
    mixed, summed, cast = [kernel for kernel in compiled[name] if kernel["part"] == "backward"]
    assert mixed["name"].startswith("triton_per_") and mixed["kind"] == "reduction" and mixed["lines"]
    assert mixed["provenance"] == provenance  # only max-autotune searches for a split
    (dx,) = [buffer["bytes"] for buffer in mixed["outputs"] if not buffer["name"].startswith("workspace")]
    (workspace,) = [buffer for buffer in mixed["outputs"] if buffer["name"].startswith("workspace")]
    assert dx == 2 * ROWS * COLUMNS
    assert sum(buffer["bytes"] for buffer in mixed["inputs"]) == 2 * dx + 2 * COLUMNS + 4 * ROWS  # x, dy, weight, rstd
    assert (summed["name"], cast["name"]) == ("aten.sum", "aten.to")
    assert summed["inputs"] == [workspace] and summed["outputs"][0]["bytes"] == 4 * COLUMNS
    assert cast["inputs"] == summed["outputs"] and cast["outputs"][0]["bytes"] == 2 * COLUMNS


SDPA = """
import torch
def attention(inputs):
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    return {"out": torch.softmax(q @ k.transpose(-2, -1) / 8.0, dim=-1) @ v}
specs = dict.fromkeys("qkv", ((1, 2, 128, 64), "bfloat16"))
captured = deviceless.compile_inductor(attention, specs, {}, train=True, max_autotune=False, sdpa=SDPA_CHOICE)
print(json.dumps([dataclasses.asdict(kernel) for kernel in captured.kernels]))
"""


def test_inductor_turns_a_plain_attention_into_sdpa(fake_gpu):
    forward, backward = fake_gpu.answer(SDPA.replace("SDPA_CHOICE", '"flash"'))
    assert "scaled_dot_product_flash_attention" in forward["name"]
    assert forward["kind"] == backward["kind"] == "attention"
    assert forward["ops"].count("aten.bmm") == 2 and "aten.exp" in forward["ops"]


def test_an_unknown_sdpa_choice_is_an_error(fake_gpu):
    with pytest.raises(RuntimeError, match="give sdpa="):
        fake_gpu.answer(SDPA.replace("SDPA_CHOICE", "None"))


FLEX = """
import torch
from xlafuse.compare.spec.blocks import attention_packed
from xlafuse.compare.spec.case import Case
from xlafuse.triton_side.inductor import _private as private
from xlafuse.triton_side.library import attention_packed as library

def refused(sizes, train):
    inputs = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
    specs = {name: ((sizes["tokens"], sizes[heads], 16), "bfloat16") for name, heads in inputs.items()}
    torch.compiler.reset()
    try:
        with deviceless.fake_mode(), private.compiling_only():
            given = deviceless.fake_inputs(specs | {"cu_seqlens": ((sizes["boundaries"],), "int32")}, train)
            library.apply_flex(given, longest=sizes["longest"])
    except torch._inductor.exc.InductorError as problem:
        assert "NoValidChoicesError" in str(problem), problem
        return True
    return False

found = []
for shape in [(65, 4, 2), (64, 4, 2), (67, 6, 2), (128, 4, 2)]:
    sizes = attention_packed.sizes(shape[0], 2, *shape[1:], 16)
    for direction in ("fwd", "train") if shape == (65, 4, 2) else ("fwd",):
        case = Case("attention_packed", "any", sizes, "bfloat16", direction)
        said = attention_packed.flex_unsupported(case) is not None
        found.append([shape, direction, said, refused(sizes, direction == "train")])
print(json.dumps(found))
"""


@pytest.mark.full
def test_flex_attention_refuses_exactly_the_unsupported_cases(fake_gpu):
    found = fake_gpu.answer(FLEX)
    assert {said for _, _, said, _ in found} == {True, False}
    assert [row for row in found if row[2] != row[3]] == []


FLEX_IN_PAGES = """
import torch
from xlafuse.compare.spec.blocks import decode_attention_paged
from xlafuse.compare.spec.case import Case
from xlafuse.triton_side.inductor import _private as private
from xlafuse.triton_side.library import decode_attention_paged as library

def refused(case):
    specs = {t.name: (t.shape(case.sizes), t.dtype_in(case)) for t in decode_attention_paged.BLOCK.inputs}
    torch.compiler.reset()
    try:
        with deviceless.fake_mode(), private.compiling_only():
            library.apply_flex(deviceless.fake_inputs(specs, False))
    except torch._inductor.exc.InductorError:
        return True
    return False

found = []
for heads, page_size, queries in [
    (4, 16, 1), (4, 32, 1), (32, 16, 1), (4, 8, 1), (4, 13, 1), (4, 24, 1), (6, 16, 1), (4, 16, 2), (8, 16, 16),
    (16, 16, 16), (16, 16, 17),
]:
    sizes = decode_attention_paged.sizes(3, heads, 2, page_size, 5, 64, 1, queries)
    case = Case("decode_attention_paged", "any", sizes, "bfloat16", "fwd")
    said = decode_attention_paged.flex_unsupported(case) is not None
    found.append([(heads, page_size, queries), "", said, refused(case)])
print(json.dumps(found))
"""


@pytest.mark.full
def test_flex_attention_refuses_exactly_the_unsupported_pages(fake_gpu):
    found = fake_gpu.answer(FLEX_IN_PAGES)
    assert {said for _, _, said, _ in found} == {True, False}
    assert [row for row in found if row[2] != row[3]] == []


def test_flex_attentions_mask_scatters_the_page_table(fake_gpu):
    """Inductor drops a scatter into a constant that a mask captures; on an H200 every key was then masked out."""
    kernels = fake_gpu.answer(
        """
import re
from unittest import mock
from torch._inductor.graph import GraphLowering
from xlafuse.compare.spec.blocks import decode_attention_paged
from xlafuse.compare.spec.case import Case
from xlafuse.triton_side.inductor import _private as private
from xlafuse.triton_side.library import decode_attention_paged as library
case = Case("decode_attention_paged", "any", decode_attention_paged.sizes(3, 4, 2, 16, 5, 64, 1), "bfloat16", "fwd")
specs = {t.name: (t.shape(case.sizes), t.dtype_in(case)) for t in decode_attention_paged.BLOCK.inputs}
code = []
seen = mock.patch.object(GraphLowering, "save_output_code", code.append)
emitted = torch._inductor.config.patch(force_disable_caches=True)  # cached code is not emitted again
with deviceless.fake_mode(), private.compiling_only(), seen, emitted:
    library.apply_flex(deviceless.fake_inputs(specs, False))
print(json.dumps(re.findall(r"(\\w+)\\.run\\(", code[0])))
""",
    )
    assert sum("scatter" in name for name in kernels) == 2 and any("tem_" in name for name in kernels), kernels


def test_handwritten_triton_kernels_forward_and_backward(fake_gpu):
    launches = fake_gpu.answer(
        """
from xlafuse.triton_side.kernels import rmsnorm
specs = {"x": ((64, 256), "bfloat16"), "weight": ((256,), "bfloat16")}
recorded = deviceless.record_call(rmsnorm.apply, specs, {"eps": 1e-6}, train=True)
launches = {part: [event for event in events if hasattr(event, "artifacts")] for part, events in recorded.parts.items()}
print(json.dumps({part: [launch.artifacts.arch for launch in made] for part, made in launches.items()}))
""",
    )
    assert set(launches) == {"forward", "backward"}
    assert all(made and set(made) == {"sm_90"} for made in launches.values())


def test_moe_sums_the_steps_of_its_routers_product_separately(fake_gpu):
    """Tensor cores lose digits when they add to a large sum. Only a GPU shows that; here each sum starts at zero."""
    sums = fake_gpu.answer(
        """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from xlafuse.triton_side.kernels.moe_routing import moe_router_kernel as kernel
constants = dict(TOKENS=32, EXPERTS=16, BLOCK_K=128, TOP_K=2, CHOICES=2, PRECISION="ieee", STAGES=4, stride_xw=1,
                 stride_rw=1)
pointers = dict(x_ptr="*bf16", router_ptr="*bf16", logits_ptr="*fp32", chosen_ptr="*i32", weights_ptr="*fp32",
                counts_ptr="*i32", sums_ptr="*fp32")
signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): value for n, value in constants.items()})
ir = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
print(json.dumps(re.findall(r"tt.dot [^,]+, [^,]+, (%[a-z]+)", ir)))
""",
    )
    assert sums == ["%cst"]


def refused(code: str, **environment: str) -> str:
    """Return what a process of its own prints when its code fails."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    prelude = f"""
import json
from xlafuse.triton_side.deviceless import for_target as deviceless
properties = json.load(open({str(ROOT / "compare/targets/h200/cuda_device_properties.json")!r}))
"""
    done = subprocess.run([sys.executable, "-c", prelude + code], env=env | environment, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr


def test_an_untested_torch_is_refused():
    message = refused(
        """
from xlafuse.triton_side.deviceless import _fake_cuda
_fake_cuda.TORCH_BUILDS = (("1.0.0", None), ("1.1.0", "10.0"))
deviceless.activate(properties)
"""
    )
    assert "needs torch 1.0.0 (CPU build) or 1.1.0 (CUDA 10.0 build); found torch" in message


@pytest.mark.parametrize(
    ("code", "environment", "message"),
    [
        ("import torch; deviceless.activate(properties)", {}, "torch is already imported"),
        ("del properties['warp_size']; deviceless.activate(properties)", {}, "lack warp_size"),
        ("deviceless.activate(properties)", {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET=1 is set"),
        ("deviceless.fake_mode()", {}, "no fake GPU in this process"),
    ],
)
def test_misuse_is_refused(code, environment, message):
    assert message in refused(code, **environment)
