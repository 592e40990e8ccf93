"""Memory that hand-written launchers allocate, counted without a GPU on fake H200 tensors and without launches.

Triton's own memory for a kernel's tensor descriptors is not counted.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROPERTIES = ROOT / "compare/targets/h200/cuda_device_properties.json"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build fake_cuda_hooks.cpp"),
]

COUNT = """
import json, sys
from functools import partial
from xlafuse.triton_side.deviceless import for_target as deviceless
deviceless.activate(json.load(open(sys.argv[1])))
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction
from xlafuse.triton_side.kernels import attention, linear_cross_entropy

launched = []
JITFunction.run = lambda self, *args, **kwargs: launched.append(self.fn.__name__)

class Allocations(TorchDispatchMode):
    # The storages that exist after each operation; a reused address is another storage.
    def __init__(self, given):
        super().__init__()
        self.storages, self.living = [], []
        self.given = [StorageWeakRef(x.untyped_storage()) for x in given]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(results):
            if isinstance(x, torch.Tensor) and not self.known(x):
                self.storages.append((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()))
        self.living.append([i for i, (storage, _) in enumerate(self.storages) if not storage.expired()])
        return results

    def known(self, x):
        known = [*self.given, *(storage for storage, _ in self.storages)]
        return any(s.cdata == x.untyped_storage()._cdata and not s.expired() for s in known)

    def beside(self, results):
        own = {x.untyped_storage()._cdata for x in results}
        sizes = [0 if s.cdata in own and not s.expired() else size for s, size in self.storages]
        return {
            "peak": max(sum(sizes[i] for i in living) for living in self.living),
            "largest": max(size for _, size in self.storages), "launches": list(launched),
        }

def count(function, train, **shapes):
    launched.clear()
    with deviceless.fake_mode():
        inputs = {
            name: torch.empty(shape, dtype=torch.int32 if name == "labels" else torch.bfloat16, device="cuda")
            for name, shape in shapes.items()
        }
        leaves = [x.requires_grad_(train) for x in inputs.values() if x.is_floating_point()]
        cotangents = []
        with torch.autograd.set_multithreading_enabled(False), Allocations(inputs.values()) as allocations:
            y = function(*inputs.values())
            results = [y]
            if train:
                cotangents.append(torch.empty_like(y))
                results += torch.autograd.grad(y, leaves, cotangents)
        return allocations.beside(results + cotangents)

def loss(h, w, labels):
    return linear_cross_entropy.linear_cross_entropy(h, w, labels, 0.1, 1e-4)

tokens, classes, width = 8192, 128256, 4096
out = {"loss": [], "portable": [], "hopper": []}
for train in (False, True):
    out["loss"].append(count(loss, train, h=(tokens, width), w=(classes, width), labels=(tokens,)))
    for kernels in ("portable", "hopper"):
        attend = partial(attention.attention, kernels=kernels)
        out[kernels].append([
            count(attend, train, q=(1, 32, s, 128), k=(1, 8, s, 128), v=(1, 8, s, 128)) for s in (4096, 8192, 16384)
        ])
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def counted() -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNT, str(PROPERTIES)]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_projections_loss_never_stores_all_logits(counted: Any) -> None:
    """The logits of 8192 tokens and 128,256 classes take 2.1 GB in bfloat16; w's gradient, `largest`, takes 1.05 GB."""
    for train, found in zip((False, True), counted["loss"], strict=True):
        assert ("dlogits_kernel" in found["launches"]) == train and "projected_statistics_kernel" in found["launches"]
        assert found["peak"] < 1e9, found
        assert found["largest"] < 8192 * 128256 * 2


def test_attentions_extra_memory_grows_linearly_with_the_sequence(counted: Any) -> None:
    """Forward needs no extra memory, training two float32 numbers per row; scores are never stored.

    The kernels for Hopper GPUs have a counter of 8 bytes, and add dq in float32 in training.
    """
    for kernels, counter, numbers in (("portable", 0, 2), ("hopper", 8, 3 + 128)):
        forward, train = counted[kernels]
        assert [found["peak"] for found in forward] == [counter] * 3
        assert [found["peak"] for found in train] == [4 * numbers * 32 * s for s in (4096, 8192, 16384)]
        for found, s in zip(train, (4096, 8192, 16384), strict=True):
            assert found["launches"][0].endswith("attention_forward_kernel") and len(found["launches"]) == 4
            assert found["largest"] == (4 if kernels == "hopper" else 2) * 32 * s * 128  # the sum of dq; out, or dq
