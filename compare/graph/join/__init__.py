"""A graph's kernels joined with the kernels that a GPU ran."""
