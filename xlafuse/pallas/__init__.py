"""Hand-written Pallas kernels on Mosaic GPU, one file an operation, forward and backward."""
