"""The prose check finds what breaks a rule, and nothing else."""

from __future__ import annotations

import pytest

from tools.prose import broken, of_comments, of_markdown, of_python, sentences


@pytest.mark.parametrize(
    ("sentence", "rules"),
    [
        ("Autotuned implementations compile last.", []),
        ("What tunes comes last.", ["opening"]),  # prose: ok
        ("What was fused?", []),
        ("A worker who hangs is killed.", ["process"]),  # prose: ok
        ("People who read this understand it.", []),
        ("The crew starts a worker.", ["private"]),  # prose: ok
        (f"A kernel {'very ' * 40}long.", ["long"]),
    ],
)
def test_rules(sentence: str, rules: list[str]) -> None:
    assert broken(sentence) == rules


def test_a_warps_lanes_are_no_private_word() -> None:
    assert broken("Each of 32 lanes adds one.", kernels=True) == []
    assert broken("Each of 32 lanes adds one.") == ["private"]  # prose: ok


def test_code_counts_as_one_word() -> None:
    assert broken("`who nobody clerk`") == []


def test_docstrings_comments_and_messages_of_python_are_read() -> None:
    source = (
        '"""Return one. Two."""\nx = 1  # a remark\n# A block\n# of two lines.\n'
        'raise ValueError("four words at least")\n'
    )
    assert {text for _, text, _ in of_python(source)} == {
        "Return one. Two.", "a remark", "A block\nof two lines.", "four words at least",
    }


def test_code_and_tables_of_markdown_are_not() -> None:
    source = "# Title\n\nOne sentence. Another.\n\n    code\n\n| a | table |\n\n```\nmore code\n```\n"
    found = [sentence for _, text, _ in of_markdown(source) for sentence in sentences(text)]
    assert found == ["One sentence.", "Another."]


def test_comments_of_other_languages_are_read() -> None:
    found = list(of_comments("// One.\n// Two.\nint x = 1; // a remark\nurl = 'http://x'\n"))
    assert found == [(1, "One.\nTwo.", True), (3, "a remark", False)]
