"""XLA's decisions on missed fusions, under the names of the finished module."""

import gzip
import shutil
import sqlite3
import zipfile
from pathlib import Path

import pytest

from xlafuse.dumps import artifacts, dump_folder
from xlafuse.dumps.fusion_log import (
    Estimated,
    Fused,
    FusionLog,
    Ineligible,
    LogError,
    Refusal,
    read_frames,
    read_log,
    refusals,
)
from xlafuse.hlo.text_reader import parse
from xlafuse.reasons import fusion_decisions
from xlafuse.reasons.fusion_replay import Replay

DATA = Path(__file__).parents[2] / "data" / "xla_reasons"
VERSIONS = ("jax-0.10.2", "jax-0.11.2")


def lines(path: Path) -> list[str]:
    with gzip.open(path, "rt") as text:
        return text.readlines()


def replay(folder: Path) -> Replay:
    (file,) = folder.glob("*priority_fusion_dump.txt.gz")
    log = read_log(lines(file))
    assert not log.unparsed
    return Replay(parse(log.module), log.steps)


# The log


LOG = """fusion_steps {
  update_priority {
    producer_name: "a.0"
    consumer_names: "b.0"
    consumer_names: "c.0"
    us_fused: 3
    us_unfused: 4.5
  }
}
fusion_steps {
  fusion {
    fusion_name: "fusion"
    producer_name: "a.0"
    consumer_name: "b.0"
  }
}
fusion_steps {
  producer_ineligible {
    producer_name: "c.0"
    reason: "can\\"t \\303\\251"
  }
}
gpu_device_info {
  cores: 132
  nested {
    producer_name: "nobody"
  }
}
hlo_module_before_fusion: "HloModule m\\n\\nENTRY e {\\n}\\n"
"""


def test_a_log_is_read_step_by_step() -> None:
    log = read_log(LOG.splitlines())
    assert log.steps == [
        Estimated("a.0", ("b.0", "c.0"), 3.0, 4.5),
        Fused("a.0", "b.0", "fusion"),
        Ineligible("c.0", 'can"t é'),
    ]
    assert log.module == "HloModule m\n\nENTRY e {\n}\n"
    assert not log.unparsed


def test_a_truncated_log_keeps_its_complete_steps() -> None:
    whole = read_log(LOG.splitlines()).steps
    for end in range(len(LOG)):
        steps = read_log(LOG[:end].splitlines()).steps
        assert steps == whole[: len(steps)]
    assert len(steps) == 3


def test_other_lines_are_listed() -> None:
    log = read_log(["}", "}", "\x00\xff", "fusion_steps {", "  surprise {", '    producer_name: "a"', "  }", "}"])
    assert not log.steps
    assert [number for number, _ in log.unparsed] == [3, 7]


def test_estimates_of_changed_consumers_add_up() -> None:
    """XLA logs the changes; the visualisation of the same compile has the total benefit, -39.811 us."""
    state = replay(DATA / "jax-0.11.2" / "mlp")
    last = state.last["fusion.43"]
    assert isinstance(last, Estimated)
    assert last.unfused_us - last.fused_us == pytest.approx(-39.811, abs=1e-3)
    labels = read_frames(next((DATA / "jax-0.11.2" / "mlp").glob("*.pyz")))
    assert [label for label in labels if label.startswith("Rejected |fusion.43|")][-1].endswith("(-39.811us)")


@pytest.mark.parametrize("folder", sorted(DATA.glob("jax-*/*")), ids=lambda folder: "/".join(folder.parts[-2:]))
def test_no_profitable_fusion_is_left(folder: Path) -> None:
    """XLA fuses each producer that it expects to gain, so the replay must not end with one."""
    state = replay(folder)
    estimated = [last for node, last in state.last.items() if node in state and isinstance(last, Estimated)]
    assert all(last.unfused_us < last.fused_us for last in estimated)


# The visualisation


def test_both_forms_of_the_visualisation_name_the_pair() -> None:
    (html,) = (DATA / "jax-0.10.2" / "mlp").glob("*.html")
    (pyz,) = (DATA / "jax-0.11.2" / "mlp").glob("*.pyz")
    slower = Refusal("multi_output_fusion", "fusion.43", "fusion.38", "will execute slower if fused")
    assert slower in refusals(read_frames(pyz))
    assert "will execute slower if fused" in [refusal.reason for refusal in refusals(read_frames(html))]
    loop = "fusion into output of a reduce fusion would create a loop fusion"
    assert Refusal("priority-fusion", "fusion.38", "fusion.40", loop) in refusals(read_frames(pyz))


def test_a_damaged_visualisation_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.pyz").write_bytes(b"#!python\nno zip")
    (tmp_path / "b.html").write_text("<html>")
    (tmp_path / "c.html").write_text("const frames = [[0, ")
    (tmp_path / "d.html").write_text("const frames = " + "[" * 50_000)
    with zipfile.ZipFile(tmp_path / "e.pyz", "w") as archive:
        archive.writestr("fusions.db", b"SQLite format 3\x00" + bytes(100))
    with zipfile.ZipFile(tmp_path / "f.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(LogError, match=path.name):
            read_frames(path)


def test_an_endless_view_is_not_read(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "fusions.db")
    database.execute(
        "CREATE VIEW frames AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) "
        "SELECT id, 'label' AS label FROM n"
    )
    database.close()
    with zipfile.ZipFile(tmp_path / "a.pyz", "w") as archive:
        archive.write(tmp_path / "fusions.db", "fusions.db")
    with pytest.raises(LogError, match="no table `frames`"):
        read_frames(tmp_path / "a.pyz")


# The join


@pytest.mark.parametrize("version", VERSIONS)
def test_decisions_on_the_mlp(version: str) -> None:
    found = {(v.producer, v.consumer): v for v in reversed(fusion_decisions.read_decisions(DATA / version / "mlp"))}
    product = found["gemm_fusion_dot.5", "input_add_reduce_fusion"]
    assert (product.text, product.barrier) == ("the producer is not fusible", "gemm")
    assert not product.refused_by
    slower = next(v for v in found.values() if v.fused_us is not None)
    assert slower.unfused_us is not None and slower.fused_us is not None and slower.fused_us > slower.unfused_us
    assert slower.text == f"us_fused: {slower.fused_us} us_unfused: {slower.unfused_us}"
    assert not [v for v in found.values() if not v.producer]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_result_that_leaves_a_loop_has_only_a_producer(version: str) -> None:
    """The backward loop reads the forward loop's stacked inputs."""
    (leaving,) = [
        v
        for v in fusion_decisions.read_decisions(DATA / version / "scan")
        if v.log_producer.startswith("fusion.4") and not v.consumer and "dynamic_update_slice" in v.producer
    ]
    assert (leaving.text, leaving.barrier) == ("the consumer is not fusible", "output")


@pytest.mark.parametrize("version", VERSIONS)
def test_checkpointing_puts_a_barrier_before_its_inputs(version: str) -> None:
    """The recomputed layer reads its input through an optimization barrier, which later passes remove."""
    behind_barrier = [v for v in fusion_decisions.read_decisions(DATA / version / "scan") if v.barrier == "order"]
    assert {v.producer for v in behind_barrier} and all("dynamic_slice" in v.producer for v in behind_barrier)
    assert "input_reduce_fusion" in {v.consumer for v in behind_barrier}


def test_the_consumer_that_refused_is_named() -> None:
    found = fusion_decisions.read_decisions(DATA / "jax-0.11.2" / "odd")
    assert ("input_transpose_fusion.1", "input_reduce_fusion.2", "output", "tuple.3.0") in [
        (v.producer, v.consumer, v.barrier, v.refused_by) for v in found
    ]


def test_only_the_visualisation_names_pairs() -> None:
    """Without it there are only the log's decisions, and none of multi-output fusion."""
    (module,) = dump_folder.modules(DATA / "jax-0.11.2" / "mlp")
    seen = {v.fusion_pass for v in fusion_decisions.read_decisions(module.artifacts)}
    module.artifacts.files = {n: f for n, f in module.artifacts.files.items() if not n.endswith(".pyz")}
    unseen = fusion_decisions.read_decisions(module.artifacts)
    assert seen == {"priority-fusion", "multi_output_fusion"}
    assert {v.fusion_pass for v in unseen} == {"priority-fusion"}


def test_an_ambiguous_match_names_no_kernel() -> None:
    """Two instructions share name, opcode and shape, so their decision has no kernel."""
    head, tail = "HloModule m\nENTRY e {\n  p = f32[8] parameter(0)\n", "  ROOT t = (f32[8]) tuple({})\n}}\n"
    twins = "  mul.1.0 = f32[8] multiply(p, p)\n  mul.1.5 = f32[8] multiply(p, p)\n"
    before = head + twins + "  add.2.0 = f32[8] add(mul.1.0, mul.1.5)\n" + tail.format("add.2.0")
    one = "  mul.1.7 = f32[8] multiply(p, p)\n  add.2.1 = f32[8] add(mul.1.7, mul.1.7)\n"
    after = head + one + tail.format("add.2.1")
    log = FusionLog([Ineligible("mul.1.0", "both the producer and the consumer contain a reduce")], before)
    (decision,) = fusion_decisions.join_decisions(parse(after), log)
    assert (decision.producer, decision.consumer, decision.log_producer) == ("", "", "mul.1.0")


def test_an_asynchronous_product_with_a_workspace_is_the_producer() -> None:
    """Its computation returns one array of the library call, which replaced the log's product."""
    x, product = "f32[8,8]", "dot(p, p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    before = (
        f"HloModule m\nENTRY e {{\n  p = {x} parameter(0)\n  dot.1.0 = {x} {product}\n"
        f"  neg.2.0 = {x} negate(dot.1.0)\n  ROOT t = ({x}) tuple(neg.2.0)\n}}\n"
    )
    after = (
        f"HloModule m\n\nasync {{\n  q = {x} parameter(0)\n"
        f'  call.1 = ({x}, s8[64]) custom-call(q, q), custom_call_target="__cublas$gemm"\n'
        f"  ROOT part = {x} get-tuple-element(call.1), index=0\n}}\n\n"
        f"ENTRY e {{\n  p = {x} parameter(0)\n  start = (({x}), {x}) async-start(p), calls=async\n"
        f"  done = {x} async-done(start), calls=async\n  neg.2.1 = {x} negate(done)\n"
        f"  ROOT t = ({x}) tuple(neg.2.1)\n}}\n"
    )
    log = FusionLog([Ineligible("dot.1.0", "the producer is not fusible")], before)
    decisions = fusion_decisions.join_decisions(parse(after), log)
    assert [(one.producer, one.consumer) for one in decisions] == [("call.1", "neg.2.1")]


def test_without_a_log_there_are_no_decisions(tmp_path: Path) -> None:
    hlo = "HloModule m\n\nENTRY %e () -> f32[] {\n  ROOT %c = f32[] constant(1)\n}\n"
    (tmp_path / "optimized.hlo.txt").write_text(hlo)
    assert fusion_decisions.read_decisions(tmp_path) == []
    (tmp_path / "optimized.hlo.txt").unlink()
    (tmp_path / "priority_fusion.txt").write_text("")
    with pytest.raises(FileNotFoundError, match="no optimized HLO"):
        fusion_decisions.read_decisions(tmp_path)


def test_the_projects_dump_keeps_the_labels(tmp_path: Path) -> None:
    """`keep_artifacts` keeps the labels of a visualisation, one a line."""
    (pyz,) = (DATA / "jax-0.11.2" / "mlp").glob("*.pyz")
    raw, kept = tmp_path / "raw", tmp_path / "kept"
    raw.mkdir()
    kept.mkdir()
    for number in (1, 3):  # the newest module counts
        (raw / f"module_000{number}.jit_f.before_optimizations.txt").write_text(f"{number}")
    shutil.copy(pyz, raw / "main.9.module_0003.jit_f._fusion.pyz")
    found = artifacts.keep_artifacts(raw, kept, "jit_f", "")
    assert found["hlo_before"].read_text() == "3"
    assert refusals(read_frames(found["fusion_frames"])) == refusals(read_frames(pyz))
    assert artifacts.dump_options(raw, visualization=True).items() - artifacts.dump_options(raw).items() == {
        ("xla_dump_fusion_visualization", True)
    }
