"""`explain`, its variants, the plugin and `run --with` take the same functions, by the same names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.functions.arguments import parse_arguments
from xlafuse.compare.functions.names import resolve
from xlafuse.compare.plan.own_function import loaded, own_function
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.user.call import ExplainError
from xlafuse.compare.user.explain import identify

TORCH = """
import functools, torch

def plain(x): return torch.nn.functional.gelu(x)
def scaled(factor, x): return factor * torch.nn.functional.gelu(x)
def unnamed(x): return x * x

class Layer(torch.nn.Module):
    def forward(self, hidden): return torch.tanh(hidden)
    def other(self, x): return torch.tanh(x)

def make(): return Layer()
layer = Layer()
partial = functools.partial(scaled, 2)
anonymous = lambda x: torch.tanh(x)
compiled = torch.compile(plain)
compiled_layer = torch.compile(Layer())
def wrapped(*values): return plain(*values)
def wrapped_twice(*values, **options): return layer(*values, **options)
of_c = torch.tanh
scripted = torch.jit.script(Layer())

class Schedule:
    def forward(self, steps, rate): return steps
    def __call__(self, x): return torch.tanh(x)

schedule = Schedule()
number = 3
"""
JAX = """
import jax

def plain(x): return jax.nn.gelu(x)
def unnamed(x): return x * x
jitted = jax.jit(plain)

class Layer:
    def __call__(self, x): return jax.nn.gelu(x)

def make(): return Layer()
ufunc = jax.numpy.square
def wrapped(*values): return plain(*values)
lowered = jitted.lower(jax.ShapeDtypeStruct((4, 8), "float32"))
built = lowered.compile()
"""
EITHER = """
import jax, torch
def unclear(x): return x * x
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "torch_functions.py").write_text(TORCH)
    (folder / "jax_functions.py").write_text(JAX)
    (folder / "either_functions.py").write_text(EITHER)
    path = [*sys.path]
    sys.path.insert(0, str(folder))
    yield folder
    sys.path[:] = path


@pytest.mark.parametrize("by_file", [True, False], ids=["file", "module"])
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("own-torch", name) for name in ("plain", "unnamed", "layer", "layer.other", "make()", "partial")),
        *(("own-torch", name) for name in ("anonymous", "wrapped", "wrapped_twice", "of_c", "schedule")),
        *(("own-inductor", name) for name in ("compiled", "compiled_layer")),
        *(("xla", name) for name in ("plain", "unnamed", "jitted", "make()", "ufunc", "wrapped")),
    ],
)
def test_a_function_is_found_and_its_framework_known(folder: Path, backend: str, name: str, by_file: bool) -> None:
    framework = "jax" if backend == "xla" else "torch"
    module = f"{framework}_functions"
    named = f"{folder / module}.py:{name}" if by_file else f"{module}:{name}"
    args, kwargs = parse_arguments("f32[4,8]")
    assert identify(resolve(named), args, kwargs).framework == framework
    own = own_function(BLOCKS["gelu"], named, None, folder)
    assert (own.row().backend_name, own.row().name) == (backend, name.removesuffix("()").rpartition(".")[2])
    run, _ = loaded(own)
    x = importlib.import_module("jax.numpy" if framework == "jax" else framework).ones((4, 8))
    with torch.compiler.set_stance("force_eager"):  # a compile for the CPU takes seconds
        assert run({"x": x}, {})["y"].shape == x.shape


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch_functions.py:Layer", "class"),
        ("torch_functions.py:missing", "no .*missing"),
        ("torch_functions:nothing", "no .*nothing"),
        ("torch_functions:number", "int|3"),
        ("jax_functions:built", "[Cc]ompiled"),
        ("either_functions:unclear", "JAX from PyTorch.*: "),
    ],
)
def test_what_one_refuses_the_other_refuses_too(folder: Path, name: str, message: str) -> None:
    with pytest.raises((UsageError, ExplainError), match=message):
        identify(resolve(name if ".py" not in name else f"{folder}/{name}"), *parse_arguments("f32[4,8]"))
    with pytest.raises(UsageError, match=message):
        own_function(BLOCKS["gelu"], name, None, folder)


@pytest.mark.parametrize("name", ["jax_functions:lowered", "torch_functions:number"])
def test_what_cannot_be_called_is_no_gradient_either(folder: Path, name: str) -> None:
    for function, backward in ((name, None), ("torch_functions:plain", name)):
        with pytest.raises(UsageError, match=name.partition(":")[2]):
            own_function(BLOCKS["gelu"], function, backward, folder)


def test_a_scripted_module_is_a_row_that_cannot_travel(folder: Path) -> None:
    own_function(BLOCKS["gelu"], "torch_functions:scripted", None, folder)
    with pytest.raises(ExplainError, match="scripted|sent"):
        identify(resolve("torch_functions:scripted"), *parse_arguments("f32[4,8]"))
