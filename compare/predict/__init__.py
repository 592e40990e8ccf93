"""Times of kernels that nothing measured, predicted from what the compiled kernels tell."""
