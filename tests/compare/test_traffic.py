"""What ncu lists is read back by call and part, and what it does not list is said."""

from __future__ import annotations

import pytest

from compare.profiled import BOUNDARY
from compare.traffic import KernelTraffic, NcuError, parse, split

LISTING = f'''==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "{BOUNDARY}": 0%....50%....100% - 1 pass
"ID","Process ID","Kernel Name","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","","byte","byte"
"0","4242","{BOUNDARY}","(1, 1, 1)","0","0"
"1","4242","loop_add_fusion","(512, 1, 1)","268,435,456","134217728"
"2","4242","{BOUNDARY}","(1, 1, 1)","32","0"
'''.splitlines()


def test_launches_are_read_with_their_bytes() -> None:
    assert parse(LISTING)[1] == KernelTraffic("loop_add_fusion", 268435456, 134217728)
    assert split(parse(LISTING)) == [[KernelTraffic("loop_add_fusion", 268435456, 134217728)]]


def test_a_listing_without_what_was_asked_is_refused() -> None:
    with pytest.raises(NcuError, match="no kernel"):
        parse(["==ERROR== The user does not have permission to access NVIDIA GPU Performance Counters"])
    with pytest.raises(NcuError, match="no column dram__bytes_write.sum"):
        parse([line.replace("dram__bytes_write.sum", "other") for line in LISTING])
    with pytest.raises(NcuError, match="could not count loop_add_fusion"):
        parse([line.replace("268,435,456", "n/a") for line in LISTING])


def test_launches_outside_a_call_are_refused() -> None:
    stray, boundary = KernelTraffic("stray", 1, 1), KernelTraffic(BOUNDARY, 0, 0)
    assert split([boundary, boundary, boundary, stray, boundary]) == [[], [stray]]
    with pytest.raises(NcuError, match="stray ran outside"):
        split([boundary, boundary, stray])
    with pytest.raises(NcuError, match="ended within"):
        split([boundary, stray])
