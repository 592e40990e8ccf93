"""The name `xlafuse.compare` in a checkout, where the package's folder is `compare/` beside `xlafuse/`.

A wheel has that folder in place of this file. A module `compare` of a user has another name, so the two never meet.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "compare")]
