"""Lowering and compiling with XLA: variants, targets, replay of autotuning results, and users' functions."""
