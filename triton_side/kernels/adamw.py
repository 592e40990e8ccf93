"""One step of AdamW with bias correction: parameters and their two moments, each read and written once.

    mu'    = beta1 mu + (1 - beta1) g
    nu'    = beta2 nu + (1 - beta2) g^2
    param' = param - rate (mu' / (1 - beta1^t) / (sqrt(nu' / (1 - beta2^t)) + eps) + decay param)

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101. Parameter and gradient: any shape,
both bfloat16, float16 or float32; moments are float32, and fp32 inside. The step t is in memory, so a captured launch
can be replayed with another step.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.gelu import divide
from xlafuse.triton_side.kernels.shared.launch import (
    FLOAT_DTYPES,
    INTERPRETED,
    FlatConfig,
    cdiv,
    check_tensors,
    device_of,
)

Updated = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

OPERATIONS = (
    declare.forward("add", "mu", "mu"), declare.forward("add", "nu", "nu"), declare.forward("pow", "update"),
    declare.forward("sqrt", "update"), declare.forward("div", "update"), declare.forward("sub", "update", "param"),
)

# The most gradients of one launch. Addresses and sizes of 32 take 2.5 of the 4 KB that a kernel's arguments may have.
MOST_GRADIENTS = 32

# Blocks that a program updates, one after another, in a launch with several gradients. A program finds its tensors in
# up to eight instructions for each gradient, so one block would be little work for it. Not measured.
STEPS = 8

MOMENTS = (torch.float32, torch.float32)  # the dtypes of mu and nu


class Update(NamedTuple):
    """A parameter, its gradients and moments, and memory for the new parameter and moments.

    gradients: one of the parameter's shape, or one for each index of its first axis. param and gradients have one
    dtype, and mu, nu and their results are float32. The results are contiguous, and either param, mu and nu or
    disjoint from all.
    """

    param: torch.Tensor
    gradients: tuple[torch.Tensor, ...]
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
    """Return the value of this program: that of the last of COUNT items that starts at this program or before."""
    if COUNT == 1:
        return values
    else:
        value = values[0]
        for index in tl.static_range(1, COUNT):
            value = tl.where(tl.program_id(0) >= starts[index], values[index], value)
        return value


@declare.declare(*OPERATIONS, flops=flops)
@triton.jit
def adamw_kernel(
    param_ptr, mu_ptr, nu_ptr, new_param_ptr, new_mu_ptr, new_nu_ptr, param_starts,
    gradient_ptr, elements, bases, starts, step_ptr,
    rate, eps, decay, beta1, beta2, one_minus_beta1, one_minus_beta2, log2_beta1, log2_beta2,
    PARAMS: tl.constexpr, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):
    """Update the part of a parameter that belongs to one program's blocks of a gradient.

    The first line of arguments are tuples with an item for each parameter. The second line, up to `starts`, has one for
    each gradient: its elements, where its part of the parameter begins, and its first program. A single item stands for
    its tuple. The host computes 1 - beta in fp64, because fp32 betas would leave few digits.
    """
    base = tl.cast(of_program(bases, starts, GRADIENTS), tl.int64)
    param_ptr = of_program(param_ptr, param_starts, PARAMS) + base
    mu_ptr, nu_ptr = of_program(mu_ptr, param_starts, PARAMS) + base, of_program(nu_ptr, param_starts, PARAMS) + base
    new_param_ptr = of_program(new_param_ptr, param_starts, PARAMS) + base
    new_mu_ptr = of_program(new_mu_ptr, param_starts, PARAMS) + base
    new_nu_ptr = of_program(new_nu_ptr, param_starts, PARAMS) + base
    gradient_ptr = of_program(gradient_ptr, starts, GRADIENTS)
    elements = of_program(elements, starts, GRADIENTS)
    accurate: tl.constexpr = new_param_ptr.dtype.element_ty == tl.float32
    first = (tl.program_id(0) - of_program(starts, starts, GRADIENTS)).to(tl.int64) * (BLOCK * STEPS)
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


@tuned
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
    update = Update(param, (gradient,), mu, nu, *results)
    update_all([update], step, rate=rate, beta1=beta1, beta2=beta2, eps=eps, decay=decay, config=config)
    return update[4:]


def update_all(
    updates: Sequence[Update], step: torch.Tensor,
    *, rate: float, beta1: float, beta2: float, eps: float, decay: float, config: FlatConfig | None = None,
) -> None:
    """Do one step for several parameters of one dtype and device, in one launch for MOST_GRADIENTS gradients.

    Args and Raises: as in `adamw`.
    """
    if not (0 < beta1 < 1 and 0 < beta2 < 1):
        raise ValueError(f"beta1 and beta2 must be between 0 and 1, got {beta1} and {beta2}")
    for update in updates:
        _check(update, updates[0].param, step)
    settings = (rate, eps, decay, beta1, beta2, 1 - beta1, 1 - beta2, math.log2(beta1), math.log2(beta2))
    for batch in _batches(updates):
        _launch(batch, step, settings, config or configure())


def _batches(updates: Sequence[Update]) -> Iterator[list[Update]]:
    """Yield the updates that are not empty, in lists of at most MOST_GRADIENTS gradients. Longer ones are split."""
    batch: list[Update] = []
    for update in updates:
        count = len(update.gradients)
        for first in range(0, count if update.param.numel() else 0, MOST_GRADIENTS):
            part = slice(first, first + MOST_GRADIENTS)
            piece = update if count <= MOST_GRADIENTS else Update._make(tensors[part] for tensors in update)
            if sum(len(other.gradients) for other in batch) + len(piece.gradients) > MOST_GRADIENTS:
                yield batch
                batch = []
            batch.append(piece)
    if batch:
        yield batch


def _launch(updates: Sequence[Update], step: torch.Tensor, settings: tuple[float, ...], config: FlatConfig) -> None:
    gradients = [gradient.contiguous() for update in updates for gradient in update.gradients]
    steps = 1 if len(gradients) == 1 else STEPS
    bases, starts, param_starts, programs = [], [], [], 0
    for update in updates:
        param_starts.append(programs)
        elements = update.param.numel() // len(update.gradients)
        for index in range(len(update.gradients)):
            bases.append(index * elements)
            starts.append(programs)
            programs += cdiv(elements, config.block * steps)
    param, _, *others = zip(*updates, strict=True)

    def packed(values: Iterable[Any]) -> Any:
        items = tuple(values)
        return items if len(items) > 1 else items[0]

    with device_of(step):
        adamw_kernel[(programs,)](
            *(packed(x.contiguous() for x in tensors) for tensors in (param, *others)), packed(param_starts),
            packed(gradients), packed(x.numel() for x in gradients), packed(bases), packed(starts), step, *settings,
            PARAMS=len(updates), GRADIENTS=len(gradients), BLOCK=config.block, STEPS=steps, num_warps=config.num_warps,
        )


def _check(update: Update, first: torch.Tensor, step: torch.Tensor) -> None:
    """Raise unless the update is as its class says, and on the device and of the dtype of `first`."""
    param, gradients, *others = update
    dtype, device, shape = first.dtype, first.device, param.shape
    fits = [
        x.dtype == expected and x.shape == shape and x.device == device
        for x, expected in zip((param, *others), (dtype, *MOMENTS, dtype, *MOMENTS), strict=True)
    ]
    part = shape if gradients[0].shape == shape else shape[1:]
    fits += [x.dtype == dtype and x.shape == part and x.device == device for x in gradients]
    if all(fits) and len(gradients) * part.numel() == param.numel() and (first.is_cuda or INTERPRETED) and (
        dtype in FLOAT_DTYPES and step.device == device and step.numel() == 1 and not step.is_floating_point()
        and all(x.is_contiguous() for x in others[2:])
    ):
        return  # the checks below, which take longer, find what does not fit
    named = dict(zip(("mu", "nu", "out of param", "out of mu", "out of nu"), others, strict=True))
    of_dtype = {"first param": first, "param": param, **{f"gradient{i or ''}": x for i, x in enumerate(gradients)}}
    check_tensors(**of_dtype, **{"out of param": named["out of param"]})
    for name in ("mu", "nu", "out of mu", "out of nu"):
        if named[name].dtype != torch.float32:
            kind = "out of mu and nu" if name.startswith("out") else "mu and nu"
            raise TypeError(f"{kind} must be float32, got {named[name].dtype}; cast them with .float()")
    for name, x in {**named, "step": step}.items():
        if x.device != device:
            raise ValueError(f"all must be on {device}, got {name} on {x.device}")
    if different := [f"{name} {tuple(x.shape)}" for name, x in named.items() if x.shape != shape]:
        raise ValueError(f"all must have param's shape {tuple(shape)}, got {', '.join(different)}")
    if step.numel() != 1 or step.is_floating_point():
        raise ValueError(f"step must be one integer, got {step.dtype} of shape {tuple(step.shape)}")
    if not all(x.is_contiguous() for x in others[2:]):
        raise ValueError("out must be contiguous; leave it out to have new tensors")
    raise ValueError(
        f"there must be one gradient of param's shape {tuple(shape)}, or one for each index of its first axis, got "
        f"{[tuple(x.shape) for x in gradients]}"
    )


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `adamw`: param, gradient, mu, nu [elements], step [] -> new_param, new_mu, new_nu."""
    names = ("param", "gradient", "mu", "nu", "step")
    param, mu, nu = adamw(*(inputs[name] for name in names), **attributes)
    return {"new_param": param, "new_mu": mu, "new_nu": nu}
