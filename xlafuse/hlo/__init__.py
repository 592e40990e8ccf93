"""Readers of HLO text and protos, and what a module launches: kernels, buffers, bytes, FLOPs, source lines (no jax)."""
