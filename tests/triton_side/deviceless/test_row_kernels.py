"""Registers of kernels of long rows, compiled for an H200 without one."""

import pytest

pytest.importorskip("torch")

RECORD = """
from xlafuse.triton_side.kernels import {block} as module
specs = {{"x": ((256, {columns}), "{dtype}"), "weight": (({columns},), "{dtype}"), "bias": (({columns},), "{dtype}")}}
recorded = deviceless.record_call(module.apply, {{n: specs[n] for n in {names}}}, {attributes}, train={train})
print(json.dumps([launch.resources.spill_bytes for part in recorded.parts.values() for launch in part
                  if hasattr(launch, "artifacts")]))
"""
LAYERNORM = {"block": "layernorm", "names": ("x", "weight", "bias"), "attributes": {"eps": 1e-6}, "train": True}
SOFTMAX = {"block": "softmax", "names": ("x",), "attributes": {}, "train": False}


# A program's longest row of layernorm's gradient, and rows that two programs share; softmax's longest row in registers,
# and a looped one.
@pytest.mark.parametrize(
    ("kernel", "columns", "dtype"),
    [
        *((LAYERNORM, columns, dtype) for columns in (8192, 8208, 16384) for dtype in ("bfloat16", "float32")),
        (SOFTMAX, 32768, "bfloat16"), (SOFTMAX, 50257, "bfloat16"),
    ],
)
def test_long_rows_spill_no_registers(fake_gpu, kernel, columns: int, dtype: str) -> None:
    spills = fake_gpu.answer(RECORD.format(columns=columns, dtype=dtype, **kernel))
    assert spills and max(spills) <= 8


def test_rmsnorm_reads_8192_columns_with_as_many_warps_as_a_multiprocessor_has(fake_gpu) -> None:
    registers, warps = fake_gpu.answer("""
from xlafuse.triton_side.kernels import rmsnorm
specs = {"x": ((8192, 8192), "bfloat16"), "weight": ((8192,), "bfloat16")}
(launch,) = deviceless.record_call(rmsnorm.apply, specs, {"eps": 1e-6}, train=False).parts["forward"]
print(json.dumps([launch.resources.registers, launch.resources.num_warps]))
""")
    assert 65536 // (32 * warps * registers) * warps == 64
