"""The command line, in this process and in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli.main import cli


def xlafuse(*words: object) -> Result:
    """Run `xlafuse` with these words."""
    return CliRunner().invoke(cli, [str(word) for word in words])


def xlafuse_process(*words: str, folder: Path = PROJECT, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run `xlafuse` with these words in a process of its own, whose workers do not interpret Triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "xlafuse", *words], cwd=folder, env=environment | {"PYTHONPATH": str(PROJECT)},
        capture_output=True, text=True, timeout=timeout,
    )
