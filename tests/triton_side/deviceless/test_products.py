"""Resources of products of few rows and few terms, compiled for an H200 without one."""

import pytest

pytest.importorskip("torch")

RECORD = """
from xlafuse.triton_side.kernels import linear
specs = {{"x": (({rows}, 4096), "{dtype}"), "weight": ((4096, 4096), "{dtype}"), "bias": ((4096,), "{dtype}")}}
recorded = deviceless.record_call(linear.apply, specs, {{}}, train=True)
print(json.dumps([(launch.resources.registers, launch.resources.spill_bytes, launch.resources.shared_bytes)
                  for part in recorded.parts.values() for launch in part]))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_a_linear_layer_of_few_rows_has_three_kernels_without_spills(fake_gpu, rows: int, dtype: str) -> None:
    """Four programs of dweight share a multiprocessor's 65,536 registers and 227 KiB; more rows have one program."""
    product, dx, dweight = fake_gpu.answer(RECORD.format(rows=rows, dtype=dtype))
    assert product[1] == dx[1] == dweight[1] == 0
    registers, _, shared = dweight
    assert rows == 64 or (4 * 128 * registers <= 65536 and 4 * (shared + 1024) <= 227 * 1024)
