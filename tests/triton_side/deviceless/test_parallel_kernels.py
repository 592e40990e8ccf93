"""Resources of the kernels of experts over several ranks, compiled for an H200 without one."""

import pytest

pytest.importorskip("torch")

RECORD = """
from xlafuse.triton_side.parallel import moe_kernels

def gradients(inputs):
    offsets = inputs["offsets"]
    one, _ = moe_kernels.launch_block_gradients(inputs["a"], inputs["b"], offsets)
    two, three = moe_kernels.launch_block_gradients(inputs["b"], inputs["a"], offsets, inputs["a2"])
    return {"one": one, "two": two, "three": three}

rows = ((16384, 2048), "bfloat16")
specs = {"a": rows, "a2": rows, "b": ((16384, 4096), "bfloat16"), "offsets": ((2, 5), "int32")}
recorded = deviceless.record_call(gradients, specs, {}, train=False)
print(json.dumps([launch.resources.spill_bytes for part in recorded.parts.values() for launch in part]))
"""


def test_gradients_of_the_experts_matrices_spill_no_registers(fake_gpu) -> None:
    assert fake_gpu.answer(RECORD) == [0, 0]
