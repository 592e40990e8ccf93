"""Launches of hand-written implementations, recorded on a GPU, and compiled for an absent one."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]

H200 = dict(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150_000_000_000, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    L2_cache_size=62914560, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
)

# In a separate process, because a fake GPU cannot be removed.
COMPILE_ONLY = """
import hashlib, json, sys, types
from xlafuse.triton_side.deviceless import for_target as deviceless
deviceless.activate(json.loads(sys.argv[1]))
import torch, triton, triton.language as tl
from xlafuse.triton_side.cuda import gelu as cuda_gelu, softmax as cuda_softmax
from xlafuse.triton_side.kernels import softmax as triton_softmax
from xlafuse.triton_side.calls.direct_launch import launch_directly_in
from xlafuse.triton_side.calls.launches import record_launches

@triton.jit
def copy(x_ptr, out_ptr, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) * step
    tl.store(out_ptr + at, tl.load(x_ptr + at))

@triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512})], key=["step"])
@triton.jit
def tuned_copy(x_ptr, out_ptr, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) * step
    tl.store(out_ptr + at, tl.load(x_ptr + at))

@triton.autotune([triton.Config({"BLOCK": 256})], key=["step"])
@triton.jit
def one_config(x_ptr, out_ptr, step, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))

def train(apply, shape, dtype):
    with deviceless.fake_mode(), record_launches(compile_only=True) as launches:
        x = torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)
        y = apply({"x": x})["y"]
        (dx,) = torch.autograd.grad(y, x, torch.empty_like(y))
        assert dx.shape == x.shape
    return launches

def described(launches):
    return [dict(name=l.name, label=l.label, kind=l.kind, source=l.source.name, line=l.line, grid=l.grid, block=l.block,
                 num_warps=l.num_warps, signature=l.signature, constants=l.constants,
                 tensors=[[t.position, t.shape, t.strides, t.dtype, t.offset, t.storage] for t in l.tensors],
                 registers=l.resources.registers, ptx=l.artifacts.texts["ptx"],
                 cubin=hashlib.sha256(l.artifacts.cubin).hexdigest()) for l in launches]

out = {}
out["triton"] = described(train(triton_softmax.apply, (64, 4096), torch.bfloat16))
out["cuda"] = described(train(cuda_softmax.apply, (64, 4096), torch.bfloat16))
out["prime"] = described(train(cuda_gelu.apply, (3, 5), torch.float32))
with deviceless.fake_mode(), record_launches(compile_only=True) as launches:
    x, y = (torch.empty(4096, device="cuda") for _ in range(2))
    copy[lambda meta: (4096 // meta["BLOCK"],)](x, y, 1, BLOCK=1024, num_warps=2)
    copy[(4,)](x[1:], out_ptr=y, step=1, BLOCK=1024)
    copy[(4,)](x, y, 2, BLOCK=1024)
out["copy"] = described(launches)
with deviceless.fake_mode(), record_launches(compile_only=True) as launches:
    try:
        tuned_copy[(4,)](x, y, 1)
    except RuntimeError as error:
        out["tuned"] = str(error)
module = types.ModuleType("of_a_user")
module.one, module.plain = one_config, copy
launch_directly_in([module])
with deviceless.fake_mode(), record_launches(compile_only=True) as launches:
    one_config[(4,)](x, y, 1)
    copy[lambda meta: (4,)](x, y, 1, BLOCK=1024)
    copy[(4,)](x, y, 1, BLOCK=1024)
out["direct"] = [launch.direct for launch in launches]
print(json.dumps(out))
"""


def run_script(folder: Path, script: str, *arguments: str) -> Any:
    file = folder / "script.py"
    file.write_text(script)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(file), *arguments], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def compile_only(folder: Path) -> dict[str, Any]:
    return run_script(folder, COMPILE_ONLY, json.dumps(H200))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return compile_only(tmp_path_factory.mktemp("compile_only"))


@pytest.mark.slow
def test_triton_forward_and_backward_in_order(compiled: dict[str, Any]) -> None:
    forward, backward = compiled["triton"]
    assert [forward["name"], backward["name"]] == ["softmax_forward_kernel", "softmax_backward_kernel"]
    assert forward["kind"] == "triton" and forward["source"] == "softmax.py" and forward["line"] > 1
    assert forward["grid"][0] >= 1 and forward["block"] == [forward["num_warps"] * 32, 1, 1]
    assert forward["signature"][:2] == ["*bf16", "*bf16"]
    assert forward["constants"]["COLUMNS"] == 4096
    assert 16 <= forward["registers"] <= 255
    # Backward reads the y that forward wrote, and not x.
    assert [t[5] for t in forward["tensors"]] == [0, 1]
    assert [t[5] for t in backward["tensors"]] == [1, 2, 3]
    assert forward["tensors"][0] == [0, [64, 4096], [4096, 1], "bfloat16", 0, 0]


@pytest.mark.slow
def test_cuda_forward_and_backward_in_order(compiled: dict[str, Any]) -> None:
    forward, backward = compiled["cuda"]
    assert forward["label"] == "softmax_forward<__nv_bfloat16, 8, 4, 128, 1>"
    assert backward["label"] == "softmax_backward<__nv_bfloat16, 8, 4, 128, 1>"
    assert forward["name"].startswith("_Z") and forward["name"] in forward["ptx"]
    assert forward["kind"] == "cuda" and forward["source"] == "softmax.cu"
    source = (Path(__file__).parents[3] / "triton_side/cuda/softmax.cu").read_text().splitlines()
    for launch in (forward, backward):
        assert source[launch["line"] - 1].startswith(launch["label"].partition("<")[0] + "(")
    assert forward["grid"] == [64, 1, 1] and forward["block"] == [128, 1, 1] and forward["num_warps"] == 4
    assert forward["signature"] == ["*bf16", "*bf16", "i64", "i32"]
    assert [t[5] for t in backward["tensors"]] == [1, 2, 3]


@pytest.mark.slow
def test_cuda_kernels_of_the_active_target(compiled: dict[str, Any]) -> None:
    assert all(".target sm_90" in launch["ptx"] for launch in compiled["prime"])


@pytest.mark.slow
def test_compiling_specialises_as_a_launch_does(compiled: dict[str, Any]) -> None:
    aligned, shifted, strided = compiled["copy"]
    assert aligned["grid"] == [4, 1, 1] and aligned["num_warps"] == 2
    # step = 1 is a constant and the alignment is 16 bytes: one wide load. A view shifted by an element has neither.
    assert aligned["constants"] == {"BLOCK": 1024, "step": 1}
    assert "ld.global.v4" in aligned["ptx"]
    assert "ld.global.v4" not in shifted["ptx"]
    assert shifted["tensors"][0][4] == 1
    assert strided["constants"] == {"BLOCK": 1024}
    assert strided["signature"] == ["*fp32", "*fp32", "i32", "constexpr"]


@pytest.mark.slow
def test_autotuning_needs_the_gpu(compiled: dict[str, Any]) -> None:
    assert compiled["tuned"].startswith("tuned_copy is autotuned, and choosing among its candidates needs the GPU")


def test_recordings_do_not_nest() -> None:
    from xlafuse.triton_side.calls.launches import record_launches

    with record_launches():
        with pytest.raises(RuntimeError, match="launches are being recorded already"):
            with record_launches():
                pass
    with record_launches() as launches:
        assert launches == []


@pytest.mark.gpu
@pytest.mark.parametrize("module", ["kernels", "cuda"])
def test_recording_runs_the_compiled_code(module: str, compiled: dict[str, Any]) -> None:
    import hashlib
    import importlib

    import torch

    from xlafuse.triton_side.calls.launches import record_launches

    softmax = importlib.import_module(f"xlafuse.triton_side.{module}.softmax")
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with record_launches() as launches:
        y = softmax.apply({"x": x})["y"]
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.allclose(y.float(), torch.softmax(x.detach().float(), -1), atol=1e-3)
    expected = compiled["triton" if module == "kernels" else "cuda"]
    assert [launch.label for launch in launches] == [e["label"] for e in expected]
    assert [list(launch.signature) for launch in launches] == [e["signature"] for e in expected]
    if torch.cuda.get_device_name() == H200["name"]:
        assert [list(launch.grid) for launch in launches] == [e["grid"] for e in expected]
        assert [launch.constants for launch in launches] == [e["constants"] for e in expected]
        assert [hashlib.sha256(launch.artifacts.cubin).hexdigest() for launch in launches] == [
            e["cubin"] for e in expected
        ]


@pytest.mark.slow
def test_triton_launches_autotuned_kernels_and_grids_that_are_called_itself(compiled: dict[str, Any]) -> None:
    assert compiled["direct"] == [False, False, True]
