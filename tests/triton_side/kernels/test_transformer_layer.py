"""A layer's products, with our epilogue and with cuBLAS and a second kernel, and the choice between them."""

import pytest
import torch
from row_kernel_checks import is_accurate, random

from xlafuse.triton_side.calls.declare import forward
from xlafuse.triton_side.kernels import transformer_layer

SUM = (forward("dot", "down"), forward("add", "residual"))
# A tile of 128 x 256, and rows that TMA cannot read.
SHAPES = [(128, 40, 256), (19, 33, 67)]


def operands(rows: int, inner: int, columns: int) -> list[torch.Tensor]:
    shapes = (rows, inner), (inner, columns), (inner, columns), (rows, columns), (columns,)
    return [random(*shape, dtype=torch.float16, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that records each choice (True for our kernel) on a GPU of one multiprocessor."""
    found: list[bool] = []
    decide = transformer_layer.fused_epilogue_wins
    monkeypatch.setattr(transformer_layer, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(transformer_layer, "fused_epilogue_wins", lambda a, b: found.append(decide(a, b)) or found[-1])
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_gelu_agree_either_way(shape: tuple[int, int, int], ours: list[bool]) -> None:
    a, b, _, residual, bias = operands(*shape)
    before = residual.clone()

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")

    total = transformer_layer.product_plus_residual(a, b, residual, SUM, c_ptr="y")
    act, pre = transformer_layer.product_bias_gelu(a, b, bias, True)
    alone, nothing = transformer_layer.product_bias_gelu(a, b, bias, False)
    assert ours == [shape == SHAPES[0]] * 3
    assert torch.equal(residual, before) and nothing is None and torch.equal(alone, act)
    exact = a.double() @ b.double()
    assert is_accurate(total, a @ b + residual, exact + residual)
    assert is_accurate(pre, a @ b + bias, exact + bias)
    assert is_accurate(act, gelu(a @ b + bias), gelu(exact + bias))


@pytest.mark.parametrize("shape", SHAPES)
def test_gate_and_up(shape: tuple[int, int, int]) -> None:
    h, w_gate, w_up, *_ = operands(*shape)
    act, gate, up = transformer_layer.gate_up_activation(h, w_gate, w_up, True)
    assert torch.equal(gate, h @ w_gate) and torch.equal(up, h @ w_up)
    exact = torch.nn.functional.silu(h.double() @ w_gate.double()) * (h.double() @ w_up.double())
    assert is_accurate(act, torch.nn.functional.silu(h @ w_gate) * (h @ w_up), exact)
    alone, *nothing = transformer_layer.gate_up_activation(h, w_gate, w_up, False)
    assert torch.equal(alone, act) and nothing == [None, None]


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "dtype", "fused_epilogue_wins"),
    [
        (8192, 14336, 4096, torch.bfloat16, True), (8192, 8192, 2048, torch.float16, True),
        (2048, 14336, 4096, torch.bfloat16, True), (4096, 2816, 1024, torch.bfloat16, True),
        (8192, 768, 3072, torch.bfloat16, True), (8192, 1600, 6400, torch.float16, True),
        (8192, 2048, 768, torch.float16, False), (1, 14336, 4096, torch.bfloat16, False),
        (1, 4096, 64 * 132, torch.bfloat16, False),
        (257, 1021, 509, torch.float16, False), (8192, 2048, 4096, torch.float32, False),
    ],
)
def test_the_faster_measured_implementation_is_chosen(
    rows: int, inner: int, columns: int, dtype: torch.dtype, fused_epilogue_wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module's table for an H200, and one row with as many tiles as multiprocessors."""
    monkeypatch.setattr(transformer_layer, "multiprocessors", lambda device: 132)
    a, b = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((rows, inner), (inner, columns)))
    assert transformer_layer.fused_epilogue_wins(a, b) == fused_epilogue_wins
