"""Boosted regression trees as arrays, evaluated with numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

FIELDS = ("feature", "threshold", "left", "right", "missing_left", "roots", "depth")


@dataclass(frozen=True)
class Trees:
    """Sum of trees. A node goes left where its feature is at most its threshold; NaN goes where `missing_left` says.

    feature: -1 in a leaf, whose threshold is its value. left, right: indices of nodes, counted from the tree's root.
    roots: index of each tree's first node. depth: the longest path, in steps.
    """

    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    left: NDArray[np.int16]
    right: NDArray[np.int16]
    missing_left: NDArray[np.bool_]
    roots: NDArray[np.int32]
    depth: int

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[np.generic]], prefix: str) -> Trees:
        """Return the trees that a file's arrays hold under names with this prefix."""
        fields = {name: arrays[f"{prefix}.{name}"] for name in FIELDS}
        return cls(**{**fields, "depth": int(fields["depth"])})  # type: ignore[arg-type]

    def arrays(self, prefix: str) -> dict[str, NDArray[np.generic]]:
        return {f"{prefix}.{name}": np.asarray(getattr(self, name)) for name in FIELDS}

    @cached_property
    def _links(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """Return the nodes' features, their two children (a leaf's is itself), and their thresholds."""
        sizes = np.diff(np.append(self.roots, len(self.feature)))
        first = np.repeat(self.roots, sizes)
        leaf = self.feature < 0
        nodes = np.arange(len(leaf), dtype=np.int32)
        children = np.empty((len(leaf), 2), np.int32)
        children[:, 0] = np.where(leaf, nodes, first + self.left)
        children[:, 1] = np.where(leaf, nodes, first + self.right)
        return np.where(leaf, 0, self.feature).astype(np.int32), children.ravel(), self.threshold

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the sum of all trees for each row of features."""
        features, children, thresholds = self._links
        count, width = rows.shape
        flat = np.ascontiguousarray(rows, np.float32).ravel()
        start = (np.arange(count, dtype=np.int32) * width)[:, None]
        at = np.broadcast_to(self.roots.astype(np.int32), (count, len(self.roots)))
        missing = np.isnan(flat).any()
        for _ in range(self.depth):
            values = flat.take(start + features.take(at))
            right = values > thresholds.take(at)
            if missing:
                right |= np.isnan(values) & ~self.missing_left.take(at)
            at = children.take(2 * at + right)
        return thresholds.take(at).sum(axis=1, dtype=np.float64)
