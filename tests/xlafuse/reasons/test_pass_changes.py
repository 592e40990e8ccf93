"""The changes of each pass in captured compiles."""

from pathlib import Path

from xlafuse.dumps.dump_folder import Artifacts, File, modules
from xlafuse.reasons.pass_changes import NewFusion, read_pass_changes

DATA = Path(__file__).parents[2] / "data" / "xla_reasons"

BEFORE = """HloModule m
ENTRY e {
  p = f32[8] parameter(0)
  a = f32[8] multiply(p, p)
  b = f32[8] exponential(a)
  ROOT c = f32[8] negate(p)
}
"""
FUSED = """HloModule m
fused {
  q = f32[8] parameter(0)
  a.1 = f32[8] multiply(q, q)
  ROOT b.1 = f32[8] exponential(a.1)
}
ENTRY e {
  p = f32[8] parameter(0)
  fusion = f32[8] fusion(p), kind=kLoop, calls=fused
  ROOT c = f32[8] negate(p)
}
"""
RENAMED = FUSED.replace("fusion =", "loop_fusion =")
CALLING = RENAMED.replace("negate(p)", 'custom-call(p), custom_call_target="__cublas$gemm"').replace("ROOT c", "ROOT d")


def folder(path: Path, *snapshots: tuple[str, str]) -> Artifacts:
    """Snapshots by XLA's file names, in the order of their numbers."""
    path.mkdir(exist_ok=True)
    files = {}
    for number, (between, text) in enumerate(snapshots):
        (path / f"{number}.txt").write_text(text)
        files[f"{number:04d}.fusion.{between}.txt"] = File(path / f"{number}.txt")
    return Artifacts(str(path), files)


def test_each_pass_in_a_line(tmp_path: Path) -> None:
    changes = read_pass_changes(
        folder(
            tmp_path,
            ("after_pipeline-start.before_priority-fusion", BEFORE),
            ("after_priority-fusion.before_cse", FUSED),
            ("after_pipeline-start.before_rename_fusions", FUSED),
            ("after_rename_fusions.before_gemm-rewriter", RENAMED),
            ("after_dce.before_scheduler", CALLING),
            ("after_scheduler.before_pipeline-end", CALLING.replace("HloModule m", "HloModule m, is_scheduled=true")),
        )
    )
    assert [str(change) for change in changes] == [
        "priority-fusion: 2 instructions into 1 fusion; fusion took multiply, exponential",
        "rename_fusions: 1 renamed (fusion -> loop_fusion)",
        "gemm-rewriter to dce: d calls __cublas$gemm",
        "scheduler: scheduled",
    ]
    fused, _, rewritten, _ = changes
    assert fused.fusions == (NewFusion("fusion", ("multiply", "exponential")),)
    assert (fused.appeared, fused.vanished, fused.instructions) == (("fusion",), ("a", "b"), (3, 2))
    assert fused.opcodes == {"fusion": 1} and fused.computations == (1, 2)
    assert rewritten.custom_calls == (("d", "__cublas$gemm"),) and rewritten.vanished == ("c",)


def test_unused_computations_do_not_count(tmp_path: Path) -> None:
    """Priority fusion leaves unused computations behind."""
    dead = FUSED.replace("ENTRY", "left_behind {\n  r = f32[8] parameter(0)\n  ROOT s = f32[8] sine(r)\n}\nENTRY")
    (change,) = read_pass_changes(folder(tmp_path, ("after_a.before_b", BEFORE), ("after_b.before_c", dead)))
    assert change.instructions == (3, 2) and "sine" not in change.opcodes


def test_a_changed_layout_is_not_a_change(tmp_path: Path) -> None:
    other = BEFORE.replace("f32[8]", "f32[8]{0}")
    assert read_pass_changes(folder(tmp_path, ("after_a.before_b", BEFORE), ("after_b.before_c", other))) == []


def test_xlas_own_dump() -> None:
    (module,) = modules(DATA / "jax-0.11.2" / "mlp")
    by_pass = {change.passes: change for change in read_pass_changes(module.artifacts)}
    products = by_pass["triton-gemm-rewriter"].fusions
    assert products and all("dot" in made.opcodes for made in products)
    fused = by_pass["priority-fusion"]
    assert fused.instructions[0] > 2 * fused.instructions[1]
    assert any({"rsqrt", "reduce"} & set(made.opcodes) for made in fused.fusions)
    assert dict(by_pass["rename_fusions"].renamed)["fusion.43"] == "loop_add_fusion.1"


def test_the_projects_own_dump(artifacts: Path) -> None:
    """Each pass has two snapshots, and nothing is dumped in between."""
    module = next(m for m in modules(artifacts / "swiglu_mlp-llama-8b-bf16-train-xla.zip") if m.name == "forward")
    changes = read_pass_changes(module.artifacts)
    assert [change.passes for change in changes] == [
        "triton-gemm-rewriter", "priority-fusion", "multi_output_fusion", "rename_fusions",
    ]
    assert changes[0].fusions[0] == NewFusion("gemm_fusion_dot_general.3", ("multiply", "dot"))
    assert str(changes[2]).startswith("multi_output_fusion: 7 instructions into 4 fusions; ")
