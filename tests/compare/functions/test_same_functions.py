"""`explain`, its variants, the plugin and `run --with` take the same functions, by the same names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xlafuse.compare.functions.arguments import parse_arguments
from xlafuse.compare.functions.names import resolve
from xlafuse.compare.plan.own_function import own_function
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.user.explain import identify

TORCH = """
import functools, torch

def plain(x): return torch.nn.functional.gelu(x)
def scaled(factor, x): return factor * torch.nn.functional.gelu(x)
def unnamed(x): return x * x

class Layer(torch.nn.Module):
    def forward(self, x): return torch.tanh(x)
    def other(self, x): return torch.tanh(x)

def make(): return Layer()
layer = Layer()
partial = functools.partial(scaled, 2)
anonymous = lambda x: torch.tanh(x)
compiled = torch.compile(plain)
"""
JAX = """
import jax

def plain(x): return jax.nn.gelu(x)
def unnamed(x): return x * x
jitted = jax.jit(plain)

class Layer:
    def __call__(self, x): return jax.nn.gelu(x)

def make(): return Layer()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "torch_functions.py").write_text(TORCH)
    (folder / "jax_functions.py").write_text(JAX)
    path = [*sys.path]
    sys.path.insert(0, str(folder))
    yield folder
    sys.path[:] = path


@pytest.mark.parametrize("by_file", [True, False], ids=["file", "module"])
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("own-torch", name) for name in ("plain", "unnamed", "layer", "layer.other", "make()", "partial")),
        ("own-torch", "anonymous"),
        ("own-inductor", "compiled"),
        *(("xla", name) for name in ("plain", "unnamed", "jitted", "make()")),
    ],
)
def test_a_function_is_found_and_its_framework_known(folder: Path, backend: str, name: str, by_file: bool) -> None:
    framework = "jax" if backend == "xla" else "torch"
    module = f"{framework}_functions"
    named = f"{folder / module}.py:{name}" if by_file else f"{module}:{name}"
    args, kwargs = parse_arguments("f32[4,8]")
    assert identify(resolve(named), args, kwargs).framework == framework
    row = own_function(BLOCKS["gelu"], named, None, folder).row()
    assert (row.backend_name, row.name) == (backend, name.removesuffix("()").rpartition(".")[2])


@pytest.mark.parametrize("name", ["torch_functions.py:Layer", "torch_functions.py:missing", "torch_functions:nothing"])
def test_what_one_refuses_the_other_refuses_too(folder: Path, name: str) -> None:
    with pytest.raises(Exception, match="class|no .*(missing|nothing)"):
        identify(resolve(name if ":nothing" in name else f"{folder}/{name}"), *parse_arguments("f32[4,8]"))
    with pytest.raises(Exception, match="class|no .*(missing|nothing)"):
        own_function(BLOCKS["gelu"], name, None, folder)
