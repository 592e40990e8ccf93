"""The frameworks, and the one that a package belongs to."""

from typing import Literal

Framework = Literal["jax", "torch"]

# numpy and the user's own packages belong to none.
OWNERS: dict[str, Framework] = {
    "jax": "jax", "jaxlib": "jax", "flax": "jax", "equinox": "jax", "haiku": "jax", "optax": "jax",
    "torch": "torch", "triton": "torch",
}
