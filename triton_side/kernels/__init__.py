"""Hand-written Triton kernels, one file for each operation; parts that several operations use are in shared/."""
