"""Everything PyTorch and Triton: needs torch and triton, never jax. Import the module you need from it."""
