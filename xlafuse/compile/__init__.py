"""Lowering and compiling with XLA: variants, targets, autotune replay, users' functions."""
