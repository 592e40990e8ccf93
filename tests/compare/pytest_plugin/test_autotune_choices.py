"""Which worlds a real function is compiled in; for a GPU that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compare import targets
from compare.graph.operations import is_product
from compare.pytest_plugin.autotune_choices import Worlds, compiled
from compare.user.explain import identify

pytestmark = pytest.mark.slow


def worlds(fn: Any, *args: Any, **options: Any) -> Worlds:
    usual: dict[str, Any] = {"grad": False, "target": "h200", "framework": None, "timeout": 300}
    return compiled(fn, args, {}, name="f", **usual | options)


def kernels(found: Worlds) -> dict[str, list[str]]:
    return {world: [kernel.kind for kernel in graph.kernels or ()] for world, graph in found.graphs.items()}


def struct(*shape: int, dtype: str = "float32") -> Any:
    jax = pytest.importorskip("jax")
    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype))


def jax_linear(x: Any, w: Any, b: Any) -> Any:
    import jax

    with jax.named_scope("up"):
        h = x @ w
    with jax.named_scope("act"):
        return jax.nn.gelu(h + b)


def test_a_jax_product_has_two_worlds():
    found = worlds(jax_linear, struct(512, 512), struct(512, 512), struct(512))
    assert list(found.graphs) == ["Triton GEMM", "cuBLAS"]
    triton, cublas = (graph.kernels[0].name for graph in found.graphs.values())
    assert "gemm_fusion" in triton and "gemm_fusion" not in cublas
    assert {graph.name for graph in found.graphs.values()} == {"f"}
    assert kernels(found)["cuBLAS"] != kernels(found)["Triton GEMM"]


def test_backward_and_lowered_products_have_them_too():
    import jax

    x, w = struct(256, 256, dtype="bfloat16"), struct(256, 256, dtype="bfloat16")
    for found in (worlds(lambda x, w: x @ w, x, w, grad=True), worlds(jax.jit(lambda x, w: x @ w).lower(x, w))):
        names = {
            world: [kernel.name for kernel in graph.kernels or () if is_product(kernel)]
            for world, graph in found.graphs.items()
        }
        assert all("gemm_fusion" in name for name in names["Triton GEMM"])
        assert not any("gemm_fusion" in name for name in names["cuBLAS"])


def test_without_a_product_there_is_one():
    import jax

    assert list(worlds(jax.nn.gelu, struct(512, 512)).graphs) == [""]


def test_what_the_gpu_recorded_is_one(tmp_path: Path):
    """compare/targets/h200 holds the choices for this block, made at full precision."""
    import jax

    from xlafuse.blocks import matmul

    if targets.load("h200").xla_autotune_results(jax.__version__) is None:
        pytest.skip(f"the H200's choices are recorded for jax 0.11.2, this is {jax.__version__}")
    inputs = {"a": struct(2048, 4096, dtype="bfloat16"), "b": struct(4096, 14336, dtype="bfloat16")}
    with jax.default_matmul_precision("highest"):
        assert list(worlds(matmul.apply, inputs).graphs) == [""]
        (tmp_path / f"autotune-{jax.__version__}.textproto").write_text("\n")  # a user's own, empty
        assert len(worlds(matmul.apply, inputs, autotune=tmp_path).graphs) == 2


def test_inductor_pads_or_not_and_tunes_where_it_is_told_to():
    torch = pytest.importorskip("torch")

    def linear(x: Any, w: Any, b: Any) -> Any:
        return torch.relu(x @ w + b)

    odd = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1000, 777), (777, 999), (999,))]
    found = worlds(torch.compile(linear, mode="max-autotune"), *odd)
    assert kernels(found) == {
        "ATen": ["gemm", "elementwise"], "ATen, padded": ["copy", "copy", "gemm", "elementwise"],
        "Triton GEMM": ["gemm"],
    }


def test_equal_calls_are_one():
    def at(scale: float) -> Any:
        return lambda x: x * scale

    x = struct(8)
    assert identify(at(2.0), (x,), {}).digest == identify(at(2.0), (x,), {}).digest
    different = [(at(3.0), (x,), {}), (at(2.0), (struct(9),), {}), (at(2.0), (), {"x": x}), (at(2.0), (2.0, x), {})]
    digests = {identify(fn, args, kwargs, framework="jax").digest for fn, args, kwargs in different}
    assert len(digests | {identify(at(2.0), (x,), {}).digest}) == 5
