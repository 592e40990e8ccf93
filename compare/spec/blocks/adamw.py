"""One step of AdamW (Loshchilov and Hutter, arXiv 1711.05101): a parameter and its two moments from their gradient.

    mu'    = beta1 mu + (1 - beta1) g
    nu'    = beta2 nu + (1 - beta2) g^2
    param' = param - rate (mu' / (1 - beta1^t) / (sqrt(nu' / (1 - beta2^t)) + eps) + decay param)

with t the number of steps, including this one. Moments and arithmetic are float32; parameter and gradient have the
case's dtype. A bfloat16 parameter does not show a change below half a unit in its last place, so trainers mostly keep
float32 copies. Here the rate is large enough to show, and the moments show the rest.
"""

from typing import Any

from ..block import Block
from ..case import Shape, Sizes
from ..common_rows import compilers, triton
from ..tensor import Tensor
from ._portable import at_least_float32

# PyTorch's defaults, except for a ten times larger rate.
ATTRIBUTES = {"rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 1e-2}
GRADIENT_STD = 1e-3


def updated(xp, param, gradient, mu, nu, step, *, rate, beta1, beta2, eps, decay):  # type: ignore[no-untyped-def]
    """Return (param, mu, nu) after the step."""
    p, g = at_least_float32(xp, param), at_least_float32(xp, gradient)
    t = xp.asarray(step, dtype=p.dtype)
    mu = beta1 * mu + (1 - beta1) * g
    nu = beta2 * nu + (1 - beta2) * g * g
    change = mu / (1 - beta1**t) / (xp.sqrt(nu / (1 - beta2**t)) + eps)
    return p - rate * (change + decay * p), mu, nu


def reference(xp, inputs, **attributes):  # type: ignore[no-untyped-def]
    names = ("param", "gradient", "mu", "nu", "step")
    param, mu, nu = updated(xp, *(inputs[name] for name in names), **attributes)
    return {"new_param": param, "new_mu": mu, "new_nu": nu}


def moments(name: str, axes: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Return mu and nu of a parameter, at the size that gradients of GRADIENT_STD give them.

    With nu zero, as before the first step, the change would be the gradient's sign, which is ill-conditioned at zero.
    """
    return (
        Tensor(f"mu{name}", axes, std=GRADIENT_STD / 2, dtype="float32"),
        # Ten standard deviations above zero.
        Tensor(f"nu{name}", axes, mean=GRADIENT_STD**2, std=GRADIENT_STD**2 / 10, dtype="float32"),
    )


def draw_step(generator: Any, sizes: Sizes) -> Any:
    """Draw a step up to four after the one in the sizes, so that the two input sets differ."""
    return generator.integers(sizes["step"], sizes["step"] + 5)


STEP = Tensor("step", (), dtype="int32", draw=draw_step)


def sizes(elements: int, step: int) -> Sizes:
    return {"elements": elements, "step": step}


BLOCK = Block(
    name="adamw",
    summary="one step of AdamW: a parameter and its float32 moments, elementwise",
    inputs=(
        Tensor("param", ("elements",), std=0.02), Tensor("gradient", ("elements",), std=GRADIENT_STD),
        *moments("", ("elements",)), STEP,
    ),
    outputs=(
        Tensor("new_param", ("elements",)), Tensor("new_mu", ("elements",), dtype="float32"),
        Tensor("new_nu", ("elements",), dtype="float32"),
    ),
    reference=reference,
    attributes=ATTRIBUTES,
    directions=("fwd",),
    flops=lambda s: 16 * s["elements"],
    shapes=(
        Shape("64Mi", sizes(2**26, 1000), quick=True),
        Shape("prime", sizes(1_000_003, 10), ("float32",), edge=True),
        Shape("64Mi-fp32", sizes(2**26, 1000), ("float32",)),
        Shape("odd", sizes(1021, 3), ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny", sizes(1, 3), ("float32", "bfloat16"), edge=True),
    ),
    # No torch.optim.AdamW: fused, it takes one dtype for parameter and moments (torch 2.13), and it writes its inputs,
    # which a block must not.
    implementations=(*compilers("adamw", train=False), triton("adamw")),
)
