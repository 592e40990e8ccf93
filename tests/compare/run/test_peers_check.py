"""A small call of each optional peer, before a long run depends on it."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from made_records import made_record

from xlafuse.compare.base import host
from xlafuse.compare.cli.main import cli
from xlafuse.compare.run import peers_check
from xlafuse.compare.spec.blocks import BLOCKS


def test_every_peer_with_packages_has_one_small_case_that_it_takes() -> None:
    work = peers_check.every_peer().work
    names = [implementation.name for _, (implementation,) in work]
    assert len(names) == len(set(names)) and {"fa4", "quack", "liger", "tokamax"} <= set(names)
    for case, (implementation,) in work:
        assert implementation.requires and not implementation.unsupported(case)
        assert case.id in {known.id for known in BLOCKS[case.block].cases("check")}


def test_a_missing_peer_is_named_with_its_command() -> None:
    case, (peer,) = peers_check.every_peer().work[0]
    record = made_record(
        case=case, implementation=peer.name, compiler="triton", status="skipped", detail="not there: pip install it"
    )
    assert peer.name in peers_check.in_words(record) and "pip install it" in peers_check.in_words(record)


@pytest.mark.skipif(host.gpu_present(), reason="calls the peers where there is a GPU")
def test_without_a_gpu_nothing_is_called() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--peers"])
    assert done.exit_code == 2 and "GPU" in done.output
