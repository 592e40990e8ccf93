"""The page's JavaScript libraries, read from installed Python packages, without downloads.

Vega, Vega-Lite and Vega-Embed draw charts (vl-convert-python bundles them). DataTables sorts, searches and pages
through rows (itables has an offline copy).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ....base.usage import UsageError

INSTALL = "pip install 'xlafuse[html]'"


class Libraries(NamedTuple):
    """Texts of ES modules and of a style sheet.

    vega: sets window.vegaEmbed. tables: exports the DataTables of itables' bundle as its default.
    """

    vega: str
    tables: str
    tables_style: str


@cache
def read() -> Libraries:
    """Return the libraries. Raise UsageError if packages are missing, with their names and how to install them."""
    packages = {"vl-convert-python": "vl_convert", "itables": "itables"}
    specs = {package: importlib.util.find_spec(module) for package, module in packages.items()}
    if missing := [package for package, spec in specs.items() if spec is None or spec.origin is None]:
        raise UsageError(f"an HTML report needs {' and '.join(missing)}: {INSTALL}")
    import vl_convert

    tables = specs["itables"]  # not imported: it would import pandas
    assert tables is not None and tables.origin is not None
    folder = Path(tables.origin).parent / "html"
    try:
        script, style = (folder / "dt_bundle.js").read_text(), (folder / "dt_bundle.css").read_text()
    except OSError as problem:
        raise UsageError(f"{folder}: DataTables cannot be read ({problem}): {INSTALL}") from None
    return Libraries(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"), script, style)
