"""The stack frames that XLA keeps of the user's program: a chain of calls for each instruction, innermost first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# Files of installed packages, of Python itself, and of the program that captures another one.
_LIBRARY = re.compile(r"(^|/)(site-packages|dist-packages|lib/python3\.\d+)/|^<|(^|/)compare/user/capture\.py$")
_MOST_FRAMES = 1000  # a damaged table may have a circle


@dataclass(frozen=True)
class Frame:
    """A call in the user's program: where it stands, from `column` of `line` to `end_column` of `end_line`.

    Columns count from 0, and are 0 where they are unknown. parent: the number of the frame that called it; 0 for none.
    """

    file: str
    line: int
    function: str = ""
    end_line: int = 0
    column: int = 0
    end_column: int = 0
    parent: int = 0


@dataclass
class StackFrames:
    """The frames of a module, by their numbers, which begin at 1."""

    frames: Mapping[int, Frame] = field(default_factory=dict)
    _places: dict[int, str] = field(default_factory=dict)

    def line(self, number: int) -> str:
        """Return "file:line" of the innermost frame; "" where it is unknown."""
        frame = self.frames.get(number)
        return "" if frame is None else f"{frame.file}:{frame.line or '?'}"

    def place(self, number: int) -> str:
        """Return the innermost frame outside libraries, as `place_of` writes it; "" where there is none."""
        if number not in self._places:
            self._places[number] = next(self.places(number), "")
        return self._places[number]

    def places(self, number: int) -> Iterator[str]:
        """Yield a frame and its callers outside libraries, innermost first, as `place_of` writes them."""
        return (place_of(frame) for frame in self.chain(number) if not is_library(frame.file))

    def chain(self, number: int) -> Iterator[Frame]:
        """Yield a frame and its callers, innermost first."""
        for _ in range(_MOST_FRAMES):
            frame = self.frames.get(number)
            if frame is None:
                return
            yield frame
            if frame.parent == number:
                return
            number = frame.parent


def is_library(file: str) -> bool:
    """Return whether a file belongs to an installed package or to Python, and not to the user's own program."""
    return bool(_LIBRARY.search(file))


def place_of(frame: Frame) -> str:
    """Return a frame as "file:line:column-end_line:end_column function", without the parts that are unknown.

    A call that ends on its line is "train.py:8:20-82 Layer.__call__"; without columns, "train.py:8 Layer.__call__".
    """
    columns = ""
    if frame.end_column:
        end = f"{frame.end_line}:" if frame.end_line not in (0, frame.line) else ""
        columns = f":{frame.column}-{end}{frame.end_column}"
    return f"{frame.file}:{frame.line or '?'}{columns} {frame.function}".rstrip()
