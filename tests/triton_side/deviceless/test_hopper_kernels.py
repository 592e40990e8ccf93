"""The code of the Gluon kernels for an H200, compiled without one."""

import pytest

RECORD = """
from triton_side.kernels import {module} as module
heads, tokens = 4, 512
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


def dense(head_dim: int, causal: int, window: int) -> str:
    return RECORD.format(
        module="attention", shape=f"1, count, tokens, {head_dim}", more="",
        attributes={"causal": causal, "window": window},
    )


def packed(head_dim: int) -> str:
    return RECORD.format(
        module="attention_packed", shape=f"tokens, count, {head_dim}", more='"cu_seqlens": ((4,), "int32")',
        attributes={"longest": 256},
    )


@pytest.mark.parametrize(
    ("code", "spills"),
    [
        (dense(128, 1, 0), 0), (dense(64, 1, 0), 0), (dense(128, 0, 0), 0), (dense(64, 0, 0), 0),
        (dense(128, 1, 200), 0), (dense(256, 1, 0), 32),
        # The place of a packed sequence takes registers.
        (packed(128), 128), (packed(64), 128),
    ],
)
def test_attention_uses_the_tensor_cores_of_hopper(fake_gpu, code: str, spills: int) -> None:
    forward, before, backward, after = fake_gpu.answer(code)
    for label, spill_bytes, ptx, *_ in (forward, backward):
        assert label.startswith("hopper_attention_")
        assert "wgmma.mma_async" in ptx and "setmaxnreg" in ptx and "cp.async.bulk.tensor" in ptx
        assert spill_bytes <= spills
    assert {"q", "k", "v"} <= set(forward[3]) and {"out", "logsumexp2"} <= set(forward[4])
    assert {"out", "dout"} <= set(before[3]) and {"stats", "dq_sum"} <= set(before[4])
    assert {"q", "k", "v", "dout", "stats", "dq_sum"} <= set(backward[3])
    assert {"dq_sum", "dk", "dv"} <= set(backward[4])
    assert "dq_sum" in after[3] and "dq" in after[4]
    if forward[5] is not None:  # the lengths of packed sequences are data
        assert backward[5] == 2.5 * forward[5]
