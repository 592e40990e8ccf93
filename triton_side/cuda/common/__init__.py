"""Python that the CUDA operations share: argument checks and launches."""
