"""The XLA worker: its service, its compiles, Triton kernels within XLA, and compiles of users' functions."""
