"""A user's backward function as the gradient of the user's forward function, for PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Function = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


def differentiable(
    run: Function, differentiate: Function, wanted: Sequence[str], outputs: Sequence[str]
) -> Callable[..., dict[str, torch.Tensor]]:
    """Return `run` with the gradients of the inputs `wanted` by `differentiate`.

    run: inputs and attributes -> outputs by name. differentiate: inputs, outputs y, cotangents d_y, and attributes ->
    gradients by input.
    """

    def apply(inputs: Mapping[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
        names = list(inputs)

        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
                found = run(dict(zip(names, arrays, strict=True)), attributes)
                ctx.save_for_backward(*arrays, *found.values())
                return tuple(found.values())

            @staticmethod
            def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
                values = dict(zip([*names, *outputs], ctx.saved_tensors, strict=True))
                values |= {f"d_{name}": array for name, array in zip(outputs, cotangents, strict=True)}
                gradients = differentiate(values, attributes)
                return tuple(gradients[name] if name in wanted else None for name in names)

        return dict(zip(outputs, Own.apply(*inputs.values()), strict=True))

    return apply
