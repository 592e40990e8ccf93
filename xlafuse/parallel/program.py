"""Programs over a mesh of GPUs: a function of one GPU's slices, or of whole arrays, as one program on all of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlafuse.parallel.ranks import AXIS

Arrays = dict[str, jax.Array]
Specs = Mapping[str, PartitionSpec]


def mesh_of(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


def spec(axes: Sequence[str], split: str | None) -> PartitionSpec:
    """Return the partition of an array whose axis `split` is divided among the ranks; None: each has all of it."""
    return PartitionSpec(*(AXIS if axis == split else None for axis in axes))


def of_slices(function: Callable[[Arrays], Arrays], mesh: Mesh, given: Specs, results: Specs) -> Callable[..., Arrays]:
    """Return a program of whole arrays from a function of one rank's slices, which exchanges them itself."""
    inside = jax.shard_map(function, mesh=mesh, in_specs=(dict(given),), out_specs=dict(results), check_vma=False)
    return lambda arrays: inside(arrays)


def partitioned(function: Callable[[Arrays], Arrays], mesh: Mesh, results: Specs) -> Callable[..., Arrays]:
    """Return a function of whole arrays whose results lie as told; XLA's partitioner adds the exchanges."""

    def program(arrays: Arrays) -> Arrays:
        found = function(arrays)
        return {
            name: jax.lax.with_sharding_constraint(value, NamedSharding(mesh, results[name]))
            for name, value in found.items()
        }

    return program


def summing_gradients(
    step: Callable[[Arrays], Arrays], whole: Sequence[str], all_reduce: Callable[[jax.Array], jax.Array]
) -> Callable[[Arrays], Arrays]:
    """Return a rank's training step with the gradients of whole inputs summed over the ranks."""

    def summed(arrays: Arrays) -> Arrays:
        found = step(arrays)
        return found | {f"d_{name}": all_reduce(found[f"d_{name}"]) for name in whole if f"d_{name}" in found}

    return summed
