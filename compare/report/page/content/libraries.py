"""The page's JavaScript libraries, taken out of installed Python packages: nothing fetched, nothing committed.

Vega, Vega-Lite and Vega-Embed draw charts (vl-convert-python has them in one bundle); DataTables sorts, searches and
pages through rows (itables brings it for offline use).
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
    """Texts of ES modules, and of a style sheet. vega: sets window.vegaEmbed. tables: exports the DataTables of
    itables' bundle as its default."""

    vega: str
    tables: str
    tables_style: str


@cache
def read() -> Libraries:
    """Raises UsageError naming the packages that are missing, and how to install them."""
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
        raise UsageError(f"{folder}: no DataTables for offline use here ({problem}): {INSTALL}") from None
    vega: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return Libraries(vega, tables, style)


def _folder_of(package: str) -> Path:
    """Where a package lies, which is not imported: itables would import pandas with it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
