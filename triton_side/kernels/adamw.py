"""One step of AdamW with bias correction: a parameter and its two moments, each read and written once.

    mu'    = beta1 mu + (1 - beta1) g
    nu'    = beta2 nu + (1 - beta2) g^2
    param' = param - rate (mu' / (1 - beta1^t) / (sqrt(nu' / (1 - beta2^t)) + eps) + decay param)

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101. Parameter and gradient: any shape,
both bfloat16, float16 or float32; moments are float32, and fp32 inside. The step t is in memory, so a captured launch
can be replayed with another step.
"""

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from triton_side.calls import declare
from triton_side.kernels.gelu import divide
from triton_side.kernels.shared.launch import FlatConfig, cdiv, check_tensors, device_of

Updated = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

OPERATIONS = (
    declare.forward("add", "mu", "mu"), declare.forward("add", "nu", "nu"), declare.forward("pow", "update"),
    declare.forward("sqrt", "update"), declare.forward("div", "update"), declare.forward("sub", "update", "param"),
)


@triton.jit
def square_root(x, ACCURATE: tl.constexpr):
    """Return sqrt(x); the compiler's own square root errs by up to two ulps, which only an fp32 result shows."""
    if ACCURATE:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@declare.declare(*OPERATIONS, flops=lambda shapes: 16 * math.prod(shapes["param_ptr"]))
@triton.jit
def adamw_kernel(
    param_ptr, gradient_ptr, mu_ptr, nu_ptr, step_ptr, new_param_ptr, new_mu_ptr, new_nu_ptr, elements,
    rate, eps, decay, beta1, beta2, one_minus_beta1, one_minus_beta2, log2_beta1, log2_beta2, BLOCK: tl.constexpr,
):
    """Update one program's block; the host computes 1 - beta in fp64, because fp32 betas would leave few digits."""
    accurate: tl.constexpr = new_param_ptr.dtype.element_ty == tl.float32
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = start + tl.arange(0, BLOCK)
    mask = offset < elements
    # Unless `elements` is a multiple of 16, a mask prevents 16-byte accesses. Only the last block is masked.
    whole = start + BLOCK <= elements
    if whole:
        param = tl.load(param_ptr + offset).to(tl.float32)
        gradient = tl.load(gradient_ptr + offset).to(tl.float32)
        mu = tl.load(mu_ptr + offset)
        nu = tl.load(nu_ptr + offset)
    else:
        param = tl.load(param_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        mu = tl.load(mu_ptr + offset, mask=mask, other=0.0)
        nu = tl.load(nu_ptr + offset, mask=mask, other=0.0)
    t = tl.load(step_ptr).to(tl.float32)
    # These depend only on the step: once a program, not once an element.
    scaled_rate = divide(rate, 1.0 - tl.exp2(t * log2_beta1), True)
    root_scale = divide(1.0, tl.sqrt_rn(1.0 - tl.exp2(t * log2_beta2)), True)
    mu = beta1 * mu + one_minus_beta1 * gradient
    nu = beta2 * nu + one_minus_beta2 * gradient * gradient  # in this order, because the square alone overflows earlier
    change = divide(scaled_rate * mu, square_root(nu, accurate) * root_scale + eps, accurate)
    param = (param - (change + rate * decay * param)).to(new_param_ptr.dtype.element_ty)
    if whole:
        tl.store(new_param_ptr + offset, param)
        tl.store(new_mu_ptr + offset, mu)
        tl.store(new_nu_ptr + offset, nu)
    else:
        tl.store(new_param_ptr + offset, param, mask=mask)
        tl.store(new_mu_ptr + offset, mu, mask=mask)
        tl.store(new_nu_ptr + offset, nu, mask=mask)


@lru_cache
def configure() -> FlatConfig:
    """Four warps, with one 16-byte load of each moment and 8 bytes of a 16-bit parameter a thread.

    With twice as many elements the parameter would take 16 bytes too, and threads would exchange elements through
    shared memory (Triton 3.7). Not measured.
    """
    return FlatConfig(block=128 * 4, num_warps=4)


def adamw(
    param: torch.Tensor, gradient: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, step: torch.Tensor,
    *, rate: float, beta1: float, beta2: float, eps: float, decay: float, out: Updated | None = None,
    config: FlatConfig | None = None,
) -> Updated:
    """Return the parameter and its moments after one step.

    Args:
        param, gradient: two tensors of one shape, dtype (bfloat16, float16, float32) and device.
        mu, nu: float32, of their shape and device. Non-contiguous tensors are copied.
        step: the number of this step, from 1 on; one integer on the same device.
        rate, decay: learning rate, and weight decay, which is multiplied by it.
        beta1, beta2: how much of mu and of nu is kept, in (0, 1). eps: added to the square root.
        out: memory for the results, shaped like (param, mu, nu): contiguous, and either those tensors or disjoint.
        config: launch configuration instead of `configure`'s.

    Returns:
        `out`, or new contiguous tensors of param's shape, in the dtypes of param, mu and nu.

    Raises:
        ValueError: shapes or devices differ, step is not one number, a beta is not between 0 and 1, `out` is not
            contiguous, or the tensors are not on a GPU.
        TypeError: a dtype is not one of those above.
    """
    check_tensors(param=param, gradient=gradient)
    check_tensors(mu=mu, nu=nu)
    if mu.dtype != torch.float32:
        raise TypeError(f"mu and nu must be float32, got {mu.dtype}; cast them with .float()")
    results = dict(zip(("out of param", "out of mu", "out of nu"), out or (), strict=False))
    shapes = {name: tuple(x.shape) for name, x in {"gradient": gradient, "mu": mu, "nu": nu, **results}.items()}
    if different := [f"{name} {shape}" for name, shape in shapes.items() if shape != tuple(param.shape)]:
        raise ValueError(f"all must have param's shape {tuple(param.shape)}, got {', '.join(different)}")
    if out:
        _check_out(out, param)
    if mu.device != param.device or step.device != param.device:
        raise ValueError(f"all must be on {param.device}, got mu on {mu.device} and step on {step.device}")
    if step.numel() != 1 or step.is_floating_point():
        raise ValueError(f"step must be one integer, got {step.dtype} of shape {tuple(step.shape)}")
    if not (0 < beta1 < 1 and 0 < beta2 < 1):
        raise ValueError(f"beta1 and beta2 must be between 0 and 1, got {beta1} and {beta2}")
    param, gradient, mu, nu = (x.contiguous() for x in (param, gradient, mu, nu))
    new_param, new_mu, new_nu = out or (torch.empty_like(param), torch.empty_like(mu), torch.empty_like(nu))
    if param.numel() == 0:
        return new_param, new_mu, new_nu
    config = config or configure()
    with device_of(param):
        adamw_kernel[(cdiv(param.numel(), config.block),)](
            param, gradient, mu, nu, step, new_param, new_mu, new_nu, param.numel(), rate, eps, decay, beta1, beta2,
            1 - beta1, 1 - beta2, math.log2(beta1), math.log2(beta2), BLOCK=config.block, num_warps=config.num_warps,
        )
    return new_param, new_mu, new_nu


def _check_out(out: Updated, param: torch.Tensor) -> None:
    new_param, new_mu, new_nu = out
    check_tensors(param=param, **{"out of param": new_param})
    check_tensors(**{"out of mu": new_mu, "out of nu": new_nu})
    if new_mu.dtype != torch.float32:
        raise TypeError(f"out of mu and nu must be float32, got {new_mu.dtype}")
    if new_mu.device != param.device or not all(x.is_contiguous() for x in out):
        raise ValueError(f"out must be contiguous and on {param.device}; leave it out to have new tensors")


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `adamw`: param, gradient, mu, nu [elements], step [] -> new_param, new_mu, new_nu."""
    names = ("param", "gradient", "mu", "nu", "step")
    param, mu, nu = adamw(*(inputs[name] for name in names), **attributes)
    return {"new_param": param, "new_mu": mu, "new_nu": nu}
