"""Launches of kernels that Triton has launched before: equal to Triton's own, whatever changes between them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon

from triton_side.calls.direct_launch import launched_directly
from triton_side.calls.launches import record_launches

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
def copy_kernel(x_ptr, out_ptr):
    offset = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out_ptr + offset, gl.load(x_ptr + offset))


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
    from triton_side.kernels.matmul import matmul

    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(matmul(a, b), matmul(a, b))


@pytest.mark.gpu
def test_a_gluon_kernel_is_launched_by_triton() -> None:
    x = torch.randn(128, device="cuda")
    for _ in range(2):
        out = torch.zeros_like(x)
        copy_kernel[(1,)](x, out, num_warps=4)
        assert torch.equal(out, x)
