"""Which program ran: its commit, and a hash of its sources, which a copy or a wheel has, too."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .paths import PROJECT

_PACKAGES = ("compare", "triton_side", "xlafuse")
_CODE = (".py", ".cpp", ".cu", ".cuh", ".js", ".css", ".html", ".jinja")


def describe() -> dict[str, Any]:
    """Return {"commit", "dirty", "sources"}; the first two are None where no repository holds the program.

    dirty: the sources differ from the commit's.
    """
    sources = sources_in(PROJECT)
    commit = head_of(PROJECT)
    return {
        "commit": commit, "dirty": None if commit is None else sources_at(PROJECT, commit) != sources,
        "sources": sources,
    }


def in_words(described: Mapping[str, Any]) -> str:
    """Return a program that `describe` described: "commit 1234567890ab", or the beginning of its sources' hash."""
    commit, sources = described.get("commit"), described.get("sources")
    if commit is None:
        return "an unknown commit" if sources is None else f"sources {str(sources)[:12]}"
    return f"commit {str(commit)[:12]}{' with changes' if described.get('dirty') else ''}"


def sources_in(folder: Path) -> str:
    """Return the hash of the sources below a checkout, or below the folder of an installed wheel."""
    found = {}
    for package in _PACKAGES:
        # A wheel holds all packages in one; another project's package may have the name of one.
        root = next(path for path in (folder / "xlafuse" / package, folder / package) if path.is_dir())
        for file in root.rglob("*"):
            name = f"{package}/{file.relative_to(root)}"
            if file.suffix in _CODE and not name.startswith(("xlafuse/compare/", "xlafuse/triton_side/")):
                data = file.read_bytes()
                found[name] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # as git names a file's content
    return _hash(found.items())


def sources_at(repository: Path, commit: str) -> str:
    """Return the hash of the sources of a commit. Raises OSError and subprocess.CalledProcessError."""
    listed = _git(repository, "ls-tree", "-r", "-z", commit, *_PACKAGES).split("\0")
    entries = (line.partition("\t") for line in listed if line)
    return _hash((name, about.split()[2]) for about, _, name in entries if name.endswith(_CODE))


def head_of(repository: Path) -> str | None:
    """Return the commit that is checked out in a folder that is the top of a repository, else None."""
    try:
        top, commit = _git(repository, "rev-parse", "--show-toplevel", "HEAD").split()
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    return commit if Path(top).resolve() == repository else None


def _hash(files: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{name} {content}\n" for name, content in sorted(files)).encode()).hexdigest()


def _git(repository: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(repository), *words], check=True, capture_output=True, text=True
    ).stdout
