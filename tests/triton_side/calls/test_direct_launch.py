"""Launches of kernels that Triton has launched before: equal to Triton's own, whatever changes between them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from xlafuse.triton_side.calls.direct_launch import launched_directly
from xlafuse.triton_side.calls.launches import record_launches

ROOT = Path(__file__).parents[3]

# In a process of its own, because Triton's driver and launcher are replaced by some that only note what reaches them.
COMPARE = """
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from xlafuse.triton_side.calls import direct_launch

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=0: 7

driver.set_active(Driver())
direct_launch.current_device = lambda: 0
direct_launch.is_on_gpu = lambda tensor: True
reached, ordinary = [], []
CompiledKernel._init_handles = lambda kernel: None
CompiledKernel.run = property(lambda kernel: lambda *arguments: reached.append((kernel.hash, *arguments)))
run = JITFunction.run

@direct_launch.launched_directly
@triton.jit
def kernel(x_ptr, y_ptr, n, many, factor, flag, NAME: tl.constexpr, BLOCK: tl.constexpr = 64):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n) * factor + flag + many[0] + len(NAME)
    if y_ptr is not None:
        tl.store(y_ptr + at, x + tl.load(many[1]), mask=at < n)

# The first launch of each kind is Triton's own; count the others.
def counted(self, *args, **kwargs):
    ordinary.append(args)
    return run(self, *args, **kwargs)

direct_launch._run = JITFunction.run = counted
x, half, one = torch.zeros(256), torch.zeros(256, dtype=torch.float16), torch.ones(1)
cases = [
    ((x, half, 64, (2, one), 0.5, True, "a"), {}),
    ((x, half, 48, (2, one), 0.5, True, "a"), {}),           # another integer
    ((x, half, 1, (1, one), 1.5, True, "a"), {}),            # integers that Triton makes constants
    ((x, half, 1, (1, one), 1.5, 1, "a"), {}),               # 1 is not True
    ((x[1:], half, 64, (2, one), 0.5, True, "a"), {}),       # another alignment
    ((x, half[1:], 64, (2, one), 0.5, True, "a"), {}),
    ((x, half, 64, (2, x[1:]), 0.5, True, "a"), {}),
    ((half, x, 64, (2, one), 0.5, True, "a"), {}),           # another dtype
    ((torch.nn.Parameter(x), None, 2**40, (2, one), 0.5, False, "ab"), {}),
    ((x, half, 64, (2, one), 0.5, True), {"NAME": "a", "BLOCK": 128, "num_warps": 8}),
    ((x, half, 64, (2, one), 0.5, True), {"NAME": "a", "BLOCK": 128, "num_warps": 4}),
]
for grid in ((3,), (3, 4), (3, 4, 5)):
    for args, constants in cases:
        ordinary.clear(), reached.clear()
        first = kernel[grid](*args, **constants)
        assert kernel[grid](*args, **constants) is first and len(ordinary) <= 1, (args, ordinary)
        changed = (*args[:4], args[4] + 1.0, *args[5:])
        assert kernel[grid](*changed, **constants) is first and len(ordinary) <= 1, (args, ordinary)
        run(kernel, *args, grid=grid, warmup=False, **constants)
        run(kernel, *changed, grid=grid, warmup=False, **constants)

        def plain(arguments):
            return [
                plain(a) if isinstance(a, tuple) else a.data_ptr() if isinstance(a, torch.Tensor) else a
                for a in (*arguments[:7], *arguments[10:])  # without hooks and their metadata
            ]

        launched, again, with_other, expected, expected_with_other = map(plain, reached)
        assert launched == again == expected, (again, expected)
        assert with_other == expected_with_other != expected
ordinary.clear()
with direct_launch.by_triton():
    kernel[(3,)](*cases[0][0])
assert len(ordinary) == 1
kernel[(3,)](*cases[0][0])
assert len(ordinary) == 1
print("same")
"""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BIAS = tl.constexpr(0.5)


@launched_directly
@triton.jit
def scale_kernel(x_ptr, out_ptr, elements, factor, BLOCK: tl.constexpr, SHIFT: tl.constexpr = 0):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, mask=offset < elements)
    if out_ptr is not None:
        tl.store(out_ptr + offset, x * factor + SHIFT, mask=offset < elements)


@launched_directly
@triton.jit
def bias_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    tl.store(out_ptr + offset, tl.load(x_ptr + offset) + BIAS)


@launched_directly
@gluon.jit
def copy_kernel(x_descriptor, out_ptr):
    """Copy a tile of 16 x 64; rows beyond the end of x are zero."""
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    tile = gl.allocate_shared_memory(gl.float32, [16, 64], x_descriptor.layout)
    mbarrier.expect(arrived, x_descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(x_descriptor, [0, 0], arrived, tile)
    mbarrier.wait(arrived, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))
    column = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out_ptr + row[:, None] * 64 + column[None, :], tile.load(layout))


def scaled(x: torch.Tensor, factor: float = 2.0, **constants: Any) -> torch.Tensor:
    out = torch.full_like(x, -1)
    scale_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), factor, BLOCK=64, **constants)
    return out


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(1000, device=DEVICE, dtype=torch.float32)


@pytest.fixture
def launch_hook() -> Iterator[list[str]]:
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    yield seen
    triton.knobs.runtime.launch_enter_hook.remove(hook)


def test_arguments_that_change_between_launches(x: torch.Tensor) -> None:
    for _ in range(3):
        for elements in (1000, 999, 16, 1):
            for factor in (2.0, 3.0, 1.0):
                assert torch.equal(scaled(x[:elements], factor), x[:elements] * factor)
        for misaligned in (x[1:], x[2:901], x[4:]):
            assert torch.equal(scaled(misaligned), misaligned * 2)
        for dtype in (torch.float16, torch.bfloat16, torch.int32):
            assert torch.equal(scaled(x.to(dtype), 2), x.to(dtype) * 2)
        assert torch.equal(scaled(x, SHIFT=5), x * 2 + 5)
        assert torch.equal(scaled(x, SHIFT=5.5, num_warps=2), x * 2 + 5.5)


@pytest.mark.slow
def test_the_same_arguments_reach_the_compiled_kernel_as_from_triton(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # Triton reads the source of its kernels
    script.write_text(COMPARE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout == "same\n", done.stderr


def test_a_grid_of_a_function_and_optional_arguments(x: torch.Tensor) -> None:
    for _ in range(2):
        out = torch.zeros_like(x)
        scale_kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, out, 1000, 2.0, BLOCK=256)
        assert torch.equal(out, 2 * x)
        scale_kernel[(16, 1, 1)](x, None, 1000, 2.0, 64)
        out = torch.zeros_like(x)
        scale_kernel[(16, 1, 1)](x, out, 1000, factor=2.0, BLOCK=64)
        assert torch.equal(out, 2 * x)
        out = torch.zeros_like(x)
        scale_kernel[(16,)](x, out, 1000, 2.0, 64, 0.25)
        scale_kernel[(16,)](x, out, 1000, 2.0, 64, 0.75)
        assert torch.equal(out, 2 * x + 0.75)


@pytest.mark.gpu
def test_hooks_and_recordings_see_every_launch(x: torch.Tensor, launch_hook: list[str]) -> None:
    for _ in range(3):
        scaled(x)
    assert launch_hook == ["scale_kernel"] * 3
    with record_launches() as launches:
        scaled(x)
        scaled(x)
    assert [launch.label for launch in launches] == ["scale_kernel"] * 2
    assert [launch.scalars["factor"] for launch in launches] == [2.0, 2.0]


@pytest.mark.gpu
def test_a_launch_after_a_hook_was_removed(x: torch.Tensor) -> None:
    scaled(x)
    assert torch.equal(scaled(x, 4.0), 4 * x)


@pytest.mark.gpu
def test_a_tensor_in_host_memory_is_refused(x: torch.Tensor) -> None:
    scaled(x)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        scaled(x.cpu())
    assert torch.equal(scaled(x), 2 * x)


@pytest.mark.gpu
def test_a_changed_global_constant_is_refused(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.empty_like(x)
    for _ in range(2):
        bias_kernel[(1,)](x, out, BLOCK=64)
        assert torch.equal(out[:64], x[:64] + 0.5)
    monkeypatch.setitem(globals(), "BIAS", tl.constexpr(1.5))
    with pytest.raises(RuntimeError, match="BIAS has changed"):
        bias_kernel[(1,)](x, out, BLOCK=64)


@pytest.mark.gpu
def test_the_current_stream_and_a_captured_graph(x: torch.Tensor) -> None:
    scaled(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        doubled = x + x
        again = scaled(doubled)
    stream.synchronize()
    assert torch.equal(again, 4 * x)
    out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale_kernel[(16,)](x, out, 1000, 2.0, BLOCK=64)
    out.zero_()
    graph.replay()
    assert torch.equal(out, 2 * x)


@pytest.mark.gpu
def test_kernels_that_build_tensor_descriptors() -> None:
    from xlafuse.triton_side.kernels.matmul import matmul

    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(matmul(a, b), matmul(a, b))


@pytest.mark.gpu
def test_a_gluon_kernel_with_tensors_and_descriptors_that_change() -> None:
    layout = gl.NVMMASharedLayout.get_default_for([16, 64], gl.float32)
    for rows in (16, 8):
        x = torch.randn(rows, 64, device="cuda")
        for _ in range(3):
            out = torch.zeros(16, 64, device="cuda")
            copy_kernel[(1,)](TensorDescriptor.from_tensor(x, [16, 64], layout), out, num_warps=4)
            assert torch.equal(out[:rows], x)
            assert not out[rows:].any()
            x = x + 1
    assert len(copy_kernel.bound) == 1
