import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES_OF_COMPOSITIONS, is_accurate, random, with_gradients

from xlafuse.triton_side.blocks import gpt2_block as plain_block
from xlafuse.triton_side.blocks.threefry import uniforms
from xlafuse.triton_side.kernels import gpt2_block

NAMES = ("x", *gpt2_block.WEIGHTS)
WIDTH, HEADS, HEAD_DIM, HIDDEN = 37, 2, 16, 67
ATTENDED = HEADS * HEAD_DIM
SHAPES = {
    "w_qkv": (WIDTH, 3 * ATTENDED), "b_qkv": (3 * ATTENDED,), "w_o": (ATTENDED, WIDTH), "w_up": (WIDTH, HIDDEN),
    "b_up": (HIDDEN,), "w_down": (HIDDEN, WIDTH),
}
ATTRIBUTES = {"heads": HEADS, "p": 0.25, "eps": 1e-5}
SEED = torch.tensor([[3, -5], [7, 11]], dtype=torch.int32, device=DEVICE)


def tensors(batch: int, sequence: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return x, the weights and dy."""

    def weight(name: str, seed: int) -> torch.Tensor:
        shape = SHAPES.get(name, (WIDTH,))
        values = random(*shape, seed=seed) * (shape[0] ** -0.5 if len(shape) > 1 else 0.1)
        return (values + name.endswith("norm_weight")).to(dtype)

    x, dy = (random(batch, sequence, WIDTH, dtype=dtype, seed=seed) for seed in (100, 101))
    return [x, *(weight(name, seed) for seed, name in enumerate(gpt2_block.WEIGHTS)), dy]


def applied(apply):
    """Return the block as a function of x and its weights."""
    return lambda *inputs: apply(dict(zip(NAMES, inputs, strict=True)) | {"seed": SEED}, **ATTRIBUTES)["y"]


def exact(*inputs: torch.Tensor) -> torch.Tensor:
    """Return the plain block in the inputs' dtype throughout; it normally computes some steps in float32."""
    i = dict(zip(NAMES, inputs, strict=True))
    batch, sequence, _ = i["x"].shape
    x = i["x"].flatten(0, 1)

    def normalised(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = i[f"{name}_weight"], i[f"{name}_bias"]
        return torch.nn.functional.layer_norm(x, (WIDTH,), weight, bias, ATTRIBUTES["eps"])

    def dropped(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return x * (uniforms(*x.shape, seed) >= 65536 // 4) / 0.75

    qkv = normalised(x, "attention_norm") @ i["w_qkv"] + i["b_qkv"]
    q, k, v = qkv.view(batch, sequence, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x1 = x + dropped(attended.transpose(1, 2).reshape(len(x), -1) @ i["w_o"] + i["b_o"], SEED[0])
    up = normalised(x1, "mlp_norm") @ i["w_up"] + i["b_up"]
    down = torch.nn.functional.gelu(up, approximate="tanh") @ i["w_down"] + i["b_down"]
    return (x1 + dropped(down, SEED[1])).view(i["x"].shape)


def agrees(function, *inputs: torch.Tensor, dy: torch.Tensor) -> bool:
    got = with_gradients(function, *inputs, dy=dy)
    low = with_gradients(applied(plain_block.apply), *inputs, dy=dy)
    reference = with_gradients(exact, *(x.double() for x in inputs), dy=dy.double())
    return all(is_accurate(*three) for three in zip(got, low, reference, strict=True))


@pytest.mark.parametrize("dtype", DTYPES_OF_COMPOSITIONS)
def test_agrees_with_float64(dtype: torch.dtype) -> None:
    *inputs, dy = tensors(2, 19, dtype)
    assert agrees(applied(gpt2_block.apply), *inputs, dy=dy)


def test_strides() -> None:
    *inputs, dy = tensors(2, 5)
    apart = (x.mT.contiguous().mT if x.ndim > 1 else x for x in inputs)
    assert agrees(applied(gpt2_block.apply), *apart, dy=random(1, 1, WIDTH, seed=9).expand_as(dy))


def test_inference_saves_nothing() -> None:
    *inputs, _ = tensors(1, 5)
    assert applied(gpt2_block.apply)(*inputs).grad_fn is None


def test_rejects() -> None:
    x, *weights, _ = tensors(2, 5)
    params = dict(zip(gpt2_block.WEIGHTS, weights, strict=True))

    def call(x=x, seed=SEED, attributes=ATTRIBUTES, **changed):
        return gpt2_block.gpt2_block(x, params | changed, seed, **attributes)

    with pytest.raises(ValueError, match=r"x must be \[batch, sequence, width\], .*, got \[5, 37\]"):
        call(x[0])
    with pytest.raises(TypeError, match="seed must be int32, got torch.int64"):
        call(seed=SEED.long())
    with pytest.raises(ValueError, match=r"seed must be \[2, 2\] on .*, got shape \[2\]"):
        call(seed=SEED[0])
    with pytest.raises(ValueError, match=r"p must be at least 0 .* got 1"):
        call(attributes=ATTRIBUTES | {"p": 1})
    with pytest.raises(ValueError, match=r"w_qkv must have 3 \* 4 heads of .* columns, got 96"):
        call(attributes=ATTRIBUTES | {"heads": 4})
    with pytest.raises(ValueError, match=r"the weights must fit x .*expected .*'b_down': \[37\]"):
        call(b_down=params["b_down"][:5])
