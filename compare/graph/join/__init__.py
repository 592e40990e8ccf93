"""Joining a fusion graph with the kernels that a GPU ran."""
