"""The page's JavaScript libraries, read from installed Python packages, without downloads.

Vega, Vega-Lite and Vega-Embed draw charts (vl-convert-python bundles them). DataTables sorts, searches and pages
through rows (itables has an offline copy).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ....base.usage import UsageError

INSTALL = "pip install 'xlafuse[html]'"


@dataclass(frozen=True)
class Libraries:
    """Texts of ES modules and of a style sheet.

    vega: sets window.vegaEmbed. tables: exports the DataTables of itables' bundle as its default.
    """

    vega: str
    tables: str
    tables_style: str


@cache
def read() -> Libraries:
    """Return the libraries. Raise UsageError if packages are missing, with their names and how to install them."""
    missing = [
        package for package, module in (("vl-convert-python", "vl_convert"), ("itables", "itables"))
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise UsageError(f"an HTML report needs {' and '.join(missing)}: {INSTALL}")
    import vl_convert

    folder = _folder_of("itables") / "html"
    try:
        tables, style = (folder / "dt_bundle.js").read_text(), (folder / "dt_bundle.css").read_text()
    except OSError as problem:
        raise UsageError(f"{folder}: DataTables cannot be read ({problem}): {INSTALL}") from None
    vega: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return Libraries(vega, tables, style)


def _folder_of(package: str) -> Path:
    """Return a package's folder without importing it: itables would import pandas."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
