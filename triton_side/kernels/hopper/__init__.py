"""Kernels in Gluon for Hopper GPUs (sm_90a): TMA loads, asynchronous tensor-core products, warp specialisation."""
