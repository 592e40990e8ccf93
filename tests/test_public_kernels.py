"""The short names of the hand-written kernels: all of them, imported at first use, and callable."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from xlafuse.kernels import pallas, triton

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {triton: ROOT / "triton_side" / "kernels", pallas: ROOT / "xlafuse" / "pallas"}
PARTS = {"column_sums"}  # of other kernels


@pytest.mark.parametrize("module", FOLDERS, ids=lambda module: module.__name__)
def test_every_kernel_has_a_public_name(module: ModuleType) -> None:
    """A kernel's file has a function of its name."""
    files = {file.stem: ast.parse(file.read_text()).body for file in FOLDERS[module].glob("*.py")}
    named = {
        name for name, body in files.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == name for node in body)
    }
    assert set(dir(module)) == named - PARTS


@pytest.mark.parametrize("name", triton.NAMES)
def test_a_triton_kernel_is_a_function_of_tensors(name: str) -> None:
    pytest.importorskip("triton")
    function = getattr(triton, name)
    assert function.__name__ == name and function.__module__ == f"xlafuse.triton_side.kernels.{name}"
    kinds = [parameter.annotation for parameter in inspect.signature(function).parameters.values()]
    assert "Tensor" in str(kinds[0]) and function.__doc__


@pytest.mark.parametrize("name", pallas.NAMES)
def test_a_pallas_kernel_is_a_function_of_arrays(name: str) -> None:
    jax = pytest.importorskip("jax")
    function = getattr(pallas, name)
    assert function.__name__ == name and function.__module__ == f"xlafuse.pallas.{name}"
    assert next(iter(inspect.signature(function).parameters.values())).annotation is jax.Array


def test_triton_kernels_are_called_with_tensors() -> None:
    torch = pytest.importorskip("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(1, 4, 16, 16, device=device, requires_grad=True)
    k, v = torch.randn(2, 1, 2, 16, 16, device=device)
    out = triton.attention(q, k, v, causal=True)
    wide = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, *wide, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    out.sum().backward()
    assert q.grad.shape == q.shape
    x = torch.randn(3, 40, device=device)
    torch.testing.assert_close(triton.softmax(x), x.softmax(1))


def test_a_caller_of_triton_kernels_may_ask_for_ieee_products() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from xlafuse.triton_side.kernels.shared.tiles import product_precision

    assert torch.get_float32_matmul_precision() == "highest"
    with triton.ieee_products():
        assert product_precision(torch.float32) == "ieee"
    assert product_precision(torch.float32) == "tf32x3"


def test_pallas_kernels_are_called_with_arrays() -> None:
    jax = pytest.importorskip("jax")
    q, kv = (jax.ShapeDtypeStruct((1, heads, 128, 64), "bfloat16") for heads in (4, 2))

    def squared(q: Any, k: Any, v: Any) -> Any:
        return (pallas.attention(q, k, v, True).astype("float32") ** 2).sum()

    assert jax.eval_shape(pallas.attention, q, kv, kv).shape == q.shape
    if jax.__version_info__ < (0, 11):
        pytest.skip("the backward kernels of Pallas need jax 0.11")
    gradients = jax.eval_shape(jax.grad(squared, argnums=(0, 1)), q, kv, kv)
    assert [gradient.shape for gradient in gradients] == [q.shape, kv.shape]


def test_a_name_is_imported_at_its_first_use() -> None:
    program = "import sys, xlafuse.kernels.triton, xlafuse.kernels.pallas; print({'torch', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("module", FOLDERS, ids=lambda module: module.__name__)
def test_an_unknown_kernel_is_an_error(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match="no kernel 'attentio'; it has .*attention"):
        _ = module.attentio
