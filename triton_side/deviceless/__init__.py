"""Inductor, Triton and CUDA compilation for a GPU that is not there."""
