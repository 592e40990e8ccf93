"""A user's function of PyTorch as an implementation, with autograd's gradient or the user's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...base.usage import UsageError
from ...functions.names import is_users
from ...plan.own_function import Function, differentiable, loaded
from ...spec.blocks import BLOCKS
from ...spec.implementation import OwnFunction, short_name


def implementation(own: OwnFunction) -> Callable[..., dict[str, torch.Tensor]]:
    """Import the user's function. Autograd differentiates it where no gradient is named.

    Its call then raises UsageError where autograd does not see a gradient, and where a result is of a class that is not
    PyTorch's, which may compute its values after the call.
    """
    function, differentiate = loaded(own)

    def run(inputs: Mapping[str, torch.Tensor], attributes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = function(inputs, attributes)
        for name, y in outputs.items():
            if isinstance(y, torch.Tensor) and type(y).__module__.partition(".")[0] != "torch":
                raise UsageError(
                    f"{short_name(own.function)} returns {name} as a {type(y).__name__}, which may compute its values "
                    "after the call; return a torch.Tensor"
                )
        return outputs

    if importlib.util.find_spec("triton") is not None:
        from xlafuse.triton_side.calls.direct_launch import launch_directly_in

        launch_directly_in(filter(is_users, list(sys.modules.values())))  # as our own kernels are (docs/opponents.md)
    if differentiate is not None:
        block = BLOCKS[own.block]
        return with_gradient(run, differentiate, differentiable(block), [t.name for t in block.outputs])

    def apply(inputs: Mapping[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
        outputs = run(inputs, attributes)
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs.values()):
            for name, y in outputs.items():
                if y.is_floating_point() and not y.requires_grad:
                    raise UsageError(
                        f"{short_name(own.function)} gives no gradient: PyTorch's autograd does not see how {name} "
                        "depends on the inputs; name its gradient by --with-backward, or add --direction fwd"
                    )
        return outputs

    return apply


def with_gradient(
    run: Function, differentiate: Function, wanted: Sequence[str], outputs: Sequence[str]
) -> Callable[..., dict[str, torch.Tensor]]:
    """Return the user's function `run` with the gradients of the inputs `wanted` by `differentiate`."""

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
