"""Input bits: drawn from a seed, stored once, read by every worker, so that all sides compute on the same bits.

Arrays are stored as .npy; a type that NumPy lacks as its bits in integers (`BITS`).
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec.case import Case
from ..spec.tensor import Tensor

_CHUNK = 1 << 20

BITS = {"bfloat16": "int16", "float8_e4m3fn": "uint8"}


def draw(case: Case, tensor: Tensor, seed: int) -> NDArray[Any]:
    """Values of `tensor`, reproducible from case sizes, tensor name and seed on any machine: what its own `draw` makes,
    else normal float32 ones.

    They are the values before rounding to the tensor's dtype. Never zeros: a GPU multiplies zeros visibly faster.
    Raises ValueError where `draw` makes another shape.
    """

    def generator(number: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[seed, (zlib.crc32(tensor.name.encode()) << 32) + number]))

    shape = tensor.shape(case.sizes)
    made = tensor.draw(generator(0), case.sizes) if tensor.draw is not None else None
    if made is not None:
        drawn = np.asarray(made)
        if drawn.shape != shape:
            raise ValueError(f"{case.id}: {tensor.name} was drawn in shape {drawn.shape}, expected {shape}")
        return drawn
    values = np.empty(tensor.elements(case.sizes), dtype=np.float32)
    scale, mean = np.float32(tensor.scale(case.sizes)), np.float32(tensor.mean)

    def fill(number: int) -> None:
        # A stream a chunk, so that the values do not depend on how many threads there are.
        chunk = values[number * _CHUNK : (number + 1) * _CHUNK]
        generator(number).standard_normal(out=chunk, dtype=np.float32)
        chunk *= scale
        chunk += mean

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill, range(-(-values.size // _CHUNK))))
    return values.reshape(shape)


def path_of(folder: Path, role: str, name: str) -> Path:
    """Where an array lives: roles are input, cotangent, output and gradient (the last two are references)."""
    return folder / f"{role}.{name}.npy"
