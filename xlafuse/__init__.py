"""XLA's side of the comparison: blocks as JAX graphs, their compilation, and what XLA made of them.

Importing this package imports neither jax nor anything else heavy: reading HLO text (`xlafuse.hlo`) needs no
framework.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("xlafuse")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
