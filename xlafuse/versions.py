"""The jax release series that this package was tested with; reading them imports no jax."""

JAX = ("0.10", "0.11")  # oldest first
