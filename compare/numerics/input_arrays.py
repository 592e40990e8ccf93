"""Input arrays: drawn from a seed, stored once, and read by every worker, so that all compute on the same bits.

Arrays are stored as .npy. A type that NumPy lacks is stored as integers with its bits (`BITS`).
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
    """Return the values of `tensor`, row by row: from its own `draw`, else normal float32 ones.

    Case sizes, tensor name and seed determine them on any machine. They are not yet rounded to the tensor's dtype, and
    never zeros, because a GPU multiplies zeros visibly faster. Raises ValueError where `draw` returns another shape.
    """

    def generator(number: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[seed, (zlib.crc32(tensor.name.encode()) << 32) + number]))

    shape = tensor.shape(case.sizes)
    made = tensor.draw(generator(0), case.sizes) if tensor.draw is not None else None
    if made is not None:
        drawn = np.asarray(made, order="C")  # PyTorch keeps strides, and only the case's layout may choose them
        if drawn.shape != shape:
            raise ValueError(f"{case.id}: {tensor.name} was drawn in shape {drawn.shape}, expected {shape}")
        return drawn
    values = np.empty(tensor.elements(case.sizes), dtype=np.float32)
    scale, mean = np.float32(tensor.scale(case.sizes)), np.float32(tensor.mean)

    def fill(number: int) -> None:
        # Each chunk has its own random stream, so the values do not depend on the number of threads.
        chunk = values[number * _CHUNK : (number + 1) * _CHUNK]
        generator(number).standard_normal(out=chunk, dtype=np.float32)
        chunk *= scale
        chunk += mean

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill, range(-(-values.size // _CHUNK))))
    return values.reshape(shape)


def path_of(folder: Path, role: str, name: str) -> Path:
    """Return the file of an array. role: input or cotangent; output or gradient for references.

    Role tolerance: the tolerance of each row of a gradient (compare.numerics.rounded_sums).
    """
    return folder / f"{role}.{name}.npy"
