"""A user's function becomes an implementation: its code tells the framework, its parameters how to call it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.plan.own_function import Arguments, arguments_of, by_name, call, own_function
from xlafuse.compare.spec.blocks import BLOCKS

ATTENTION, RMSNORM = BLOCKS["attention"], BLOCKS["rmsnorm"]
PLACE = "mine.py:fn"


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test import a module of its own, by the same name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield
    sys.modules.pop("mine", None)


def named(folder: Path, text: str, name: str = "fn") -> str:
    (folder / "mine.py").write_text(text)
    return f"mine.py:{name}"


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("import torch\ndef fn(x, weight, eps): return torch.sqrt(x)", "torch"),
        ("import triton\nimport torch.nn.functional as F\ndef fn(x, weight, eps): return F.gelu(x)", "torch"),
        ("from jax import numpy as jnp\nimport torch\ndef fn(x, weight): return jnp.sqrt(x)", "jax"),
        ("import torch, jax\ndef part(x): return jax.nn.gelu(x)\ndef fn(x, weight): return part(x)", "jax"),
        ("import torch, jax\nfn = jax.jit(lambda x, weight: x)", "jax"),
        ("import torch\ndef fn(x, weight): return x * weight", "torch"),
    ],
)
def test_the_framework_is_that_of_the_names_it_uses(tmp_path: Path, text: str, framework: str) -> None:
    found = own_function(RMSNORM, named(tmp_path, text), None, tmp_path)
    assert found.framework == framework and found.row().name == "fn"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch, jax\ndef fn(x, weight): return x", "JAX from PyTorch"),
        ("def fn(x, weight): return x", "JAX from PyTorch"),
        ("import torch\ndef other(x): return x", "'fn'"),
        ("import torch\nclass fn(torch.nn.Module): pass", "is a class"),
        ("import torch\ndef fn(x): return x", "x, weight"),
        ("import torch\ndef fn(x, weight, scale): return x", "eps by name"),
        ("import torch\ndef fn(", "SyntaxError"),
    ],
)
def test_what_cannot_become_a_row_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        own_function(RMSNORM, named(tmp_path, text), None, tmp_path)


def test_a_missing_file_and_a_taken_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        own_function(RMSNORM, "missing.py:fn", None, tmp_path)
    with pytest.raises(UsageError, match="another name"):
        own_function(RMSNORM, named(tmp_path, "import torch\ndef eager(x, weight): return x", "eager"), None, tmp_path)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda v, k, q: None, Arguments((), ("q", "k", "v"))),
        (lambda q, k, v, *, causal: None, Arguments((), ("q", "k", "v", "causal"))),
        (lambda query, key, value: None, Arguments(("q", "k", "v"), ())),
        (lambda query, key, value, dropout=0.0: None, Arguments(("q", "k", "v"), ())),
        (lambda a, b, c, causal=True: None, Arguments(("q", "k", "v"), ("causal",))),
        (lambda q, k, v, /, causal=True: None, Arguments(("q", "k", "v"), ("causal",))),
        (lambda q, /, k, v: None, Arguments(("q", "k", "v"), ())),
        (lambda q, k, v, /, **more: None, Arguments(("q", "k", "v"), ("causal", "window"))),
    ],
)
def test_inputs_go_by_name_or_in_order(function, arguments: Arguments) -> None:
    assert "causal" in ATTENTION.attributes or "causal" in ATTENTION.parameters
    assert arguments_of(inspect.signature(function), PLACE, ATTENTION) == arguments


@given(st.permutations(["x", "weight", "eps"]), st.integers(0, 3))
def test_each_value_reaches_the_parameter_of_its_name(order: list[str], keyword_only: int) -> None:
    names = {}
    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    kinds = [either] * (3 - keyword_only) + [keyword] * keyword_only

    def fn(*values, **keywords):
        names.update(keywords)

    signature = inspect.Signature([inspect.Parameter(name, kind) for name, kind in zip(order, kinds, strict=True)])
    arguments = arguments_of(signature, PLACE, RMSNORM)
    call(fn, arguments, {"x": 1, "weight": 2}, {"eps": 3})
    assert names == {"x": 1, "weight": 2, "eps": 3}


def test_results_come_in_order_or_by_name() -> None:
    assert by_name(7, ["y"], PLACE) == {"y": 7}
    assert by_name((1, 2), ["y", "loss"], PLACE) == {"y": 1, "loss": 2}
    assert by_name({"loss": 2, "y": 1}, ["y", "loss"], PLACE) == {"y": 1, "loss": 2}
    for wrong in ((1, 2, 3), {"y": 1}, 7):
        with pytest.raises(UsageError, match="y, loss"):
            by_name(wrong, ["y", "loss"], PLACE)
