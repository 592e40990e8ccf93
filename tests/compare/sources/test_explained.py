"""`Explained`: its graphs, its text, saving and joining."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import xlafuse
from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, SourceOp
from xlafuse.compare.record.record_fields import TimesOfPhase
from xlafuse.compare.sources.explained import Explained
from xlafuse.compare.sources.result import Result, reader_of
from xlafuse.compare.sources.target_ceilings import own_ceilings, target_ceilings


def graph(name: str, *kernels: str) -> FusionGraph:
    """Make a chain of elementwise kernels over 1 MiB arrays."""
    buffers = [f"b{index}" for index in range(len(kernels) + 1)]
    roles = ["input", *["intermediate"] * (len(kernels) - 1), "output"]
    return FusionGraph(
        name, "xla",
        tuple(
            Kernel(
                kernel, "elementwise", source_ops=(SourceOp(kernel, stage=kernel),),
                inputs=(Access(buffers[index], 1 << 20),), outputs=(Access(buffers[index + 1], 1 << 20),),
            )
            for index, kernel in enumerate(kernels)
        ),
        tuple(Buffer(b, (1 << 18,), "f32", 1 << 20, role) for b, role in zip(buffers, roles, strict=True)),  # type: ignore
        target="h200",
    )


def test_one_graph_prints_with_its_notes():
    explained = Explained({"f": graph("f", "tanh")}, ("something is assumed",))
    assert explained.graph.name == "f"
    assert str(explained).splitlines()[0] == "f"
    assert str(explained).splitlines()[-1] == "note: something is assumed"
    assert repr(explained) == "<Explained: f>"
    assert max(map(len, explained.text(60).splitlines())) <= 60


def test_it_says_which_kernels_are_replayed():
    def explained(*provenances: str, jax: str, compiler: str = "xla") -> Explained:
        made = graph("f", *(f"k{number}" for number in range(len(provenances))))
        kernels = tuple(replace(k, provenance=p) for k, p in zip(made.kernels or (), provenances, strict=True))
        return Explained({"f": replace(made, kernels=kernels, versions={"jax": jax}, compiler=compiler)})

    def line(result: Explained) -> str:
        return " ".join(result.text(200).split()).partition("kernel configurations: ")[2]

    replayed = explained("compiled", "replayed", "replayed", jax="0.11.2")
    assert replayed.to_json()["provenance"] == {"f": {"replayed": 2, "compiled": 1}}
    assert line(replayed).startswith("2 replayed from the h200's")
    assert "jax 0.10.2" in line(explained("not autotuned", jax="0.10.2"))
    assert "do not cover" in line(explained("not autotuned", jax="0.11.2"))
    assert "recorded" not in line(explained("not autotuned", jax="0.11.2", compiler="inductor"))
    assert "kernel configurations" not in Explained({"f": graph("f", "tanh")}).text()
    both = explained("replayed", jax="0.11.2") | Explained({"g": graph("g", "tanh")})
    assert line(both).startswith("1 replayed")


def test_bytes_are_priced_by_the_graphs_target():
    on_h200 = replace(graph("f", "tanh"), target="NVIDIA H200")
    assert own_ceilings(on_h200)[0] is not None
    assert own_ceilings(replace(on_h200, target="NVIDIA X1"))[0] is None


@pytest.mark.parametrize("target", ["", "NVIDIA H200"])
def test_missed_fusions_use_the_best_known_ceilings(target: str):
    slow = Ceilings({0.5: 1e9}, {})
    read = reader_of(replace(graph("f", "tanh"), target=target))
    assert Result("f", 1, Path("f"), read, segment_ceilings=slow).priced_for(None) == (slow, "this run's device")
    own = (target_ceilings("h200"), "h200") if target else (None, "")
    assert Result("f", 1, Path("f"), read).priced_for(None) == own


def test_an_unknown_gpu_has_no_ceilings():
    assert own_ceilings(replace(graph("f", "tanh"), target="NVIDIA A100-PCIE-40GB")) == (None, "")


def test_two_results_are_joined():
    both = Explained({"a": graph("a", "tanh", "exp")}, ("n",)) | Explained({"b": graph("b", "tanh")}, ("n", "m"))
    assert list(both.graphs) == ["a", "b"] and both.notes == ("n", "m")
    assert "tanh" in both.text() and "note: m" in both.text()
    with pytest.raises(ValueError, match="another name="):
        _ = both | both


def test_saving_one_graph_and_several(tmp_path: Path):
    one = Explained({"f": graph("f", "tanh")})
    one.save(tmp_path / "new" / "one.json")
    assert xlafuse.load(tmp_path / "new" / "one.json") == one.graph
    two = Explained({"f": graph("f", "tanh"), "g": graph("g", "exp")}, ("a note",))
    two.save(tmp_path / "two.json")
    saved = json.loads((tmp_path / "two.json").read_text())
    assert saved == json.loads(json.dumps(two.to_json()))
    assert list(saved["graphs"]) == ["f", "g"] and saved["notes"] == ["a note"]
    with pytest.raises(ValueError, match="holds 2 graphs"):
        xlafuse.load(tmp_path / "two.json")


def test_one_of_several_keeps_its_times():
    times = {name: TimesOfPhase([[seconds]], None, None) for name, seconds in (("f", 1.0), ("g", 2.0))}
    both = Explained({"f": graph("f", "tanh"), "g": graph("g", "exp")}, times=times)
    assert both["f"].times == {"f": times["f"]} and list(both["g"].graphs) == ["g"]


def test_a_notebook_shows_each_finding_once():
    page = Explained({"f": graph("f", "tanh", "exp")})._repr_html_()
    assert page.count("largest intermediate") == 1


def test_markup_in_names_and_notes_is_escaped():
    page = Explained({"<f>": graph("<f>", "tanh")}, ("<b>",))._repr_html_()
    assert "<f>" not in page and "<b>" not in page and "&lt;b&gt;" in page


def test_functions_side_by_side_name_what_could_not_be_read() -> None:
    unread = replace(graph("g", "tanh"), unparsed=("mystery(buf0)",))
    assert "g: 1 thing could not be read: mystery(buf0)" in str(Explained({"f": graph("f", "tanh"), "g": unread}))
