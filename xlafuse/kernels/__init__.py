"""The hand-written kernels under short names, for use in a program.

    from xlafuse.kernels.triton import attention    # on tensors of PyTorch
    from xlafuse.kernels.pallas import attention    # on arrays of JAX

A name is imported at its first use, and with it its framework.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any


def function_of(folder: str, name: str, names: Sequence[str]) -> Any:
    """Return the function of the same name in a module of `xlafuse`'s folder. Raises AttributeError for another name.

    names: those that the folder has.
    """
    if name not in names:
        raise AttributeError(f"xlafuse.{folder} has no kernel {name!r}; it has {', '.join(names)}")
    return getattr(import_module(f"xlafuse.{folder}.{name}"), name)
