import math

import pytest
import torch
from float64_reference import attributes_of, case_of, inputs_of
from row_kernel_checks import DEVICE, random

from xlafuse.triton_side.kernels import decoder_block, transformer_layer

CASE = case_of("decoder_block", "float32", sequence=7)


def drawn() -> dict[str, torch.Tensor]:
    return {name: x.to(DEVICE) for name, x in inputs_of(CASE).items()}


def applied(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return decoder_block.apply(inputs, **attributes_of(CASE))["y"]


def test_later_tokens_are_invisible() -> None:
    inputs = drawn()
    y = applied(inputs)
    inputs["x"][:, 4:] += 1
    changed = applied(inputs)
    assert torch.equal(y[:, :4], changed[:, :4]) and not torch.equal(y[:, 4:], changed[:, 4:])


def test_training_saves_each_intermediate_once() -> None:
    inputs, sizes = drawn(), CASE.sizes
    inputs["x"].requires_grad_()
    y = applied(inputs)  # torch 2.11 frees the graph with it
    saved = y.grad_fn.next_functions[0][0].saved_tensors
    tokens, width, heads = sizes["batch"] * sizes["sequence"], sizes["width"], (sizes["batch"], sizes["heads"], 7)
    assert [tuple(x.shape) for x in saved] == [
        (tokens, width), (2, 7), *(tuple(inputs[name].shape) for name in decoder_block.WEIGHTS),
        (tokens, width), (tokens,), (tokens, sizes["qkv"]), (tokens, sizes["attended"]), heads,
        (tokens, width), (tokens, width), (tokens,), (tokens, sizes["hidden"]), (tokens, sizes["hidden"]),
    ]


def test_autocast_is_refused() -> None:
    with torch.autocast(DEVICE), pytest.raises(RuntimeError, match="enabled=False"):
        applied(drawn())


def test_attention_to_a_lone_token_launches_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton does not compile this kernel for an H200 if heads share keys."""
    monkeypatch.setattr(transformer_layer.attention, "launch_dk_dv", None)
    monkeypatch.setattr(transformer_layer.attention.hopper_backward, "launch_backward", None)
    q, k, v, dout = (random(2, heads, 1, 16, seed=i) for i, heads in enumerate((4, 2, 2, 4)))
    merged, logsumexp2 = transformer_layer.attention_forward(q, k, v, True)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    transformer_layer.attention_backward(q, k, v, merged, logsumexp2, dout.reshape(2, 64), (dq, dk, dv))
    assert not dq.any() and not dk.any()
    torch.testing.assert_close(dv, dout.view(2, 2, 2, 1, 16).sum(2))
