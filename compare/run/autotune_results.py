"""XLA's autotune results in the target pack of a run: copy them from another run or target, and merge them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from xlafuse.compile.autotune import merge_results

from ..base import atomic_write


def folder_of(run: Path) -> Path:
    """Return the folder of a run's autotune results. Create it if it is missing."""
    folder = run / "target" / "xla"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def copy_into(run: Path, recorded: Sequence[Path]) -> None:
    """Copy recorded results into the run, so that its XLA workers replay them instead of autotuning."""
    for path in recorded:
        shutil.copyfile(path, folder_of(run) / path.name)


def join(run: Path) -> None:
    """Merge the result files of all processes into one file per jax version, while no XLA worker compiles.

    Each XLA process writes `autotune-<jax version>.<process>.textproto`. If the results of a jax version cannot be
    merged, its files stay separate.
    """
    folder = folder_of(run)
    by_stem: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("autotune-*.*.textproto"), key=lambda p: p.stat().st_mtime):
        stem, _, process = path.name.removesuffix(".textproto").rpartition(".")
        if process.isdigit() and stem.count(".") == 2:
            by_stem.setdefault(stem, []).append(path)
    for stem, paths in by_stem.items():
        joined = folder / f"{stem}.textproto"
        texts = [path.read_text() for path in ([joined] if joined.is_file() else []) + paths]
        try:
            atomic_write.write(joined, merge_results(texts).encode())
        except ValueError:
            continue
        for path in paths:
            path.unlink()


def mismatch(run: Path, jax: str | None) -> str | None:
    """Return why this jax cannot use the run's recorded results; None if it can, or if there are none."""
    stems = (path.stem.removeprefix("autotune-") for path in sorted(folder_of(run).glob("autotune-*.textproto")))
    recorded = [version for version in stems if version.count(".") == 2]
    if jax is None or not recorded or jax in recorded:
        return None
    return f"XLA's recorded autotune results are of jax {', '.join(recorded)}; jax {jax} autotunes all anew"
