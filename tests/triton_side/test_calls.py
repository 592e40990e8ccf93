"""Calls as users write them, compiled for a GPU that is not there; in a process that pretends to have it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROPERTIES = Path(__file__).parents[2] / "compare" / "targets" / "h200" / "cuda_device_properties.json"
PROLOGUE = f"""
import json
import os
from triton_side import deviceless
deviceless.activate(json.load(open({str(PROPERTIES)!r})))
import torch
import torch.nn.functional as F
from triton_side import calls
factory = calls.Factory()
def tensor(*shape, stride=None, dtype="bfloat16", **more):
    stride = stride or torch.empty(shape, device="meta").stride()
    return factory.tensor(calls.TensorLike(shape, tuple(stride), dtype, **more))
def compiled(function, *args, train=False, **kwargs):
    return calls.compile_call(function, args, kwargs, factory, train=train)
"""


def run(program: str) -> object:
    """What the program prints as JSON."""
    code = PROLOGUE + textwrap.dedent(program)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment)
    if "Unsupported" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_after_a_graph_break_the_rest_is_compiled_both_ways():
    found = run("""
        def function(x, weight, *, scale):
            hidden = torch.relu(x @ weight) * scale
            torch._dynamo.graph_break()
            return torch.softmax(hidden, -1)
        captured = compiled(function, tensor(64, 128), tensor(128, 256), scale=3.0, train=True)
        print(json.dumps([[graph.part for graph in captured.graphs], len(captured.breaks)]))
    """)
    assert found == [["forward", "forward", "backward", "backward"], 1]


def test_requires_grad_decides_what_is_differentiated():
    found = run("""
        def gemms(*args):
            captured = compiled(lambda x, weight: (x @ weight).relu(), *args, train=True)
            return sum(kernel.kind == "gemm" for kernel in captured.kernels if kernel.part == "backward")
        weight = tensor(128, 256, requires_grad=True, is_parameter=True)
        print(json.dumps([gemms(tensor(64, 128), weight), gemms(tensor(64, 128), tensor(128, 256))]))
    """)
    assert found == [1, 2]


def test_the_attention_kernel_is_one_that_takes_the_call():
    found = run("""
        def attention(q, k, v, mask=None):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        def plain(q, k, v, mask):
            return torch.softmax(q @ k.transpose(-1, -2) / 8 + mask, -1) @ v
        def names(*args):
            return [kernel.name.split(".")[-2] for kernel in compiled(*args).kernels if kernel.kind == "attention"]
        q, mask, w = tensor(2, 4, 64, 64), tensor(2, 1, 64, 64), tensor(2, 4, 64, 64, dtype="float32")
        cases = [(attention, q, q, q), (attention, q, q, q, mask), (attention, w, w, w), (plain, q, q, q, mask)]
        print(json.dumps([names(*call) for call in cases]))
    """)
    flash, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    assert found == [[flash], [efficient], [efficient], [efficient]]
