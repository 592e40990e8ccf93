"""The user's lines whose calls made torch.compile compile, from the logs of TORCH_TRACE."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xlafuse.triton_side.inductor.dump import DAMAGED, MAX_BYTES, event_of, lines, logs
from xlafuse.triton_side.inductor.ir_text import is_library

_CAPTURES = re.compile(r"(^|/)compare/user/capture\.py$")  # which runs the program


def compile_places(folder: Path) -> dict[str, str]:
    """Return the innermost line of the user's own files around each compile, by its number: {"0/1": "train.py:29"}.

    The last frame of a compile is the function that is compiled.
    """
    found = {}
    for log in logs(folder):
        files: dict[int, str] = {}
        for event in _events(log):
            match event:
                case {"str": [str(name), int(number)]}:
                    files[number] = name
                case {"dynamo_start": {"stack": [*frames, _]}, "frame_id": int(frame), "frame_compile_id": int(number)}:
                    places = [
                        f"{Path(files[at]).name}:{line}" for each in frames
                        if isinstance(each, dict) and isinstance(line := each.get("line"), int)
                        and (at := each.get("filename")) in files and not _CAPTURES.search(files[at])
                        and not is_library(files[at])
                    ]
                    if places:
                        found[f"{frame}/{number}"] = places[-1]
    return found


def _events(log: Path) -> Iterator[Any]:
    """Yield the log's events of these two kinds, until it is damaged or ends."""
    try:
        with log.open("rb") as stream:
            for line in lines(stream, MAX_BYTES):
                if '{"dynamo_start"' in line or '{"str"' in line:
                    yield event_of(line)
    except (*DAMAGED, OSError):
        return
