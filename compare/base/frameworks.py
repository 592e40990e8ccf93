"""The framework that a package belongs to."""

# numpy and the user's own packages belong to none.
OWNERS = {
    "jax": "jax", "jaxlib": "jax", "flax": "jax", "equinox": "jax", "haiku": "jax", "optax": "jax",
    "torch": "torch", "triton": "torch",
}
