"""Validation of what `--json` prints by the schemas in docs/schemas."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "schemas"


@cache
def validator(name: str) -> Draft202012Validator:
    """Return the validator of an output, such as xlafuse.rows/3. A field that the schema does not list is an error."""
    schema = json.loads((FOLDER / f"{name.removeprefix('xlafuse.').replace('/', '-')}.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(_closed(schema))


def assert_valid(data: Any) -> None:
    """Fail with the place and the message of the first error."""
    errors = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in _leaves(
            validator(data["schema"]).iter_errors(data)
        )
    ]
    assert not errors, "\n".join(errors[:5])


def _leaves(errors: Any) -> Any:
    """Yield errors; of alternatives, those of each."""
    for error in errors:
        yield from _leaves(error.context) if error.context else [error]


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    is_object = closed.get("type") == "object" and "properties" in closed
    return closed | {"additionalProperties": False} if is_object else closed
