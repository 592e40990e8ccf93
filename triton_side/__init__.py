"""Everything PyTorch, Triton and CUDA. It needs torch and triton, never jax. Import the module that you need."""
