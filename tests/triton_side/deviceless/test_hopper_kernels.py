"""The code of the Gluon kernels for an H200, compiled without one."""

import math
import re

import pytest
from full_marks import full

RECORD = """
from xlafuse.triton_side.kernels import {module} as module
heads, tokens = {heads}, 512
specs = {{
    name: (({shape}), "bfloat16") for name, count in (("q", heads), ("k", 2), ("v", 2))
}} | {{{more}}}
recorded = deviceless.record_call(module.apply, specs, {attributes}, train=True)
print(json.dumps([
    [launch.label, launch.resources.spill_bytes, launch.artifacts.texts["ptx"], [t.name for t in launch.reads],
     [t.name for t in launch.writes], launch.flops]
    for part in recorded.parts.values() for launch in part
]))
"""


def dense(head_dim: int, causal: int, window: int, heads: int = 4) -> str:
    return RECORD.format(
        module="attention", heads=heads, shape=f"1, count, tokens, {head_dim}", more="",
        attributes={"causal": causal, "window": window},
    )


def packed(head_dim: int) -> str:
    return RECORD.format(
        module="attention_packed", heads=4, shape=f"tokens, count, {head_dim}", more='"cu_seqlens": ((4,), "int32")',
        attributes={"longest": 256},
    )


@pytest.mark.parametrize(
    ("code", "spills", "in_turns"),
    [
        (dense(128, 1, 0), 0, 0), full(dense(64, 1, 0), 0, 2), full(dense(128, 0, 0), 0, 0),
        full(dense(64, 0, 0), 0, 0), full(dense(128, 1, 200), 0, 0), (dense(256, 1, 0), 32, 0),
        # Enough tiles of 256 queries for all multiprocessors, and heads that backward splits.
        full(dense(64, 0, 0, heads=64), 0, 4),
        (dense(128, 1, 0, heads=64), 0, 0), full(dense(128, 1, 200, heads=64), 0, 0),
        (dense(256, 1, 0, heads=64), 32, 0),
        # The place of a packed sequence takes registers.
        full(packed(128), 128, 0), (packed(64), 128, 2),
    ],
)
def test_attention_uses_the_tensor_cores_of_hopper(fake_gpu, code: str, spills: int, in_turns: int) -> None:
    forward, before, backward, *splits, after = fake_gpu.answer(code)
    for label, spill_bytes, ptx, *_ in (forward, backward):
        assert label.startswith("hopper_attention_")
        assert "wgmma.mma_async" in ptx and "setmaxnreg" in ptx and "cp.async.bulk.tensor" in ptx
        assert spill_bytes <= spills
    assert len(set(re.findall(r"bar\.sync (\d+), 256;", forward[2]))) == in_turns, "consumers that wait for their turn"
    assert {"q", "k", "v"} <= set(forward[3]) and {"out", "logsumexp2"} <= set(forward[4])
    assert {"out", "dout"} <= set(before[3]) and {"stats", "dq_sum"} <= set(before[4])
    assert {"q", "k", "v", "dout", "stats", "dq_sum"} <= set(backward[3])
    assert bool(splits) == ("heads, tokens = 64" in code)
    made = {"dk_sums", "dv_sums"} if splits else {"dk", "dv"}
    assert {"dq_sum", *made} <= set(backward[4])
    for _, spill_bytes, _, reads, writes, _ in splits:
        assert spill_bytes == 0 and reads == ["dk_sums", "dv_sums"] and writes == ["dk", "dv"]
    assert "dq_sum" in after[3] and "dq" in after[4]
    if forward[5] is not None:  # the lengths of packed sequences are data
        assert backward[5] == 2.5 * forward[5]


FP8_RECORD = """
from xlafuse.triton_side.kernels import matmul_fp8 as module
m, k, n = {sizes}
specs = {{"a": ((m, k), "float8_e4m3fn"), "b": ((n, k), "float8_e4m3fn"), "a_scale": ((), "float32"),
         "b_scale": ((), "float32")}}
recorded = deviceless.record_call(module.apply, specs, {{"kernels": "{kernels}"}}, train=False)
(launch,) = recorded.parts["forward"]
print(json.dumps([
    launch.label, launch.resources.spill_bytes, launch.artifacts.texts["ptx"], [t.name for t in launch.reads],
    [t.name for t in launch.writes], launch.flops
]))
"""


@pytest.mark.parametrize(
    ("kernels", "kernel"), [("hopper", "hopper_matmul_fp8_kernel"), ("portable", "matmul_fp8_kernel")]
)
def test_an_fp8_product_keeps_its_sums_in_registers(fake_gpu, kernels: str, kernel: str) -> None:
    sizes = (1000, 8192, 2000)  # two sums or more
    label, spill_bytes, ptx, reads, writes, flops = fake_gpu.answer(FP8_RECORD.format(sizes=sizes, kernels=kernels))
    assert label == kernel and spill_bytes == 0
    assert "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3" in ptx and "cp.async.bulk.tensor" in ptx
    assert ("setmaxnreg" in ptx) == (kernels == "hopper")
    assert reads == ["a", "b", "a_scale", "b_scale"] and writes == ["c"]
    assert flops == 2 * math.prod(sizes) + 1000 * 2000


def test_an_fp8_product_that_tma_cannot_store_is_refused(fake_gpu) -> None:
    with pytest.raises(RuntimeError, match="cannot take these operands: TMA reads and writes rows of whole 16 bytes"):
        fake_gpu.answer(FP8_RECORD.format(sizes=(1000, 8192, 1001), kernels="hopper"))
