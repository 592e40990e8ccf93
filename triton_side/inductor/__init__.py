"""TorchInductor: compiling with it, and reading its output, live or from dump folders."""
