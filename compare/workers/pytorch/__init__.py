"""The PyTorch workers: on a device, in Triton's interpreter, for an absent GPU, and for users' functions."""
