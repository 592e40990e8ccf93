"""The events of a Chrome trace as a stream: JSON with a list `traceEvents`, or a list of events.

Only the text of some events is in memory. A file that is cut off gives the events before that place.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .bounded import DAMAGED, chunks, damage, too_large
from .model import ProfileError

MOST_CHARACTERS = 64 << 20  # of one value, and of all that precedes the events
_LEAST_READ = 1 << 16
_LONGEST_NUMBER = 64
_KEY = "traceEvents"
# Strings, brackets and commas; the last alternative is a string without an end.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]|"', re.DOTALL)
_SPACE = re.compile(r"[\s,]*")
_ESCAPE = re.compile(r'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')
_NO_JSON = object()


class _EndOfText(Exception):
    """The text ends, or cannot be read on."""


def is_trace(path: Path) -> bool:
    """Return whether a file is a list of events, or an object with `traceEvents`."""
    before, size = "", 0
    try:
        for text in _texts(path):
            if not size and text.lstrip()[:1] != "{":
                first = next(ChromeTrace(path).events(), None) if text.lstrip()[:1] == "[" else None
                return isinstance(first, dict) and "ph" in first
            if f'"{_KEY}"' in before + text:
                return True
            before, size = text[-len(_KEY) - 1 :], size + len(text)
            if size > MOST_CHARACTERS:
                break
    except (*DAMAGED, ProfileError):
        pass
    return False


def _texts(path: Path) -> Iterator[str]:
    decoder = None
    for data in chunks(path):
        if decoder is None:
            decoder = codecs.getincrementaldecoder(json.detect_encoding(data[:4]))(errors="replace")
        yield decoder.decode(data)


class ChromeTrace:
    """A trace that `events` reads once.

    found: whether it has a list of events. unreadable: events that are no JSON. problem: why reading ended early; "" if
    it did not. top: values outside the list that are no longer than an event may be, by `keys`.
    """

    def __init__(self, path: Path, most: int = 1 << 30, keys: tuple[str, ...] = ()) -> None:
        self.found = False
        self.unreadable = 0
        self.problem = ""
        self.top: dict[str, Any] = {}
        self._path, self._most, self._keys = path, most, keys
        self._texts = _texts(path)
        self._text, self._at, self._size = "", 0, 0
        self._end = ""  # why there is no more text
        self._decode = json.JSONDecoder(strict=False).raw_decode  # names may contain line breaks

    def events(self) -> Iterator[Any]:
        """Yield the elements of the list. Raises ProfileError above the limits, and OSError."""
        try:
            if self._next() == "[":
                yield from self._list()
                return
            if self._next() != "{":
                raise self._no_json()
            self._at += 1
            while self._next() != "}":
                key = self._value()
                if self._next() != ":":
                    raise self._no_json()
                self._at += 1
                if key == _KEY and self._next() == "[":
                    yield from self._list()
                    continue
                value = self._value()
                if key in self._keys:
                    self.top[key] = value
        except _EndOfText as problem:
            self.problem = str(problem)

    def _list(self) -> Iterator[Any]:
        self.found = True
        self._at += 1
        while self._next() != "]":
            value = self._value()
            if value is _NO_JSON:
                self.unreadable += 1
            else:
                yield value
        self._at += 1

    def _next(self) -> str:
        """Return the next character that is no space nor comma."""
        while True:
            if space := _SPACE.match(self._text, self._at):
                self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            self._more()

    def _value(self) -> Any:
        """Return the next value, or _NO_JSON for a text that is none, behind which reading goes on."""
        self._next()
        while True:
            value: Any = _NO_JSON
            end: int | None
            try:
                value, end = self._decode(self._text, self._at)
            except (ValueError, RecursionError):
                end = self._end_of_value()
            if end is None:
                self._more()
                continue
            if isinstance(value, (int, float)) and len(self._text) - end < _LONGEST_NUMBER and not self._end:
                with suppress(_EndOfText):
                    self._more()  # a number may go on
                continue
            if end == self._at:
                raise self._no_json()
            text, self._at = self._text[self._at : end], end
            return self._mended(text) if value is _NO_JSON else value

    def _mended(self, text: str) -> Any:
        """Return the value of a text in which a name has single backslashes, as in C:\\x.py; _NO_JSON for others."""
        try:
            return self._decode(_ESCAPE.sub(lambda match: match[1] or "\\\\", text))[0]
        except (ValueError, RecursionError):
            return _NO_JSON

    def _end_of_value(self) -> int | None:
        """Return where a value ends by its brackets; None where the text does not tell."""
        depth = 0
        for token in _TOKEN.finditer(self._text, self._at):
            if token[0] == '"':
                return None
            if token[0] in ("{", "["):
                depth += 1
            elif depth == 0 and token[0] in ("}", "]", ","):
                return token.start()
            elif token[0] in ("}", "]"):
                depth -= 1
                if depth == 0:
                    return token.end()
        return None

    def _more(self) -> None:
        """Read on, as much again as waits, so that the text of a long value is read but a few times."""
        rest = self._text[self._at :]
        if len(rest) > MOST_CHARACTERS:
            raise ProfileError(f"{self._path}: a value of more than {MOST_CHARACTERS >> 20} MiB")
        parts, size = [rest], 0
        while not self._end and size < max(len(rest), _LEAST_READ):
            try:
                parts.append(next(self._texts))
                size += len(parts[-1])
            except StopIteration:
                self._end = "the file ends before its JSON does"
            except DAMAGED as problem:
                self._end = damage(problem)
        self._text, self._at, self._size = "".join(parts), 0, self._size + size
        if self._size > self._most:
            raise ProfileError(too_large(self._path, self._most))
        if not size:
            raise _EndOfText(self._end)

    def _no_json(self) -> _EndOfText:
        return _EndOfText(f"no JSON at character {self._size - len(self._text) + self._at}")
