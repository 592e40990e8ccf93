"""Profiles of other tools: the work that a device did in some steps, from jax.profiler, torch.profiler and Nsight."""
