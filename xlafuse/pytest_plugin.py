"""The pytest plugin: fixture `fusion`, options, messages of failed asserts, summary. See docs/pytest-plugin.md.

Every pytest of the environment imports this module, so the rest (`compare/pytest_plugin/`) is imported when a test uses
the fixture.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .compare.pytest_plugin.fixture import FusionFixture, Session
    from .compare.pytest_plugin.session_summary import SessionSummary

_SESSION: pytest.StashKey[Session] = pytest.StashKey()
_FIXTURE: pytest.StashKey[FusionFixture] = pytest.StashKey()
_NODES: pytest.StashKey[dict[str, set[str]]] = pytest.StashKey()  # "collected", "partial", "passed" of SessionSummary
_CHOICES = ("fail", "skip")


class OtherVersions(pytest.PytestWarning):
    """There are snapshots, but none for the installed versions."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("xlafuse").addoption(
        "--xlafuse-update", action="store_true", help="write fusion snapshots that are missing or have changed"
    )
    parser.getgroup("xlafuse").addoption(
        "--xlafuse-save", metavar="DIR", type=Path, help="write the fusion graphs of all tests, for `xlafuse diff`"
    )
    parser.addini(
        "xlafuse_undetermined", default="fail",
        help="outcome of a test whose answer depends on an unrecorded autotune choice: fail or skip",
    )
    parser.addini(
        "xlafuse_missing", default="fail",
        help="outcome of a test that needs a missing package to compile: fail or skip",
    )
    parser.addini(
        "xlafuse_autotune", default="",
        help="a folder of XLA autotune results recorded on the target GPU: autotune-<jax version>.textproto",
    )


def pytest_configure(config: pytest.Config) -> None:
    for option in ("xlafuse_undetermined", "xlafuse_missing"):
        if config.getini(option) not in _CHOICES:
            raise pytest.UsageError(f"{option} takes fail or skip; got {config.getini(option)!r}")
    recorded = config.getini("xlafuse_autotune")
    if recorded and not (config.rootpath / recorded).is_dir():
        raise pytest.UsageError(f"xlafuse_autotune takes an existing folder; got {config.rootpath / recorded}")
    nodes: dict[str, set[str]] = {"collected": set(), "partial": set(), "passed": set()}
    config.stash[_NODES] = nodes


@pytest.fixture
def fusion(request: pytest.FixtureRequest) -> FusionFixture:
    """Compile a JAX or PyTorch function for a possibly absent GPU: `fusion(fn, *args)` returns its fusion graph to
    assert on. `fusion.matches_snapshot()` compares the graph with the committed snapshot."""
    made: FusionFixture = import_module(".compare.pytest_plugin.fixture", __package__).FusionFixture(
        _session(request.config), request.path, _test(request.node.nodeid)
    )
    request.node.stash[_FIXTURE] = made
    return made


def _session(config: pytest.Config) -> Session:
    if _SESSION not in config.stash:
        recorded = config.getini("xlafuse_autotune")
        config.stash[_SESSION] = import_module(".compare.pytest_plugin.fixture", __package__).Session(
            update=config.getoption("xlafuse_update"), other_versions=OtherVersions,
            autotune=config.rootpath / recorded if recorded else None, save=config.getoption("xlafuse_save"),
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
    """Turn an outcome into a skip where the configuration says so."""
    try:
        return (yield)
    except Exception as problem:
        if _FIXTURE not in item.stash:
            raise
        undetermined = import_module(".compare.pytest_plugin.per_choice", __package__).Undetermined
        missing = import_module(".compare.pytest_plugin.fixture", __package__).MissingPackage
        option = {undetermined: "xlafuse_undetermined", missing: "xlafuse_missing"}.get(type(problem))
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
            report.sections.append(("full traceback of the compiling process", fixture.traceback))
    return report


def pytest_assertrepr_compare(config: pytest.Config, op: str, left: object, right: object) -> list[str] | None:
    if _SESSION not in config.stash:  # no test used the fixture, so neither side is one of its values
        return None
    messages = import_module(".compare.pytest_plugin.assertion_messages", __package__)
    if not any(type(side).__module__.startswith(f"{messages.__package__}.") for side in (left, right)):
        return None
    lines: list[str] | None = messages.comparison(op, left, right)
    return lines


# The session's summary of snapshots


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
    if _SESSION in config.stash and hasattr(config, "workeroutput"):  # a pytest-xdist worker
        config.workeroutput["xlafuse"] = _summary(config).to_json()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if found := getattr(node, "workeroutput", {}).get("xlafuse"):
        _session(node.config).summary.add(found)


def _summary(config: pytest.Config) -> SessionSummary:
    summary = config.stash[_SESSION].summary
    for name, nodes in config.stash[_NODES].items():
        getattr(summary, name).update(nodes)
    return summary


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _SESSION not in config.stash:
        return
    if lines := _summary(config).lines(config.rootpath):
        terminalreporter.section("fusion snapshots")
        for line in lines:
            terminalreporter.write_line(line)
