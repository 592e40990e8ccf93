"""One step of AdamW with bias correction: parameters and their two moments, each read and written once.

    mu'    = beta1 mu + (1 - beta1) g
    nu'    = beta2 nu + (1 - beta2) g^2
    param' = param - rate (mu' / (1 - beta1^t) / (sqrt(nu' / (1 - beta2^t)) + eps) + decay param)

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101. Parameter and gradient: any shape,
both bfloat16, float16 or float32; moments are float32, and fp32 inside. The step t is in memory, so a captured launch
can be replayed with another step.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from triton_side.calls import declare
from triton_side.kernels.gelu import divide
from triton_side.kernels.shared.launch import FLOAT_DTYPES, INTERPRETED, FlatConfig, cdiv, check_tensors, device_of

Updated = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

OPERATIONS = (
    declare.forward("add", "mu", "mu"), declare.forward("add", "nu", "nu"), declare.forward("pow", "update"),
    declare.forward("sqrt", "update"), declare.forward("div", "update"), declare.forward("sub", "update", "param"),
)

# The most parameters of one launch. The addresses and sizes of 32 take half of the 4 KB that a kernel's arguments have.
MOST_PARAMETERS = 32

MOMENTS = (torch.float32, torch.float32)  # the dtypes of mu and nu

# Blocks of one parameter that a program updates, one after another, in a launch for several parameters. Finding a
# program's parameter takes some ten instructions for each parameter, about as many as a block.
STEPS = 8


class Update(NamedTuple):
    """A parameter, its gradient and moments, and memory for the new parameter and moments. All have one shape.

    mu, nu and their results are float32; param and gradient have one dtype. The results are contiguous, and either the
    same tensors as param, mu and nu or disjoint from all.
    """

    param: torch.Tensor
    gradient: torch.Tensor
    mu: torch.Tensor
    nu: torch.Tensor
    new_param: torch.Tensor
    new_mu: torch.Tensor
    new_nu: torch.Tensor


def flops(shapes: declare.Shapes) -> int:
    return 16 * sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("param_ptr"))


@triton.jit
def square_root(x, ACCURATE: tl.constexpr):
    """Return sqrt(x); the compiler's own square root errs by up to two ulps, which only an fp32 result shows."""
    if ACCURATE:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def of_program(values, starts, COUNT: tl.constexpr):
    """Return the value for this program's parameter, the last one that starts at this program or before."""
    value = values[0]
    for index in tl.static_range(1, COUNT):
        value = tl.where(tl.program_id(0) >= starts[index], values[index], value)
    return value


@declare.declare(*OPERATIONS, flops=flops)
@triton.jit
def adamw_kernel(
    param_ptr, gradient_ptr, mu_ptr, nu_ptr, new_param_ptr, new_mu_ptr, new_nu_ptr, elements, starts, step_ptr,
    rate, eps, decay, beta1, beta2, one_minus_beta1, one_minus_beta2, log2_beta1, log2_beta2,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):
    """Update one program's blocks of one of COUNT parameters.

    The first arguments are tuples with an item for each parameter; `starts` has its first program. The host computes
    1 - beta in fp64, because fp32 betas would leave few digits.
    """
    param_ptr, gradient_ptr = of_program(param_ptr, starts, COUNT), of_program(gradient_ptr, starts, COUNT)
    mu_ptr, nu_ptr = of_program(mu_ptr, starts, COUNT), of_program(nu_ptr, starts, COUNT)
    new_param_ptr = of_program(new_param_ptr, starts, COUNT)
    new_mu_ptr, new_nu_ptr = of_program(new_mu_ptr, starts, COUNT), of_program(new_nu_ptr, starts, COUNT)
    elements = of_program(elements, starts, COUNT)
    accurate: tl.constexpr = new_param_ptr.dtype.element_ty == tl.float32
    first = (tl.program_id(0) - of_program(starts, starts, COUNT)).to(tl.int64) * (BLOCK * STEPS)
    t = tl.load(step_ptr).to(tl.float32)
    # These depend only on the step: once a program, not once an element.
    scaled_rate = divide(rate, 1.0 - tl.exp2(t * log2_beta1), True)
    root_scale = divide(1.0, tl.sqrt_rn(1.0 - tl.exp2(t * log2_beta2)), True)
    for start in tl.range(first, tl.minimum(first + BLOCK * STEPS, elements), BLOCK):
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
        mu = beta1 * mu + one_minus_beta1 * gradient
        # In this order, because the square alone overflows earlier.
        nu = beta2 * nu + one_minus_beta2 * gradient * gradient
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
    results = out or tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (param, mu, nu))
    update = Update(param, gradient, mu, nu, *results)
    update_all([update], step, rate=rate, beta1=beta1, beta2=beta2, eps=eps, decay=decay, config=config)
    return update[4:]


def update_all(
    updates: Sequence[Update], step: torch.Tensor,
    *, rate: float, beta1: float, beta2: float, eps: float, decay: float, config: FlatConfig | None = None,
) -> None:
    """Do one step for several parameters of one dtype and device, in one launch for each MOST_PARAMETERS of them.

    Args and Raises: as in `adamw`.
    """
    if not (0 < beta1 < 1 and 0 < beta2 < 1):
        raise ValueError(f"beta1 and beta2 must be between 0 and 1, got {beta1} and {beta2}")
    for update in updates:
        _check(update, updates[0].param, step)
    config = config or configure()
    settings = (rate, eps, decay, beta1, beta2, 1 - beta1, 1 - beta2, math.log2(beta1), math.log2(beta2))
    filled = [update for update in updates if update.param.numel() > 0]
    for first in range(0, len(filled), MOST_PARAMETERS):
        _launch(filled[first : first + MOST_PARAMETERS], step, settings, config)


def _launch(updates: Sequence[Update], step: torch.Tensor, settings: tuple[float, ...], config: FlatConfig) -> None:
    steps = 1 if len(updates) == 1 else STEPS
    elements = tuple(update.param.numel() for update in updates)
    *starts, programs = accumulate((cdiv(count, config.block * steps) for count in elements), initial=0)
    columns = zip(*updates, strict=True)
    tensors = [tuple(x.contiguous() for x in column) for column in columns]
    with device_of(step):
        adamw_kernel[(programs,)](
            *tensors, elements, tuple(starts), step, *settings,
            COUNT=len(updates), BLOCK=config.block, STEPS=steps, num_warps=config.num_warps,
        )


def _check(update: Update, first: torch.Tensor, step: torch.Tensor) -> None:
    """Raise unless the update is as its class says, and on the device and of the dtype of `first`."""
    param, dtype = update.param, first.dtype
    shape, device = param.shape, first.device
    fits = [
        x.dtype == expected and x.shape == shape and x.device == device
        for x, expected in zip(update, (dtype, dtype, *MOMENTS, dtype, *MOMENTS), strict=True)
    ]
    if all(fits) and (first.is_cuda or INTERPRETED) and dtype in FLOAT_DTYPES and step.device == device and (
        step.numel() == 1 and not step.is_floating_point() and all(x.is_contiguous() for x in update[4:])
    ):
        return  # in a third of the time of the checks below, which find what does not fit
    named = dict(zip(("param", "gradient", "mu", "nu", "out of param", "out of mu", "out of nu"), update, strict=True))
    check_tensors(**{"the first param": first}, **{name: named[name] for name in ("param", "gradient", "out of param")})
    moments = {name: x for name, x in named.items() if name.endswith(("mu", "nu"))}
    for name, x in moments.items():
        if x.dtype != torch.float32:
            kind = "out of mu and nu" if name.startswith("out") else "mu and nu"
            raise TypeError(f"{kind} must be float32, got {x.dtype}; cast them with .float()")
    for name, x in {**moments, "step": step}.items():
        if x.device != param.device:
            raise ValueError(f"all must be on {param.device}, got {name} on {x.device}")
    if different := [f"{name} {tuple(x.shape)}" for name, x in named.items() if x.shape != param.shape]:
        raise ValueError(f"all must have param's shape {tuple(param.shape)}, got {', '.join(different)}")
    if step.numel() != 1 or step.is_floating_point():
        raise ValueError(f"step must be one integer, got {step.dtype} of shape {tuple(step.shape)}")
    raise ValueError("out must be contiguous; leave it out to have new tensors")


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `adamw`: param, gradient, mu, nu [elements], step [] -> new_param, new_mu, new_nu."""
    names = ("param", "gradient", "mu", "nu", "step")
    param, mu, nu = adamw(*(inputs[name] for name in names), **attributes)
    return {"new_param": param, "new_mu": mu, "new_nu": nu}
