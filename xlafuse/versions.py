"""The series of jax that this package was tested on. No import of jax is needed to read them."""

JAX = ("0.10", "0.11")  # oldest first
