"""Blocks whose arrays are split over the GPUs of one host, a process each: one module a block."""
