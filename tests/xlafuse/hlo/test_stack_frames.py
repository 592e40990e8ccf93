"""The chain of calls that XLA keeps for an instruction, from text and from a proto."""

from __future__ import annotations

import pytest

from xlafuse.hlo.stack_frames import Frame, StackFrames, is_library, place_of
from xlafuse.hlo.text_reader import parse

TEXT = """HloModule jit_step, is_scheduled=true

FileNames
1 "/opt/venv/lib/python3.12/site-packages/flax/nnx/nn/linear.py"
2 "train.py"
3 "<frozen runpy>"

FunctionNames
1 "Linear.__call__"
2 "Layer.__call__"
3 "<module>"

FileLocations
1 {file_name_id=3 function_name_id=3 line=88 end_line=88 column=4 end_column=27}
2 {file_name_id=2 function_name_id=3 line=23 end_line=24 column=68 end_column=9}
3 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=18 end_column=50}
4 {file_name_id=1 function_name_id=1 line=422 end_line=422 column=10 end_column=33}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=4}


ENTRY main {
  x = f32[4]{0} parameter(0)
  inner = f32[4]{0} negate(x), metadata={op_name="jit(step)/neg" stack_frame_id=4}
  outer = f32[4]{0} exponential(inner), metadata={op_name="jit(step)/exp" stack_frame_id=2}
  ROOT none = f32[4]{0} sine(outer), metadata={op_name="jit(step)/sin" stack_frame_id=1}
}
"""


def test_the_place_is_the_users_innermost_call() -> None:
    found = parse(TEXT).computations["main"].instructions
    assert found["inner"].source.endswith("linear.py:422") and found["inner"].place == "train.py:7:18-50 Layer.__call__"
    assert found["outer"].place == "train.py:23:68-24:9 <module>"
    assert found["none"].source and not found["none"].place and not found["x"].place


def test_a_circle_of_frames_ends() -> None:
    stack = StackFrames({1: Frame("/usr/lib/python3.11/a.py", 1, parent=2), 2: Frame("<string>", 2, parent=1)})
    assert len(list(stack.chain(1))) > 1 and stack.place(1) == "" and stack.place(7) == ""


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/home/me/venv/lib/python3.12/site-packages/flax/nnx/nn/linear.py", True),
        ("/usr/lib/python3/dist-packages/jax/numpy.py", True), ("<frozen runpy>", True), ("<string>", True),
        ("/usr/lib/python3.11/contextlib.py", True), ("train.py", False), ("/home/me/models/layers.py", False),
        ("/data/site/packages.py", False),
    ],
)
def test_libraries_are_told_from_the_users_files(file: str, library: bool) -> None:
    assert is_library(file) == library


def test_unknown_parts_of_a_place_are_left_out() -> None:
    assert place_of(Frame("a.py", 3)) == "a.py:3" and place_of(Frame("a.py", 3, "f")) == "a.py:3 f"


@pytest.mark.parametrize("number", ["abc", "-1", "9" * 40, "9" * 5000, '"7"'])
def test_a_number_that_is_no_frame_costs_the_line_alone(number: str) -> None:
    """Also in the tables, whose numbers no compiler prints that long."""
    text = TEXT.replace("stack_frame_id=4", f"stack_frame_id={number}").replace("line=23", f"line={'9' * 5000}")
    module = parse(text)
    found = module.computations["main"].instructions
    assert not module.unparsed and len(found) == 4
    assert not found["inner"].place and not found["inner"].source
