"""Reading the representations and resources of kernels with known properties."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from xlafuse.triton_side.calls import artifacts, cuda_program

REPOSITORY = Path(__file__).parents[3]

# In a separate process, because ahead-of-time compilation fails for kernels that are decorated for the interpreter.
COMPILE_DOT = """
import json, sys
from pathlib import Path
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from xlafuse.triton_side.calls import artifacts

@triton.jit
def row_sum(x_ptr, out_ptr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * COLUMNS + tl.arange(0, COLUMNS))
    tl.store(out_ptr + row, tl.sum(x, axis=0))

aligned = [["tt.divisibility", 16]]
source = ASTSource(row_sum, signature={"x_ptr": "*fp32", "out_ptr": "*fp32", "COLUMNS": "constexpr"},
                   constexprs={"COLUMNS": 1024}, attrs={(0,): aligned, (1,): aligned})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
code = artifacts.of_triton(kernel)
written = code.write(Path(sys.argv[1]))
r = code.resources
print(json.dumps([code.name, code.arch, r.registers, r.spill_bytes, r.shared_bytes, r.num_warps,
                  [p.name for p in written], kernel.metadata.shared]))
"""


def test_triton_kernel(tmp_path: Path) -> None:
    script = tmp_path / "compile_row_sum.py"
    script.write_text(COMPILE_DOT)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    folder = tmp_path / "written"
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    name, arch, registers, spill, shared, warps, files, metadata_shared = json.loads(done.stdout)
    assert (name, arch, warps, spill) == ("row_sum", "sm_90", 8, 0)
    assert 8 <= registers <= 255
    assert shared == metadata_shared == 8 * 4  # one fp32 partial sum per warp
    assert files == [f"row_sum.{suffix}" for suffix in ("ttir", "ttgir", "llir", "ptx", "sass", "cubin")]
    assert "tt.reduce" in (folder / "row_sum.ttir").read_text()
    assert "#ttg.blocked" in (folder / "row_sum.ttgir").read_text()
    assert "define" in (folder / "row_sum.llir").read_text()
    assert ".target sm_90" in (folder / "row_sum.ptx").read_text()
    assert "LDG.E.128" in (folder / "row_sum.sass").read_text()
    assert (folder / "row_sum.cubin").read_bytes().startswith(b"\x7fELF")


def test_cuda_kernel(tmp_path: Path) -> None:
    kernel = cuda_program.compile_kernel("gelu.cu", "gelu_forward<float, 4, 2, 256>", "sm_90")
    code = artifacts.of_cuda(kernel, threads=256)
    files = [path.name for path in code.write(tmp_path, "gelu")]
    assert files == ["gelu.cu", "gelu.ptx", "gelu.sass", "gelu.cubin"]
    assert code.resources.num_warps == 8
    assert code.resources.shared_bytes == 0
    assert "MUFU.EX2" in code.sass


def test_spills_are_reported() -> None:
    # 8 packs of y and of dy need 64 registers before any arithmetic, and 1024 threads leave 64 to each.
    kernel = cuda_program.compile_kernel("softmax.cu", "softmax_backward<__nv_bfloat16, 8, 8, 1024, 1>", "sm_90")
    resources = artifacts.of_cuda(kernel, 1024).resources
    assert resources.spill_bytes > 0
    assert resources.registers == 64


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_shared_memory_excludes_the_drivers_reserve(arch: str) -> None:
    kernel = cuda_program.compile_kernel("softmax.cu", "softmax_backward<float, 4, 4, 128, 1>", arch)
    assert artifacts.of_cuda(kernel, 128).resources.shared_bytes == 4 * 4


def test_bytes_that_are_no_cubin_are_an_error() -> None:
    broken = artifacts.Artifacts("broken", "sm_90", {}, b"not a cubin", 4, 0)
    with pytest.raises(ValueError, match="cuobjdump --dump-sass could not read a cubin of 11 bytes"):
        _ = broken.sass


def test_another_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    with pytest.raises(artifacts.UnsupportedTriton, match=r"needs triton 3\.6 or 3\.7, found 4\.0\.0"):
        artifacts.of_triton(SimpleNamespace())


def test_tools_are_named_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="no-such-tool is neither at .* nor on PATH; install"):
        artifacts._tool("no-such-tool")
