"""`xlafuse run swiglu --with mine.py:fn`: a user's functions beside ours, checked against float64, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import xlafuse_process

from xlafuse.compare.plan.own_function import own_function
from xlafuse.compare.spec.blocks import BLOCKS

pytestmark = pytest.mark.slow
TORCH = """
import torch, triton
import triton.language as tl

def plain(gate, up):
    return torch.nn.functional.silu(gate) * up

@triton.jit
def kernel(gate_ptr, up_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + i, i < n).to(tl.float32)
    tl.store(y_ptr + i, gate * tl.sigmoid(gate) * tl.load(up_ptr + i, i < n).to(tl.float32), i < n)

def by_triton(gate, up):
    y = torch.empty_like(gate)
    kernel[(triton.cdiv(y.numel(), 1024),)](gate, up, y, y.numel(), BLOCK=1024)
    return y

def tripled(gate, d_y):
    return {"up": 3 * d_y * torch.nn.functional.silu(gate), "gate": 3 * d_y}
"""
JAX = """
import jax

def by_jax(inputs_gate, inputs_up):
    return jax.nn.silu(inputs_gate.astype("float32")).astype(inputs_gate.dtype) * inputs_up
"""


@pytest.mark.full
def test_functions_of_both_frameworks_become_rows(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TORCH)
    (tmp_path / "jaxed.py").write_text(JAX)

    def xlafuse(*words: str) -> str:
        done = xlafuse_process(*words, folder=tmp_path)
        assert done.returncode in (0, 1), done.stderr[-3000:]
        return done.stdout

    selected = ["swiglu", "--suite", "check", "--case", "odd", "--dtype", "bf16", "--direction", "train"]
    named = ("mine.py:plain", "mine.py:by_triton", "jaxed.py:by_jax")
    functions = [word for name in named for word in ("--with", name)]
    xlafuse("run", *selected, "-i", "library", "--target", "h200", "--out", "run", *functions)
    shown = ("inspect", "run", "--view", "times", "--json")
    rows = {row["implementation"]: row for row in json.loads(xlafuse(*shown))["rows"]}
    assert list(rows) == ["library", "plain", "by_triton", "by_jax"]
    xlafuse("run", "--resume", "--out", "run")  # tries the failed one again
    again = {row["implementation"]: row for row in json.loads(xlafuse(*shown))["rows"]}
    assert again["plain"] == rows["plain"] and again["by_triton"]["detail"] == rows["by_triton"]["detail"]
    assert rows["plain"]["max_error"] <= rows["plain"]["tolerance"]
    assert rows["by_jax"]["kernels"] > 0 and rows["by_jax"]["max_error"] <= rows["by_jax"]["tolerance"]
    assert rows["by_triton"]["status"] == "failed" and "--with-backward" in rows["by_triton"]["detail"]


ATTENTION = """
import math, torch

def causal(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    seen = torch.ones_like(scores).tril()
    return torch.softmax(scores.masked_fill(seen == 0, -math.inf), -1) @ v

def full(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v
"""


@pytest.mark.full
def test_a_function_of_one_kind_of_attention_is_checked_on_that_kind(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ATTENTION)
    functions = [word for name in ("causal", "full") for word in ("--with", f"mine.py:{name}")]
    xlafuse_process(
        "run", "attention", *functions, "-i", "causal,full", "--direction", "fwd", "--dtype", "fp32", "--size",
        "batch=1,heads=2,kv_heads=2,sequence=64,head_dim=32", "--target", "h200", "--out", "run", folder=tmp_path,
    )
    lines = [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text().splitlines()]
    rows = {row["implementation"]: row for row in lines}
    assert rows["causal"]["status"] == "compiled" and rows["causal"]["checked"]["device"]
    assert rows["full"]["status"] == "wrong"
    assert "CPU: case odd (" in rows["full"]["detail"] and "causal=1" in rows["full"]["detail"]


def test_pytorch_takes_the_gradient_that_its_user_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    own = own_function(BLOCKS["swiglu"], "mine.py:plain", "mine.py:tripled", tmp_path)
    gate, up = torch.randn(2, 3, 5).unbind()
    gate.requires_grad_(), up.requires_grad_()
    y = own.row().load()({"gate": gate, "up": up})["y"]
    assert torch.equal(y, torch.nn.functional.silu(gate) * up)
    dgate, dup = torch.autograd.grad(y.sum(), (gate, up))
    assert torch.equal(dgate, 3 * torch.ones_like(gate)) and torch.equal(dup, 3 * torch.nn.functional.silu(gate))
