"""The autotune choices that real functions are compiled for; for an absent GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare import targets
from xlafuse.compare.graph.operations import is_product
from xlafuse.compare.pytest_plugin.autotune_choices import AutotuneChoices, compile_choices
from xlafuse.compare.user.explain import identify

pytestmark = pytest.mark.slow


def choices(fn: Any, *args: Any, **options: Any) -> AutotuneChoices:
    usual: dict[str, Any] = {"grad": False, "target": "h200", "framework": None, "timeout": 300}
    return compile_choices(fn, args, {}, name="f", **usual | options)


def kernels(found: AutotuneChoices) -> dict[str, list[str]]:
    return {choice: [kernel.kind for kernel in graph.kernels or ()] for choice, graph in found.graphs.items()}


def struct(*shape: int, dtype: str = "float32") -> Any:
    jax = pytest.importorskip("jax")
    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype))


def jax_linear(x: Any, w: Any, b: Any) -> Any:
    import jax

    with jax.named_scope("up"):
        h = x @ w
    with jax.named_scope("act"):
        return jax.nn.gelu(h + b)


def test_a_jax_product_has_two_choices():
    found = choices(jax_linear, struct(512, 512), struct(512, 512), struct(512))
    assert list(found.graphs) == ["Triton GEMM", "cuBLAS"]
    triton, cublas = (graph.kernels[0].name for graph in found.graphs.values())
    assert "gemm_fusion" in triton and "gemm_fusion" not in cublas
    assert {graph.name for graph in found.graphs.values()} == {"f"}
    assert kernels(found)["cuBLAS"] != kernels(found)["Triton GEMM"]


@pytest.mark.full
def test_backward_and_lowered_products_have_two_choices():
    import jax

    x, w = struct(256, 256, dtype="bfloat16"), struct(256, 256, dtype="bfloat16")
    for found in (choices(lambda x, w: x @ w, x, w, grad=True), choices(jax.jit(lambda x, w: x @ w).lower(x, w))):
        names = {
            choice: [kernel.name for kernel in graph.kernels or () if is_product(kernel)]
            for choice, graph in found.graphs.items()
        }
        assert all("gemm_fusion" in name for name in names["Triton GEMM"])
        assert not any("gemm_fusion" in name for name in names["cuBLAS"])


def test_without_a_product_there_is_one_graph():
    import jax

    assert list(choices(jax.nn.gelu, struct(512, 512)).graphs) == [""]


def test_recorded_results_leave_one_graph(tmp_path: Path):
    """compare/targets/h200 holds the autotune results of this block at full precision."""
    import jax

    from xlafuse.blocks import matmul

    if targets.load("h200").xla_autotune_results(jax.__version__) is None:
        pytest.skip(f"the H200's results are recorded for jax 0.11.2, this is {jax.__version__}")
    inputs = {"a": struct(2048, 4096, dtype="bfloat16"), "b": struct(4096, 14336, dtype="bfloat16")}
    with jax.default_matmul_precision("highest"):
        assert list(choices(matmul.apply, inputs).graphs) == [""]
        (tmp_path / f"autotune-{jax.__version__}.textproto").write_text("\n")  # the user's own results, empty
        assert len(choices(matmul.apply, inputs, autotune=tmp_path).graphs) == 2


@pytest.mark.full
def test_inductor_choices_are_padding_and_templates():
    torch = pytest.importorskip("torch")

    def linear(x: Any, w: Any, b: Any) -> Any:
        return torch.relu(x @ w + b)

    odd = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1000, 777), (777, 999), (999,))]
    found = choices(torch.compile(linear, mode="max-autotune"), *odd)
    assert kernels(found) == {
        "ATen": ["gemm", "elementwise"], "ATen, padded": ["copy", "copy", "gemm", "elementwise"],
        "Triton GEMM": ["gemm"],
    }


def test_equal_calls_have_equal_digests():
    def at(scale: float) -> Any:
        return lambda x: x * scale

    x = struct(8)
    assert identify(at(2.0), (x,), {}).digest == identify(at(2.0), (x,), {}).digest
    different = [(at(3.0), (x,), {}), (at(2.0), (struct(9),), {}), (at(2.0), (), {"x": x}), (at(2.0), (2.0, x), {})]
    digests = {identify(fn, args, kwargs, framework="jax").digest for fn, args, kwargs in different}
    assert len(digests | {identify(at(2.0), (x,), {}).digest}) == 5
