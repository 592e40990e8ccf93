"""The search on a GPU for launch configurations of hand-written kernels, which fills its table."""
