"""What `--json` prints fits the schemas in docs/schemas, which `python -m tools.json_schemas` writes.

Views are validated in test_every_view.py; `tune` and `capture --try` in their own tests.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import xlafuse
from jsonschema import ValidationError
from output_schemas import assert_valid, validator

from tools import json_schemas
from xlafuse.compare.base.paths import PROJECT

DATA = PROJECT / "tests" / "data"
CODE = PROJECT / "tests" / "compare" / "user" / "user_code"
NO_OUTPUT = {"xlafuse.capture/1"}  # a file inside a capture
COMMANDS = {
    "list": "xlafuse.list/1",
    "list targets": "xlafuse.targets/1",
    "doctor": "xlafuse.doctor/1",
    f"inspect {DATA}/runs/h200-small --kernel 1": "xlafuse.kernels/1",
    f"inspect {PROJECT}/reports/h200-x2 --view ranks": "xlafuse.rows/3",
    "inspect CAPTURES/nnx": "xlafuse.profile/1",
    "inspect CAPTURES/gpt --view remedies": "xlafuse.rows/3",
    f"diff {DATA}/runs/jax-0.10 {DATA}/runs/jax-0.11": "xlafuse.run-diff/1",
    f"diff {DATA}/runs/h200-small {DATA}/runs/h200-rmsnorm": "xlafuse.run-diff/1",
    f"diff {DATA}/xla/softmax.hlo.txt {DATA}/xla/mlp_fwd.hlo.txt": "xlafuse.graph-diff/1",
    f"diff {DATA}/hlo/jax-0.10.2 {DATA}/hlo/jax-0.11.2": "xlafuse.graph-diff/1",
    "diff CAPTURES/gpt CAPTURES/gpt_sdpa": "xlafuse.profile-diff/1",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_output_of_a_command_fits_its_schema(command: str, captures: Path) -> None:
    done = xlafuse(*command.replace("CAPTURES", str(captures)).split(), "--json")
    assert done.exit_code in (0, 1), done.output
    data = json.loads(done.stdout)
    assert data["schema"] == COMMANDS[command]
    assert_valid(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "schema"),
    [
        ((f"{CODE}/jax_code.py:gelu",), "xlafuse.explained/1"),
        ((f"{CODE}/jax_code.py:gelu", "--xla-flag", "xla_gpu_enable_triton_gemm=false"), "xlafuse.variants/1"),
        ((f"{CODE}/jax_code.py:gelu", "--view", "kernels"), "xlafuse.fusion-graph/3"),
    ],
)
def test_an_explained_function_fits_its_schema(words: tuple[str, ...], schema: str) -> None:
    pytest.importorskip("jax")
    done = xlafuse("explain", *words, "--args", "f32[64,128]", "--target", "h200", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["schema"] == schema
    assert_valid(data)


def test_committed_schemas_are_those_of_the_types() -> None:
    """`python -m tools.json_schemas` writes them again."""
    files = {file: file.read_text() for file in json_schemas.FOLDER.glob("*.json")}
    assert files == {json_schemas.file_of(name): json_schemas.text_of(name) for name in json_schemas.OUTPUTS}


def test_every_output_has_a_schema() -> None:
    source = "".join(file.read_text() for file in (PROJECT / "compare").rglob("*.py"))
    named = set(re.findall(r'"(xlafuse\.[a-z-]+/\d+)"', source)) | {json_schemas.store.SCHEMA}
    assert named - NO_OUTPUT == set(json_schemas.OUTPUTS)


def test_a_schema_refuses_other_versions_and_missing_fields() -> None:
    data = json.loads(xlafuse("list", "softmax", "--json").stdout)
    for wrong in ({**data, "schema": "xlafuse.list/2"}, {"schema": data["schema"], "blocks": []}):
        with pytest.raises(ValidationError):
            validator("xlafuse.list/1").validate(wrong)
