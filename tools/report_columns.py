"""Write the tables of columns in docs/report-data.md: `python -m tools.report_columns`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from compare.base.paths import PROJECT
from compare.report import authorship, columns, roofline
from compare.report.columns import Column

DOCUMENT = PROJECT / "docs" / "report-data.md"
TABLES = {
    "records": columns.COLUMNS, "kernels": roofline.KERNEL_COLUMNS, "authorship": authorship.COLUMNS,
    "findings": columns.FINDING_COLUMNS,
}


def with_tables(text: str) -> str:
    """Return the document with each table between its `<!-- columns: NAME -->` and `<!-- end -->` written anew."""
    return re.sub(
        r"(<!-- columns: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{_table(TABLES[found[2]])}{found[3]}", text, flags=re.DOTALL,
    )


def _table(of: Iterable[Column]) -> str:
    lines = [f"| `{column.name}` | {column.unit} | {column.doc} |\n" for column in of]
    return "".join(["| column | unit | meaning |\n", "|---|---|---|\n", *lines])


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
