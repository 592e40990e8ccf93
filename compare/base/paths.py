"""The folder of the project's packages, this package's name, and the import path of processes that need them."""

import os
from importlib.resources import files
from pathlib import Path

PROJECT = Path(str(files("xlafuse"))).resolve().parent
PACKAGE = __name__.removesuffix(".base.paths")  # "xlafuse.compare"


def python_path() -> str:
    """Return the PYTHONPATH of another process, perhaps of another interpreter, which imports the project's packages.

    The folder of an installed wheel is left out: it also holds packages that only this interpreter can import.
    """
    own = [] if PROJECT.name in ("site-packages", "dist-packages") else [str(PROJECT)]
    return os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))
