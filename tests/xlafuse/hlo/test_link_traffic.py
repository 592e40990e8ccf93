"""GPUs that a collective joins, and the bytes that each sends."""

import gzip
from pathlib import Path

import pytest

from xlafuse.hlo.exchange_groups import gpus_of_text
from xlafuse.hlo.link_traffic import sent

DATA = Path(__file__).parents[2] / "data" / "hlo"


@pytest.mark.parametrize(
    ("attributes", "gpus"),
    [
        ({"replica_groups": "{{0,1,2,3},{4,5,6,7}}"}, 4), ({"replica_groups": "[2,4]<=[4,2]T(1,0)"}, 4),
        ({"replica_groups": "mesh['data'=2,'model'=4] {'model'}"}, 4),
        ({"replica_groups": "mesh['data'=2,'model'=4] {'data','model'}"}, 8),
        ({"replica_groups": "mesh['x'=8] {'x':(1)2}"}, 0), ({"replica_groups": "{}"}, 0), ({}, 0),
        ({"source_target_pairs": "{{0,1},{1,2},{2,0}}"}, 2),
    ],
)
def test_the_gpus_of_a_group(attributes: dict[str, str], gpus: int) -> None:
    assert gpus_of_text(attributes) == gpus


@pytest.mark.parametrize("version", ["0.10.2", "0.11.2"])
def test_the_bytes_that_one_of_eight_gpus_sends(version: str) -> None:
    """A permutation, an all-gather, a reduce-scatter, an all-reduce and an all-to-all of bf16[64,64]."""
    size = 64 * 64 * 2
    text = gzip.decompress((DATA / f"jax-{version}" / "h200x8-collectives.hlo.txt.gz").read_bytes()).decode()
    assert sent(text) == size * (1 + 7 + 7 / 8 + 2 * 7 / 8 + 7 / 8)
    assert sent(text.replace("replica_groups", "unknown")) is None
