"""Programs of the PyTorch worker processes."""
