"""The profiles in a path: a profile's file, a folder of jax.profiler, or a folder that `xlafuse capture` made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from xlafuse.hlo.regular_file import require_regular

from .bounded import head
from .chrome_trace import is_trace
from .model import Profile, ProfileError

CAPTURE, PROFILE = "capture.json", "profile"  # in a folder of `xlafuse capture`
_MOST_CAPTURE_BYTES = 1 << 20
_PLANES = (".xplane.pb", ".xplane.pb.gz")
_NAMES = (".json", ".json.gz", ".sqlite", ".sqlite.gz", ".zip")  # of other profiles in a folder
_SQLITE = b"SQLite format 3\x00"
# A plane of an XSpace: its id, if it is not 0, and its name. An HLO proto begins with the name of a module instead.
_XSPACE = re.compile(rb"\n[\x80-\xff]{0,9}[\x00-\x7f](?:\x08[\x80-\xff]{0,9}[\x00-\x7f])?\x12[\x01-\x7f][ -~]")
_RANK = re.compile(r"rank(\d{1,9})")
# Where jax.profiler puts a session's files, below the folder that it was given, or one of these folders.
_SESSIONS = ("plugins/profile/*", "profile/*", "*", "")


def capture_folders(path: Path) -> list[Path]:
    """Return the folders of `xlafuse capture` in a path, by rank; an empty list for other paths. Raises OSError."""
    if _is_capture(path):
        return [path]
    if not path.is_dir():
        return []
    ranks = [each for each in path.iterdir() if _RANK.fullmatch(each.name) and _is_capture(each)]
    return sorted(ranks, key=lambda each: int(each.name.removeprefix("rank")))


def _is_capture(folder: Path) -> bool:
    if (folder / CAPTURE).exists():
        require_regular(folder / CAPTURE)
    return (folder / CAPTURE).is_file()


def capture_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that `xlafuse capture` wrote about its folder; {} where they cannot be read."""
    file = folder / CAPTURE
    try:
        if file.stat().st_size > _MOST_CAPTURE_BYTES:
            return {}
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def captured_versions(folder: Path) -> dict[str, str]:
    """Return the versions of packages in the captured process; {} where they cannot be read."""
    found = capture_facts(folder).get("versions")
    return {str(package): str(version) for package, version in found.items()} if isinstance(found, dict) else {}


def compile_seconds(folder: Path) -> dict[str, float]:
    """Return the seconds that each function of the captured program was compiled for; {} where they are unknown."""
    found = capture_facts(folder).get("compile_s")
    known = found.items() if isinstance(found, dict) else ()
    return {str(name): float(seconds) for name, seconds in known if isinstance(seconds, int | float)}


def profile_files(path: Path) -> list[Path]:
    """Return the files of profiles in a path, one for each process; an empty list where it has none.

    The latest session of jax.profiler in a folder counts. Raises OSError.
    """
    if path.is_file():
        return [path] if _format(path) else []
    if captured := capture_folders(path):
        return [file for folder in captured for file in _in_folder(folder / PROFILE)]
    return _in_folder(path)


def rank_of(file: Path) -> int | None:
    """Return the rank in the path of a captured profile; None where it has none."""
    found = [match[1] for part in file.parts if (match := _RANK.fullmatch(part))]
    return int(found[-1]) if found else None


def _in_folder(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    for place in _SESSIONS:
        files = folder.glob(f"{place}/*" if place else "*")
        if planes := sorted(file for file in files if file.name.endswith(_PLANES)):
            latest = max(file.parent for file in planes)
            return [file for file in planes if file.parent == latest]
    named = (each for each in folder.iterdir() if each.name.endswith(_NAMES))
    return sorted(each for each in named if each.exists() and not each.is_dir() and _format(each))


def read(path: Path) -> list[Profile]:
    """Return the profiles of a file, one for each device. Raises ProfileError and OSError."""
    match _format(path):
        case "xplane":
            from . import xplane

            return xplane.read(path)
        case "nsight":
            from . import nsight

            return nsight.read(path)
        case "kineto":
            from . import kineto

            return kineto.read(path)
    raise ProfileError(f"{path}: neither *.xplane.pb, nor a trace of torch.profiler, nor Nsight Systems' SQLite")


def _format(path: Path) -> str:
    """Return the format of a profile's file; "" for files that are no profile."""
    start = head(path, 64)
    if path.name.endswith(_PLANES) or _XSPACE.match(start):
        return "xplane"
    if start.startswith(_SQLITE):
        return "nsight"
    return "kineto" if is_trace(path) else ""
