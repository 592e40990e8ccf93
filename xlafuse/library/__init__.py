"""Blocks by JAX's kernel libraries, which are optional."""
