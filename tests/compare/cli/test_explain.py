"""`xlafuse explain` before the compile: names, arguments and errors. No framework is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli.main import cli
from xlafuse.compare.functions.arguments import parse_arguments
from xlafuse.compare.functions.names import arguments_from, check_name, resolve
from xlafuse.compare.functions.parcel import ArrayLike

CODE = """\
import math
class Box:
    def __init__(self, scale): self.scale = scale
    def double(self, x): return 2 * x
box = Box(3)
def build(): return Box(5)
def fused(x): return x
def none(): return None
def pair(): return (1, 2), {"mode": "a"}
def several(): return 1, 2, 3
def named(): return {"x": 1}
def odd(): return {1: 2}
def raises(): return 1 / 0
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's file. explain puts its folder on sys.path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / f"user_code_{tmp_path.name.replace('-', '_')}.py"
    file.write_text(CODE)
    return str(file)


def test_a_misspelt_name_is_refused_before_the_import(tmp_path: Path) -> None:
    file = tmp_path / "slow_to_import.py"
    file.write_text("raise SystemExit('imported')\ndef fused(x): return x\nother = fused\n")
    for name in ("fused", "other", "fused.attribute"):
        check_name(f"{file}:{name}")
    result = CliRunner().invoke(cli, ["explain", f"{file}:fusd", "--args", "f32[8]"])
    assert result.exit_code == 2 and "did you mean fused" in result.stderr and "imported" not in result.stderr
    file.write_text("from math import *\nglobals()['made'] = sqrt\n")
    check_name(f"{file}:made")
    check_name(f"{file}:sqrt")


def array(dtype: str, *shape: int) -> ArrayLike:
    return ArrayLike("numpy", shape, dtype)


@pytest.mark.parametrize(
    ("text", "args", "kwargs"),
    [
        ("", (), {}),
        ("bf16[4096,128]", (array("bfloat16", 4096, 128),), {}),
        ("f32[], s32[2, 3],pred[1]", (array("float32"), array("int32", 2, 3), array("bool", 1)), {}),
        ("float16[8], 3, eps=1e-6", (array("float16", 8), 3), {"eps": 1e-6}),
        ("mode='a,b', mask=None, y=bf16[2]", (), {"mode": "a,b", "mask": None, "y": array("bfloat16", 2)}),
        ("(1, 2), axes=[0, 1]", ((1, 2),), {"axes": [0, 1]}),
    ],
)
def test_arguments_by_shape(text: str, args: tuple, kwargs: dict):
    assert parse_arguments(text) == (args, kwargs)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("bf61[2]", "did you mean"), ("bf16[2,x]", "neither a shape"), ("bf16[2],,bf16[2]", "between two commas"),
        ("x=1, bf16[2]", "comes after"), ("x=1, x=2", "twice"), ("open('f')", "neither a shape"), ("[1", "neither"),
    ],
)
def test_malformed_arguments(text: str, complaint: str):
    with pytest.raises(UsageError, match=complaint):
        parse_arguments(text)


def test_names_of_functions(code: str):
    assert resolve(f"{code}:fused").__name__ == "fused"
    assert resolve(f"{code}:box.double")(4) == 8
    assert resolve(f"{code}:build()").scale == 5
    assert resolve("math:sqrt")(9) == 3


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("{code}:fusd", "did you mean fused"), ("{code}", "write package.module:name"), ("{code}:", "write package"),
        ("{code}:box()", "cannot be called"), ("{code}:raises()", r"ZeroDivisionError: .* \(.*\.py:13\)"),
        ("nowhere.py:f", "no such file"), ("no_such_module_here:f", "no module"), ("math:sqrd", "did you mean"),
    ],
)
def test_unknown_names(code: str, name: str, complaint: str):
    with pytest.raises(UsageError, match=complaint):
        resolve(name.format(code=code))


def test_a_file_named_like_another_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("def f(): pass\n")
    with pytest.raises(UsageError, match="another module is called 'json'"):
        resolve(f"{tmp_path / 'json.py'}:f")


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("no_syntax.py", "def f(:\n", r"invalid syntax \(no_syntax.py, line 1\)$"),
        ("library_error.py", "import json\nx = 1\njson.loads('{')\n", r"library_error.py:3\)$"),
        ("v1.2.py", "def f(): pass\n", "rename"),
    ],
)
def test_a_failed_import_blames_a_line_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, complaint: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / file).write_text(text)
    with pytest.raises(UsageError, match=complaint):
        resolve(f"{tmp_path / file}:f")


def test_only_our_output_is_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "prints.py").write_text("print('at import')\ndef f():\n    print('in a call')\n    return 1\n")
    resolve(f"{tmp_path / 'prints.py'}:f()"), arguments_from(f"{tmp_path / 'prints.py'}:f")
    out, err = capsys.readouterr()
    assert out == "" and err.count("at import") == 1 and err.count("in a call") == 2


def test_inputs_arguments_from_a_function(code: str):
    assert arguments_from(f"{code}:pair") == ((1, 2), {"mode": "a"})
    assert arguments_from(f"{code}:several") == ((1, 2, 3), {})
    assert arguments_from(f"{code}:named()") == ((), {"x": 1})
    assert arguments_from(f"{code}:none") == ((None,), {})
    with pytest.raises(UsageError, match="not all names"):
        arguments_from(f"{code}:odd")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["{code}:fused", "--args", "bf16[2]"], "say framework="),
        (["{code}:fused", "--args", "bf16[2]", "--inputs", "{code}:pair"], "choose one"),
        (["{code}:fused", "--args", "bf16[2]", "--target", "h20"], "did you mean h200"),
        (["{code}:fused", "{code}:fused"], "named twice"),
        (["{code}:fused", "--framework", "tensorflow"], "jax"),
        (["math:sqrt", "math:exp", "--xla-flag", "a=1"], "variants of one function, got 2"),
        (["math:sqrt", "--framework", "torch", "--xla-flag", "a=1"], "does not fit settings of jax's compiler"),
    ],
)
def test_errors_are_one_line(code: str, options: list[str], complaint: str):
    result = CliRunner().invoke(cli, ["explain", *(option.format(code=code) for option in options)])
    assert result.exit_code in (1, 2)
    assert complaint in result.output
    assert len(result.output.strip().splitlines()) == 1 or "Usage:" in result.output
    assert "Traceback" not in result.output
