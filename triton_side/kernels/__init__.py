"""Hand-written Triton kernels, one file for each block: forward, backward, and the block's `apply`."""
