"""What is given to the clerk is done in order, and nothing of it is lost."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from pathlib import Path

import pytest

from compare.record.run_folder import RunFolderError
from compare.run.clerk import Clerk


def _full() -> None:
    raise RunFolderError("the disk is full")


def test_all_is_done_in_order_before_it_leaves() -> None:
    done: list[int] = []
    begin = threading.Event()
    with Clerk() as clerk:
        clerk.do(lambda: begin.wait(20) and None)
        for number in range(5):
            clerk.do(lambda number=number: done.append(number))  # type: ignore[misc]
        assert done == []
        begin.set()
    assert done == [0, 1, 2, 3, 4]


def test_what_goes_wrong_is_raised_when_it_answers_and_the_rest_is_done(tmp_path: Path) -> None:
    with Clerk() as clerk:
        wait([clerk.do(_full)])
        with pytest.raises(RunFolderError, match="full"):
            clerk.answer()
        clerk.do(lambda: (tmp_path / "record").touch())
    assert (tmp_path / "record").exists()


def test_what_goes_wrong_last_is_raised_when_it_leaves() -> None:
    with pytest.raises(RunFolderError, match="full"), Clerk() as clerk:
        clerk.do(_full)


def test_another_error_is_not_hidden_and_all_is_done() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), Clerk() as clerk:
        clerk.do(_full)
        clerk.do(lambda: done.append("record"))
        raise KeyboardInterrupt
    assert done == ["record"]


def test_once_it_is_closed_it_takes_nothing_more() -> None:
    done: list[str] = []
    with Clerk() as clerk:
        clerk.do(lambda: done.append("record"))
        clerk.close()
        assert clerk.do(lambda: done.append("archive")).done()
    assert done == ["record"]
