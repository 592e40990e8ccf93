"""Resources of products of few rows, of few terms, and of float32, compiled for an H200 without one."""

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


FLOAT32 = """
from xlafuse.triton_side.kernels import attention, matmul, swiglu_mlp
torch.set_float32_matmul_precision("{precision}")
recorded = deviceless.record_call({module}.apply, {specs}, {attributes}, train=True)
found = [
    launch.artifacts for part in recorded.parts.values() for launch in part
    if launch.name in ("matmul_kernel", "attention_forward_kernel")
]
print(json.dumps([
    (each.resources.spill_bytes, each.texts["ptx"].count("wgmma.mma_async"),
     each.texts["ptx"].count("f32.tf32.tf32"), each.texts["ttgir"].count("ttg.local_alloc %")) for each in found
]))
"""
PRODUCT = {"a": ((8192, 768), "float32"), "b": ((768, 2048), "float32")}
MLP = {
    "x": ((8192, 768), "float32"), "norm_weight": ((768,), "float32"), "gate_weight": ((768, 2048), "float32"),
    "up_weight": ((768, 2048), "float32"), "down_weight": ((2048, 768), "float32"),
}
QKV = {name: ((8, 12, 1024, 64), "float32") for name in "qkv"}


@pytest.mark.parametrize(("precision", "products"), [("highest", 3), ("high", 1)])
@pytest.mark.parametrize(
    ("module", "specs", "attributes", "kernels"), [("matmul", PRODUCT, {}, 3), ("swiglu_mlp", MLP, {"eps": 1e-6}, 9)]
)
def test_large_float32_products_read_operands_where_tma_put_them(
    fake_gpu, module: str, specs: dict, attributes: dict, kernels: int, precision: str, products: int
) -> None:
    """A step is four times as long as an instruction. No operand passes through registers into shared memory."""
    code = FLOAT32.format(precision=precision, module=module, specs=specs, attributes=attributes)
    found = fake_gpu.answer(code)
    assert len(found) == kernels
    assert all(kernel == [0, 4 * products, 4 * products, 0] for kernel in found)


def test_float32_attention_uses_the_tensor_cores_of_hopper(fake_gpu) -> None:
    code = FLOAT32.format(precision="highest", module="attention", specs=QKV, attributes={})
    ((spilled, instructions, in_tf32, _),) = fake_gpu.answer(code)
    assert spilled == 0 and instructions == in_tf32 > 0
