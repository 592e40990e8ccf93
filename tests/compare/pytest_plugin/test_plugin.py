"""The plugin in inner pytest runs: outcomes, messages of failures, snapshots and their summary.

Only the last test compiles: in the others, `fusion("apart")` returns a graph of example_graphs.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import example_graphs as examples
import pytest

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph import store
from xlafuse.compare.pytest_plugin import fixture
from xlafuse.compare.pytest_plugin.autotune_choices import AutotuneChoices
from xlafuse.compare.pytest_plugin.fusion import Fusion
from xlafuse.compare.user.explain import ExplainError, Identity

pytest_plugins = "pytester"

REQUIRE = fixture._require
ALONE = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")  # which imports half a second at the end of a run

# The inner runs load the plugin by hand where no installed entry point does.
CONFTEST = """
def pytest_addoption(pluginmanager):
    from xlafuse import pytest_plugin
    if not pluginmanager.is_registered(pytest_plugin):
        pluginmanager.register(pytest_plugin)
"""


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Import the modules of a failure's report once, or every inner run would import them again."""
    assert Fusion(examples.two_choices(), lambda *_: True).report()


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    compiles: list[str] = []
    pytester.compiles = compiles  # type: ignore[attr-defined]

    def identify(fn: str, args: Any, kwargs: Any, **_: Any) -> Identity:
        return Identity(fn, "jax", f"{fn}{args}{kwargs}")

    def compile_choices(fn: str, args: Any, kwargs: Any, *, name: str, **_: Any) -> AutotuneChoices:
        compiles.append(fn)
        if fn == "broken":
            message = f"TypeError: no (a.py:3) {kwargs.get('escape', '')}"
            raise ExplainError(message, frames='  File "a.py", line 3, in f\n', traceback=f"all of it\n{message}")
        version = kwargs.get("version", "0.10.2")
        if fn == "lacking":
            raise ExplainError("needs torch 2.13.0", kind="Unsupported", frames=kwargs.get("frames", ""))
        if fn == "both":
            return examples.two_choices(fn, version)
        if fn == "unread":
            return examples.single_choice(replace(examples.apart(), unparsed=("line 9: ?",)))
        return examples.single_choice({"apart": examples.apart, "together": examples.together}[fn](fn, version))

    monkeypatch.setattr(fixture, "identify", identify)
    monkeypatch.setattr(fixture, "compile_choices", compile_choices)
    monkeypatch.setattr(fixture, "_require", lambda framework: None)
    return pytester


def run(inner: pytest.Pytester, code: str, *options: str) -> pytest.RunResult:
    inner.makepyfile(test_it=code)
    return inner.runpytest_inprocess(*ALONE, "-p", "no:xdist", *options)


def outcome(inner: pytest.Pytester, body: str, *options: str) -> tuple[str, str]:
    """(the one word, all output) of one test."""
    result = run(inner, f"def test_it(fusion):\n    {body}\n", *options)
    (word,) = result.parseoutcomes().keys() - {"warning", "warnings"}
    return word, str(result.stdout)


def test_a_true_claim_passes(inner: pytest.Pytester):
    body = "g = fusion('together'); assert 'up' not in g.materialized and g.fused('up', 'act')"
    assert outcome(inner, body)[0] == "passed"


@pytest.mark.parametrize(
    ("claim", "shown"),
    [
        ("'up' not in g.materialized", "of layer/up, mlp.py:7; kernel 1 writes it, 2 reads it; not fused: gemm"),
        ("'act' in g.materialized", "not among the materialized buffers:"),
        ("g.stage('up').kernels == g.stage('act').kernels", "<1. gemm: layer/up>"),
        ("g.bytes_moved <= 1.1 * g.bytes_compulsory", "67108864 <= (1.1 * 33554432)"),
        ("g.fused('up', 'act')", "where False = fused('up', 'act')"),
        ("not g.materialized", "{layer/up bf16[2048,4096]}"),
    ],
)
def test_a_false_claim_fails_with_graph_and_reason(inner: pytest.Pytester, claim: str, shown: str):
    word, output = outcome(inner, f"g = fusion('apart'); assert {claim}")
    assert word == "failed" and shown in output
    assert "- fusion graph of apart -" in output and "gemm · reads 16.8 MB, writes 16.8 MB" in output
    assert "missed fusions" in output and "the producer is not fusible" in output
    assert "compare/pytest_plugin/" not in output  # the traceback ends at the test's own line


@pytest.mark.parametrize("verbose", ["-q", "-vv"])
def test_a_claim_false_for_every_choice_shows_each(inner: pytest.Pytester, verbose: str):
    claims = ("g.stage('layer').kernels == ()", "g.kernel_count > 2", "2 < g.kernel_count", "'act' in g.materialized")
    for claim in claims:
        word, output = outcome(inner, f"g = fusion('both'); assert {claim}", verbose)
        assert word == "failed" and "representation of details failed" not in output and "Undetermined" not in output
        assert output.count("Triton GEMM: ") + output.count("products by Triton GEMM:") >= 1
        assert output.count("cuBLAS: ") + output.count("products by cuBLAS:") >= 1


@pytest.mark.parametrize(
    ("claim", "shown"),
    [
        ("'ups' not in fusion('together').materialized", "did you mean 'up'; stages: layer/up, layer/act"),
        ("not fusion('together').stage('ups').materialized", "did you mean 'up'; stages: layer/up, layer/act"),
        ("fusion('unread')", "could not be read"),
    ],
)
def test_unknown_stages_and_unread_code_fail(inner: pytest.Pytester, claim: str, shown: str):
    word, output = outcome(inner, f"assert {claim}")
    assert word == "failed" and shown in output


def test_a_function_that_does_not_compile_shows_its_own_lines_first(inner: pytest.Pytester):
    word, output = outcome(inner, "fusion('broken')")
    assert word == "failed"
    shown = ("Traceback in your code", 'File "a.py", line 3', "TypeError: no", "all of it")
    places = [output.index(text) for text in shown]
    assert places == sorted(places) and "compare/pytest_plugin" not in output


def test_hostile_errors_and_names_are_escaped(inner: pytest.Pytester):
    word, output = outcome(inner, "fusion('broken', escape='\\x1b[2J\\r<b>' + 9_999 * 'x', name='\\x1b[2J<b>')")
    assert word == "failed" and "\x1b" not in output and "<b>xxx" in output and "x" * 600 not in output
    assert '  File "a.py", line 3, in f' in output
    body = "g = fusion('apart', name='\\x1b[2J<b>\\n' + 9_999 * 'x'); assert 'up' not in g.materialized"
    word, output = outcome(inner, body)
    assert word == "failed" and "\x1b[2J" not in output and "- fusion graph of [2J<b> xxx" in output


# Undetermined


@pytest.mark.parametrize("claim", ["'up' not in g.materialized", "'up' in g.materialized", "g.kernel_count == 1"])
def test_choices_that_disagree_are_undetermined(inner: pytest.Pytester, claim: str):
    body = f"g = fusion('both'); assert {claim}"
    word, output = outcome(inner, body)
    assert word == "failed" and "Undetermined: undetermined: " in output and "docs/pytest-plugin.md" in output
    assert "products by Triton GEMM -" in output and "products by cuBLAS -" in output
    word, output = outcome(inner, body, "-o", "xlafuse_undetermined=skip", "-rs")
    assert word == "skipped" and "undetermined: " in output


def test_only_undetermined_outcomes_are_skipped(inner: pytest.Pytester):
    for body in ("assert 'up' not in fusion('apart').materialized", "assert fusion('both').kernel_count > 2"):
        assert outcome(inner, body, "-o", "xlafuse_undetermined=skip")[0] == "failed"
    assert outcome(inner, "assert fusion('both').kernel_count <= 2", "-o", "xlafuse_undetermined=skip")[0] == "passed"


def test_a_users_fixture_may_use_fusion(inner: pytest.Pytester):
    code = (
        "import pytest\n@pytest.fixture\ndef few(fusion):\n    return bool(fusion('both').kernel_count == 1)\n"
        "def test_it(few):\n    assert few\n"
    )
    assert run(inner, code).parseoutcomes() == {"errors": 1}
    assert run(inner, code, "-o", "xlafuse_undetermined=skip").parseoutcomes() == {"skipped": 1}


def test_wrong_options_are_refused(inner: pytest.Pytester):
    for option in ("xlafuse_undetermined=pass", "xlafuse_missing=", "xlafuse_autotune=nowhere"):
        result = run(inner, "", "-o", option)
        assert result.ret == pytest.ExitCode.USAGE_ERROR and option.partition("=")[0] in str(result.stderr)


def test_missing_packages(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fixture, "_require", REQUIRE)
    monkeypatch.setitem(fixture._NEEDED, "jax", ("json", "no_such.package"))
    code = "def test_it(fusion):\n    fusion('apart')\n"
    result = run(inner, code)
    assert result.parseoutcomes() == {"failed": 1} and 'pip install "xlafuse[cpu]"' in str(result.stdout)
    assert run(inner, code, "-o", "xlafuse_missing=skip").parseoutcomes() == {"skipped": 1}


def test_errors_of_the_environment_count_as_missing_packages(inner: pytest.Pytester):
    for body, skipped in (("fusion('lacking')", "skipped"), ("fusion('lacking', frames='own')", "failed")):
        assert outcome(inner, body)[0] == "failed"
        assert outcome(inner, body, "-o", "xlafuse_missing=skip")[0] == skipped
    assert "needs torch 2.13.0" in outcome(inner, "fusion('lacking')")[1]


# One compile


def test_a_call_is_compiled_once_a_session(inner: pytest.Pytester):
    code = (
        "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_it(fusion, n):\n"
        "    assert fusion('apart').kernel_count == 2 and fusion('apart', 1).name == 'apart'\n"
        "def test_grad(fusion):\n    assert fusion('apart', grad=True) and fusion('apart', name='b').name == 'b'\n"
    )
    assert run(inner, code).parseoutcomes() == {"passed": 6}
    assert inner.compiles == ["apart"] * 3  # type: ignore[attr-defined]  # no argument, one, and grad
    code = "import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_it(fusion, n):\n    fusion('broken')\n"
    assert run(inner, code).parseoutcomes() == {"failed": 3}
    assert inner.compiles[3:] == ["broken"]  # type: ignore[attr-defined]


# Snapshots

SNAPSHOT = "g = fusion('{}', version='{}'); assert g.matches_snapshot()"


def files(inner: pytest.Pytester) -> list[str]:
    return sorted(path.name for path in Path(inner.path).glob("fusion_snapshots/test_it/*"))


def test_graphs_are_saved_by_test_and_choice(inner: pytest.Pytester):
    body = "fusion('apart'); fusion('both'); assert 0"
    assert outcome(inner, body, "--xlafuse-save", "graphs")[0] == "failed"
    saved = {path.name: store.load(path).name for path in (inner.path / "graphs").iterdir()}
    assert saved == {
        "test_it.test_it.json": "apart", "test_it.test_it+2-Triton-GEMM.json": "both",
        "test_it.test_it+2-cuBLAS.json": "both",
    }


def test_a_missing_snapshot_fails_and_is_not_written(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CI", "true")
    word, output = outcome(inner, SNAPSHOT.format("apart", "0.10.2"))
    assert word == "failed" and "has no snapshot yet" in output and "pytest --xlafuse-update" in output
    assert not files(inner)


def test_update_matches_and_differs(inner: pytest.Pytester):
    word, output = outcome(inner, SNAPSHOT.format("apart", "0.10.2"), "--xlafuse-update")
    assert word == "passed" and files(inner) == ["test_it@jax-0.10.2@h200.txt"]
    assert "written: fusion_snapshots/test_it/test_it@jax-0.10.2@h200.txt" in output
    word, output = outcome(inner, SNAPSHOT.format("apart", "0.10.2"))
    assert word == "passed" and "fusion snapshots" not in output
    word, output = outcome(inner, SNAPSHOT.format("together", "0.10.2"))
    assert word == "failed" and "-    writes intermediate bf16[2048,4096] 16777216" in output
    assert "--xlafuse-update, and commit" in output and "- fusion graph of together -" in output
    assert outcome(inner, SNAPSHOT.format("together", "0.10.2"), "--xlafuse-update")[0] == "passed"
    assert outcome(inner, SNAPSHOT.format("together", "0.10.2"))[0] == "passed"
    assert outcome(inner, "fusion('together'); assert fusion.matches_snapshot()")[0] == "passed"


def test_one_snapshot_holds_all_choices(inner: pytest.Pytester):
    assert outcome(inner, SNAPSHOT.format("both", "0.10.2"), "--xlafuse-update")[0] == "passed"
    assert outcome(inner, SNAPSHOT.format("both", "0.10.2"))[0] == "passed"
    assert outcome(inner, SNAPSHOT.format("apart", "0.10.2"))[0] == "failed"


def test_snapshots_of_other_versions_warn(inner: pytest.Pytester):
    outcome(inner, SNAPSHOT.format("apart", "0.10.2"), "--xlafuse-update")
    word, output = outcome(inner, SNAPSHOT.format("together", "0.11.2"))
    message = "no snapshot for jax 0.11.2 for h200; have jax 0.10.2 for h200. pytest --xlafuse-update records this one"
    assert word == "passed" and f"OtherVersions: {message}" in output
    assert f"not compared: test_it.py::test_it: {message}" in output
    strict = ("-W", "error::xlafuse.pytest_plugin.OtherVersions")
    assert outcome(inner, SNAPSHOT.format("together", "0.11.2"), *strict)[0] == "failed"
    assert outcome(inner, SNAPSHOT.format("together", "0.11.2"), "--xlafuse-update")[0] == "passed"
    assert files(inner) == ["test_it@jax-0.10.2@h200.txt", "test_it@jax-0.11.2@h200.txt"]


def test_several_snapshots_of_a_test_need_names(inner: pytest.Pytester):
    two = "a = fusion('apart'); b = fusion('together'); assert a.matches_snapshot() and b.matches_snapshot({})"
    word, output = outcome(inner, two.format(""), "--xlafuse-update")
    assert word == "failed" and "need names" in output
    assert outcome(inner, two.format("'second'"), "--xlafuse-update")[0] == "passed"
    assert outcome(inner, two.format("'second'"))[0] == "passed"
    assert files(inner) == ["test_it+second@jax-0.10.2@h200.txt", "test_it@jax-0.10.2@h200.txt"]
    assert outcome(inner, "fusion('apart'); fusion('together'); fusion.matches_snapshot()")[0] == "failed"
    assert outcome(inner, "fusion.matches_snapshot()")[0] == "failed"


MANY = """
import pytest
@pytest.mark.parametrize("n", ["../x", "a b", "<script>\\n", "é" * 500, "x" * 5000])
def test_hostile(fusion, n):
    assert fusion("apart").matches_snapshot()
def test_plain(fusion):
    assert fusion("apart").matches_snapshot("n/../\\n<b>")
class TestIn:
    def test_class(self, fusion):
        assert fusion("apart").matches_snapshot()
"""


def test_unused_snapshots_are_reported_where_a_whole_file_ran(inner: pytest.Pytester):
    assert run(inner, MANY, "--xlafuse-update").parseoutcomes() == {"passed": 7}
    again = run(inner, MANY)
    assert again.parseoutcomes() == {"passed": 7} and "fusion snapshots" not in str(again.stdout)
    assert len(files(inner)) == 7 and not list(Path(inner.path).parent.glob("x*"))  # each hostile name has its file
    fewer = MANY.replace(', "x" * 5000', "").replace('assert fusion("apart").matches_snapshot("n/../\\n<b>")', "pass")
    output = str(run(inner, fewer).stdout)
    assert output.count("unused, no test asks for it: fusion_snapshots/test_it/test_") == 2
    assert "unused, no test" not in str(run(inner, fewer, "-k", "class").stdout)
    assert "unused, no test" not in str(run(inner, fewer, "test_it.py::TestIn").stdout)
    failing = MANY.replace("def test_plain(fusion):", "def test_plain(fusion):\n    assert 0")
    assert "unused, no test" not in str(run(inner, failing).stdout)


# In separate processes


def test_xdist(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """With two worker processes, failures keep their graphs, and the summary covers both."""
    pytest.importorskip("xdist")
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    here = str(Path(__file__).parent)
    patched = f"""
import sys
sys.path.insert(0, {here!r})
import example_graphs as examples
from xlafuse.compare.user.explain import Identity
from xlafuse.compare.pytest_plugin import fixture
from xlafuse.compare.pytest_plugin.fusion import Fusion
fixture.identify = lambda fn, *_, **__: Identity(fn, "jax", fn)
fixture.compile_choices = lambda fn, *_, **__: examples.single_choice(getattr(examples, fn)())
fixture._require = lambda framework: None
"""
    pytester.makeconftest(patched + CONFTEST)
    pytester.makepyfile(test_it=MANY + "def test_bad(fusion):\n    assert 'up' not in fusion('apart').materialized\n")
    options = (*ALONE, "-n", "2")
    first = pytester.runpytest_subprocess(*options, "--xlafuse-update", timeout=60)
    assert first.parseoutcomes() == {"passed": 7, "failed": 1}
    assert str(first.stdout).count("written: fusion_snapshots/test_it/") == 7
    assert "- fusion graph of mlp -" in str(first.stdout)
    pytester.makepyfile(test_it=MANY.replace(', "x" * 5000', ""))
    second = pytester.runpytest_subprocess(*options, timeout=60)
    assert second.parseoutcomes() == {"passed": 6}
    assert str(second.stdout).count("unused, no test asks for it: ") == 1


def test_the_plugin_imports_nothing_until_a_test_uses_the_fixture(tmp_path: Path):
    """A session without the fixture passes all hooks, also that of a failed comparison."""
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "def pytest_unconfigure():\n"
        "    print('imported:', *sorted(n for n in sys.modules if n.split('.')[0] in "
        "('compare', 'xlafuse', 'triton_side', 'jax', 'torch', 'triton', 'numpy', 'click', 'cloudpickle')))\n"
    )
    (tmp_path / "test_it.py").write_text("def test_a():\n    assert 1 == 2\n\ndef test_b():\n    pass\n")
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *ALONE, "-p", "xlafuse.pytest_plugin"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=60,
    )
    assert "1 failed, 1 passed" in process.stdout, process.stdout + process.stderr
    (imported,) = [line for line in process.stdout.splitlines() if line.startswith("imported:")]
    assert imported.split()[1:] == ["xlafuse", "xlafuse.pytest_plugin"]


@pytest.mark.slow
def test_the_example_of_the_docs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """The example of docs/pytest-plugin.md compiles and prints what the page shows."""
    if importlib.util.find_spec("jax") is None:  # imported under pytester it would be dropped, and cannot be again
        pytest.skip("needs jax")
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.syspath_prepend(str(pytester.path))
    pytester.makeconftest(CONFTEST)
    page = (PROJECT / "docs" / "pytest-plugin.md").read_text()
    indented = textwrap.dedent("\n".join(line for line in page.splitlines() if line.startswith("    ") or not line))
    layers, rest = indented.partition("# layers.py\n")[2].split("# test_fusion.py\n", 1)
    wrong = "def test_wrong(fusion):\n    fusion(gated, X, jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), SCALE)\n"
    pytester.makepyfile(layers=layers, test_fusion=f"{rest.partition('$ pip')[0]}\n{wrong}")
    result = pytester.runpytest_subprocess(*ALONE, "-p", "no:xdist", "--xlafuse-update", timeout=200)
    assert result.parseoutcomes() == {"passed": 2, "failed": 2}
    result.stdout.fnmatch_lines([
        "E *xlafuse.compare.pytest_plugin.per_choice.Undetermined: undetermined: whether 'up' is among them depends on*"
    ])
    result.stdout.fnmatch_lines(["E *Traceback in your code*", "*in gated*", "*TypeError:*"])
    (file,) = (pytester.path / "fusion_snapshots" / "test_fusion").iterdir()
    written = file.read_text()
    if "jax 0.10.2" in written:  # whose text the page shows
        shown = indented.partition("fusion snapshot 1\n")[2]
        kept = [line for line in shown.splitlines() if line][: len(written.split("\n\n")[1].splitlines()) + 2]
        assert [line for line in written.splitlines()[1:] if line] == kept
        starts = ("├── declared bytes: 268 MB", "E    Triton", "E    cuBLAS")
        shown = [line for line in indented.splitlines() if line.startswith(starts)]
        assert len(shown) == 3
        for line in shown:
            assert " ".join(line.split()) in " ".join(str(result.stdout).split())
