"""The page about opponents names every block and every peer."""

import re

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.spec.blocks import BLOCKS

NAMED = set(re.findall(r"`([\w-]+)`", (PROJECT / "docs" / "opponents.md").read_text()))


def test_the_page_names_every_block() -> None:
    assert set(BLOCKS) <= NAMED


def test_the_page_names_every_peer() -> None:
    peers = {i.name for block in BLOCKS.values() for i in block.implementations if i.is_peer}
    assert peers <= NAMED
