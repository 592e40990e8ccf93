"""The workflows, issue forms and hooks: GitHub's schemas accept them, and each command that they run exists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {GITHUB / "ISSUE_TEMPLATE" / "config.yml"})
SCHEMAS = {
    "github-workflows": WORKFLOWS, "github-issue-forms": FORMS,
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}
PYTHON = ".venv/bin/python"  # `make setup` makes it


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_schema_accepts_the_files(schema: str) -> None:
    """The schemas are those that come with check-jsonschema, so this needs no network."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_exists() -> None:
    lines = [
        line for file in WORKFLOWS for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job.get("steps", ()) for line in step.get("run", "").splitlines()
    ]
    hooks = [hook["entry"] for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
             for hook in repo["hooks"]]
    assert len(lines) >= 8 and len(hooks) >= 3
    assert {line: problem for line in (*lines, *hooks) if (problem := _problem(line))} == {}


@pytest.mark.parametrize("command", [
    "make no-such-target", f"{PYTHON} -m tools.nothing", f"{PYTHON} tools/nothing.py", "tools/nothing.sh", "no-such x",
    "make test ARGS='--deselect tests/test_workflows.py::test_nothing'",
])
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert _problem(command)


def test_the_workflows_make_what_ci_makes() -> None:
    made = set(re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(), re.M))
    steps = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())["jobs"]["tests"]["steps"]
    assert made <= {step["run"].split()[1] for step in steps if step.get("run", "").startswith("make ")}


def test_the_tested_pythons_are_those_of_the_classifiers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    matrix = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == named
    assert all(more["untested"] and more["python"] not in named for more in matrix["include"])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_ask_for_the_output_of_doctor(form: Path) -> None:
    fields = [field for field in yaml.safe_load(form.read_text())["body"] if "xlafuse doctor" in str(field)]
    required = [field.get("validations", {}).get("required", False) for field in fields]
    assert required == [form.stem == "problem"]


def test_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changes = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version == changes[0]


def _problem(line: str) -> str | None:
    """Return what a command names that does not exist, or None. Packages of pip are not looked up."""
    program, *words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "VALUE", line))
    if program == "make":
        return _make_problem(words)
    if program == PYTHON:
        if words[0] != "-m":
            return None if (ROOT / words[0]).is_file() else f"no file {words[0]}"
        return None if _is_module(words[1]) else f"no module {words[1]}"
    if "/" in program:
        return None if (ROOT / program).is_file() else f"no file {program}"
    return None if shutil.which(program) else f"no program {program}"


def _make_problem(words: list[str]) -> str | None:
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    (target,) = (word for word in words if "=" not in word)
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return done.stderr
    file, _, test = settings.get("ARGS", "").rpartition(" ")[2].partition("::")
    if file and f"def {test}(" not in (ROOT / file).read_text():
        return f"no test {test} in {file}"
    return None


def _is_module(name: str) -> bool:
    """Ask another process: to look pip up changes which distutils a process imports."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0
