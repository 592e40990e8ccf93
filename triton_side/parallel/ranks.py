"""Ranks: the processes that compute one block together, each with a GPU of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks.

    rank: this one's number. count: of all. group: the torch.distributed process group of all ranks, of backend nccl or
    gloo. communicate: False replaces every exchange by a local operation with results of the same shapes. Such a
    program is timed to know the cost of communication; its results are wrong and never checked.
    """

    rank: int
    count: int
    group: Any
    communicate: bool = True
