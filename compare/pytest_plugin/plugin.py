"""The pytest plugin: fixture `fusion`, options, what a failing assert shows, the snapshots' summary. See docs/gate.md.

Every pytest of the environment imports this module, so that it imports nothing: what a test asks for is imported when
it asks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .fixture import FusionFixture, Session

_SESSION: pytest.StashKey[Session] = pytest.StashKey()
_FIXTURE: pytest.StashKey[FusionFixture] = pytest.StashKey()
_NODES: pytest.StashKey[dict[str, set[str]]] = pytest.StashKey()  # "collected", "partial", "passed": see guard.book
_CHOICES = ("fail", "skip")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("xlafuse").addoption(
        "--xlafuse-update", action="store_true", help="write the fusion snapshots that are missing or have changed"
    )
    parser.addini(
        "xlafuse_undetermined", default="fail",
        help="what becomes of a test whose answer depends on a choice that nobody recorded: fail or skip",
    )
    parser.addini(
        "xlafuse_missing", default="fail",
        help="what becomes of a test where a package is missing without which nothing can be compiled: fail or skip",
    )
    parser.addini(
        "xlafuse_autotune", default="",
        help="a folder with choices of XLA that the target recorded, autotune-<jax version>.textproto",
    )


def pytest_configure(config: pytest.Config) -> None:
    for option in ("xlafuse_undetermined", "xlafuse_missing"):
        if config.getini(option) not in _CHOICES:
            raise pytest.UsageError(f"{option} is fail or skip, not {config.getini(option)!r}")
    recorded = config.getini("xlafuse_autotune")
    if recorded and not (config.rootpath / recorded).is_dir():
        raise pytest.UsageError(f"xlafuse_autotune names no folder: {config.rootpath / recorded}")
    nodes: dict[str, set[str]] = {"collected": set(), "partial": set(), "passed": set()}
    config.stash[_NODES] = nodes


@pytest.fixture
def fusion(request: pytest.FixtureRequest) -> FusionFixture:
    """`fusion(fn, *args)` compiles a JAX or PyTorch function for a GPU that need not be here, and gives its fusion
    graph to assert on; `fusion.matches_snapshot()` compares it with the committed one."""
    from .fixture import FusionFixture

    made = FusionFixture(_session(request.config), request.path, _test(request.node.nodeid))
    request.node.stash[_FIXTURE] = made
    return made


def _session(config: pytest.Config) -> Session:
    from .fixture import Session

    if _SESSION not in config.stash:
        recorded = config.getini("xlafuse_autotune")
        config.stash[_SESSION] = Session(
            update=config.getoption("xlafuse_update"), autotune=config.rootpath / recorded if recorded else None
        )
    return config.stash[_SESSION]


def _test(nodeid: str) -> str:
    return nodeid.partition("::")[2]


# Outcomes


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _outcome(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _outcome(item))


def _outcome(item: pytest.Item) -> Generator[None, object, object]:
    """Turns what the test's configuration says is to be skipped into a skip."""
    try:
        return (yield)
    except Exception as problem:
        if _FIXTURE not in item.stash:
            raise
        from .fixture import MissingPackage
        from .per_choice import Undetermined

        option = {Undetermined: "xlafuse_undetermined", MissingPackage: "xlafuse_missing"}.get(type(problem))
        if option is None or item.config.getini(option) != "skip":
            raise
        pytest.skip(str(problem))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash[_NODES]["passed"].add(_node(item))
    if report.failed and _FIXTURE in item.stash:
        fixture = item.stash[_FIXTURE]
        report.sections += [section for made in fixture.made for section in made.report()]
        if fixture.traceback:
            report.sections.append(("the whole traceback of the process that compiles", fixture.traceback))
    return report


def pytest_assertrepr_compare(config: pytest.Config, op: str, left: object, right: object) -> list[str] | None:
    if not any(type(side).__module__.startswith("compare.pytest_plugin") for side in (left, right)):
        return None
    from .assertion_messages import comparison

    return comparison(op, left, right)


# Snapshots that no test asks for


def _node(item: pytest.Item) -> str:
    return f"{item.path}::{_test(item.nodeid)}"


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        item.config.stash[_NODES]["partial"].add(str(item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    nodes = session.config.stash[_NODES]
    nodes["collected"].update(map(_node, session.items))
    if any("::" in argument for argument in session.config.args):
        nodes["partial"].update(str(item.path) for item in session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if _SESSION in config.stash and hasattr(config, "workeroutput"):  # a worker of pytest-xdist
        config.workeroutput["xlafuse"] = _book(config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if found := getattr(node, "workeroutput", {}).get("xlafuse"):
        _session(node.config).book.add(found)


def _book(config: pytest.Config) -> dict[str, list[str]]:
    book = config.stash[_SESSION].book
    for name, nodes in config.stash[_NODES].items():
        getattr(book, name).update(nodes)
    return book.to_json()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _SESSION not in config.stash:
        return
    _book(config)
    from .assertion_messages import summary

    if lines := summary(config.stash[_SESSION].book, config.rootpath):
        terminalreporter.section("fusion snapshots")
        for line in lines:
            terminalreporter.write_line(line)
