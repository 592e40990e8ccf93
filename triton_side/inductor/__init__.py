"""Compiling with TorchInductor, and reading its output, live or from dump folders."""
