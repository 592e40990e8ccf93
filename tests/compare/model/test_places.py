"""Places in a user's files: their text, which encloses which, and the names that their author gave."""

from __future__ import annotations

from pathlib import Path

import pytest

from xlafuse.compare.model.places import Place, Sources, parent_of, parse, sources_beside

CODE = """class Layer:
    def __call__(self, x):
        x = x + self.out(attend(self.q(x), self.k(x)).reshape(x.shape))
        return self.down(
            silu(self.gate(x)) * self.up(x))
"""


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("train.py:8:20-82 Layer.__call__", Place("train.py", 8, "Layer.__call__", (8, 20), (8, 82))),
        ("/a b/t.py:8:20-9:4 f.<locals>.g", Place("/a b/t.py", 8, "f.<locals>.g", (8, 20), (9, 4))),
        ("train.py:12 forward", Place("train.py", 12, "forward")), ("C:/t.py:3", Place("C:/t.py", 3)),
        ("", None), ("layers_0/attention", None),
    ],
)
def test_a_places_text(text: str, place: Place | None) -> None:
    assert parse(text) == place


def at(code: str, function: str = "Layer.__call__") -> Place:
    """The place of a piece of CODE."""
    begin = CODE.index(code)
    line, column = CODE[:begin].count("\n") + 1, begin - (CODE.rfind("\n", 0, begin) + 1)
    last = begin + len(code)
    end = CODE[:last].count("\n") + 1, last - (CODE.rfind("\n", 0, last) + 1)
    return Place("model.py", line, function, (line, column), end)


def test_the_smallest_call_around_a_place_is_its_parent() -> None:
    outer, inner, attend = at("self.out(attend(self.q(x), self.k(x)).reshape(x.shape))"), at("self.q(x)"), at(
        "attend(self.q(x), self.k(x))"
    )
    places = [outer, inner, attend, at("self.gate(x)"), Place("model.py", 3)]
    assert parent_of(inner, places) == attend and parent_of(attend, places) == outer
    assert parent_of(outer, places) is None and parent_of(Place("model.py", 3), places) is None
    assert parent_of(at("self.q(x)", "Other.__call__"), places) is None


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("self.q(x)", "self.q"), ("attend(self.q(x), self.k(x))", "attend"),
        ("silu(self.gate(x)) * self.up(x)", "silu"),
        ("self.down(\n            silu(self.gate(x)) * self.up(x))", "self.down"),
        ("x.shape", "attend(self.q(x), self.k(x)).reshape"),
    ],
)
def test_a_place_is_named_by_what_it_calls(tmp_path: Path, code: str, name: str) -> None:
    (tmp_path / "model.py").write_text(CODE)
    assert Sources((tmp_path,)).label(at(code)) == name


def test_without_the_file_a_place_has_the_name_of_its_function(tmp_path: Path) -> None:
    sources = Sources((tmp_path,))
    assert sources.label(at("self.q(x)")) == "Layer.__call__" and sources.label(Place("model.py", 3)) == "model.py:3"
    (tmp_path / "broken.py").write_text("def (")
    assert sources.label(Place("broken.py", 1, "f", (1, 0), (1, 2))) == "f"


def test_the_copies_of_a_capture_are_read_and_not_the_files(tmp_path: Path) -> None:
    copies = tmp_path / "capture" / "sources"
    copies.mkdir(parents=True)
    (tmp_path / "model.py").write_text("changed = 1\n" + CODE)
    assert sources_beside(tmp_path / "capture").label(at("self.q(x)")) == "Layer.__call__"
    (copies / "model.py").write_text(CODE)
    assert sources_beside(tmp_path / "capture").label(at("self.q(x)")) == "self.q"


def test_calls_of_methods_and_functions_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("for x in data:\n    loss = step(x)\n    optimizer.step()\n    other[0](step)\n")
    assert Sources((tmp_path,)).calls(("step",), ["train.py"]) == ["train.py:2", "train.py:3"]
    assert not Sources((tmp_path,)).calls(("",), ["train.py"])
