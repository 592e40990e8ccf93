"""Compiling with Inductor and Triton for an absent GPU."""
