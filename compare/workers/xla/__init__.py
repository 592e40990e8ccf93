"""Programs of the XLA worker process."""
