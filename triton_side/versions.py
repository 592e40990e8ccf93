"""The builds of torch and the series of Triton that this package was tested with. This module imports neither."""

# Releases, newest first, and the CUDA version of the build, or None for a CPU build.
TORCH_BUILDS = (("2.13.0", None), ("2.13.0", "13.0"), ("2.12.1", "13.0"), ("2.11.0", "13.0"))
TRITON = ("3.6", "3.7")
