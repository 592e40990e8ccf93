"""The text of an issue beside an extracted kernel: it has only what the path holds, and quotes it as text."""

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli.main import cli
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.user.issue_report import extract_and_report

DATA = Path(__file__).parents[2] / "data"
INDUCTOR = DATA / "inductor/torch-2.13.0/debug"
RUNS = PROJECT / "reports"

HOSTILE = """HloModule m, is_scheduled=true

%fused (x: f32[7,3]) -> f32[7,3] {
  %x = f32[7,3]{1,0} parameter(0)
  ROOT %y = f32[7,3]{1,0} tanh(%x), metadata={op_name="jit(f)/*b*`<script>|[a](x) @you #1"}
}

ENTRY %main (x: f32[7,3]) -> f32[7,3] {
  %x = f32[7,3]{1,0} parameter(0)
  ROOT %fusion_a_b = f32[7,3]{1,0} fusion(%x), kind=kLoop, calls=%fused
}
"""


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


def test_a_run_gives_the_times_and_both_compilers_code(tmp_path: Path) -> None:
    out = tmp_path / "repro.py"
    words = ["loop_multiply_fusion", "--module", "gelu/llama-8b/bf16/fwd/xla", "-o", str(out), "--report"]
    said = CliRunner().invoke(cli, ["extract", str(RUNS / "h100"), *words])
    assert said.exit_code == 0 and f"{tmp_path / 'repro.md'}: the text of an issue for openxla/xla" in said.output
    text = (tmp_path / "repro.md").read_text()
    title = "# XLA: elementwise kernel of `integer_pow, mul, add, convert, tanh`, 87.0 µs on NVIDIA H100 80GB HBM3"
    assert text.splitlines()[0] == title
    assert "It reads 117 MB and writes 117 MB." in text
    assert "Its launch takes 87.0 µs on NVIDIA H100 80GB HBM3, 1.13 times its roofline time." in text
    assert "- jax `0.11.2`" in text and "- GPU: `NVIDIA H100 80GB HBM3`" in text
    assert sections(text) == [
        "Versions", "Reproducer", "What XLA makes of it", "What Inductor makes of the same block",
    ]
    assert out.read_text() in text and "%tanh" in text and "@triton.jit" in text
    assert "Inductor takes 78.9 µs, XLA 87.0 µs." in text
    assert len(text) < 65_536


def test_a_missed_fusion_is_the_title(tmp_path: Path) -> None:
    module = "rmsnorm/llama-8b/bf16/train/xla"
    extract_and_report(RUNS / "h200", "input_convert_reduce_fusion", module, tmp_path / "repro.py")
    title, _, about, *_ = (tmp_path / "repro.md").read_text().splitlines()
    assert title.startswith("# XLA does not fuse `convert_element_type, mul, reduce_sum` with `mul, ")
    assert "It is not fused with `loop_convert_multiply_fusion`" in about
    assert "XLA's reason: `the consumer is not fusible`" in about
    assert re.search(r"One kernel would save 268 MB, 64\.\d µs by bytes", about)


def test_a_dump_without_a_gpu_has_no_times_and_no_other_compiler(tmp_path: Path) -> None:
    extract_and_report(INDUCTOR, "triton_poi_fused_mul_sigmoid_1", None, tmp_path / "repro.py")
    text = (tmp_path / "repro.md").read_text()
    assert sections(text) == ["Reproducer", "What Inductor makes of it"]
    about = text.partition("## Reproducer")[0]
    assert " take" not in about and "GPU:" not in about and "XLA" not in about


def test_a_capture_gives_versions_and_says_which_reasons_are_inferred(tmp_path: Path) -> None:
    (source,) = open_source(DATA / "profiles/torch").results
    graph = source.load()
    of_products = [one for one in graph.reasons if one.producer.startswith("triton_") and one.code == "gemm"]
    inferred = max(of_products, key=lambda one: one.bytes_saved or 0)
    assert inferred.origin == "inferred"
    extract_and_report(DATA / "profiles/torch", inferred.producer, None, tmp_path / "repro.py")
    text = (tmp_path / "repro.md").read_text()
    assert {"- python `3.12.3`", "- torch `2.11.0+cu130`", "- triton `3.6.0`"} <= set(text.splitlines())
    assert f"xlafuse infers the reason: `{inferred.text}`" in text and "Inductor's reason" not in text
    extract_and_report(DATA / "profiles/jax", "fusion_591", None, tmp_path / "of_jax.py")
    assert {"- jax `0.11.2`", "- jaxlib `0.11.2`"} <= set((tmp_path / "of_jax.md").read_text().splitlines())


def test_the_text_says_what_the_program_does(tmp_path: Path) -> None:
    folder = shutil.copytree(INDUCTOR, tmp_path / "dump")
    kernel = "triton_poi_fused_mul_sigmoid_1"
    checks = []
    for name in ("whole", "without"):
        extract_and_report(folder, kernel, None, tmp_path / f"{name}.py")
        text = (tmp_path / f"{name}.md").read_text()
        checks.append(("checks the results" in text, "lacks the operations" in text.partition("<details>")[0]))
        for file in folder.rglob("output_code.py"):  # its comments have the operations
            kept = [line for line in file.read_text().splitlines() if not line.startswith("#")]
            file.write_text("\n".join(kept) + "\n")
    assert checks == [(True, False), (False, True)]


def test_quoted_text_stays_text(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text(HOSTILE)
    extract_and_report(tmp_path / "m.txt", "fusion_a_b", None, tmp_path / "repro.py")
    text = (tmp_path / "repro.md").read_text()
    kinds = [
        (inner.type, inner.content) for token in MarkdownIt().parse(text) for inner in (token, *(token.children or ()))
    ]
    html = [content for kind, content in kinds if kind.startswith("html")]
    assert {kind for kind, _ in kinds}.isdisjoint({"em_open", "strong_open", "link_open", "html_inline"})
    assert all(re.fullmatch(r"</?details>(<summary>[\w.]+</summary>)?\n?", line) for line in html) and len(html) == 4
    quoted = [content for kind, content in kinds if kind == "code_inline"]
    assert quoted.count("*b*`<script>|[a](x) @you #1") == 2  # in the title and in the description
    assert not any(kind == "text" and "@" in content for kind, content in kinds)


def test_the_text_does_not_replace_the_program(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"end the program's with \.py"):
        extract_and_report(INDUCTOR, "triton_poi_fused_mul_sigmoid_1", None, tmp_path / "repro.md")
    assert not list(tmp_path.iterdir())
