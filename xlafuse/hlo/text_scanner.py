"""The lexical level of HLO text: comments, brackets, strings, lists, values of attributes.

Most functions take the text and a position, and return positions. A bracket that is not closed is found at the next
line that begins an instruction, so one damaged line does not hide the lines after it. As in XLA, no bracket and no
string contains a zero character.
"""

import re
import sys

from xlafuse.hlo.shape import Malformed

NAME = r"""[^\s%=:(){}\[\],"']++"""
# ROOT %name =    As in XLA, "name=" without a percent sign and a space begins an attribute, not an instruction.
INSTRUCTION = rf"(?:ROOT\s+)?+(?:%{NAME}\s*+=|{NAME}\s++=)"
_STRING = rf"""%s[^%s\\\n\0]*+(?:(?:\\.|\n(?!\s*+{INSTRUCTION}))[^%s\\\n\0]*+)*+%s"""
_DOUBLE_QUOTED, _SINGLE_QUOTED = (_STRING.replace("%s", quote) for quote in "\"'")
STRING = f"{_DOUBLE_QUOTED}|{_SINGLE_QUOTED}"

_SPACE = re.compile(r"\s*+")
# A string (group 1), a JSON dictionary (group 2) or a comment; group 3 is the end of a block comment.
_STRING_OR_COMMENT = re.compile(
    r"""("(?:[^"\\\n]|\\.)*+"?|'(?:[^'\\\n]|\\.)*+'?)|(backend_config=\s*+(?=\{))"""
    r"""|//[^\n\r]*+|/\*[^*]*+(?:\*(?!/)[^*]*+)*+(\*/)?+"""
)
_VISIBLE = re.compile(r"[^\n]")
# Brackets on one line around text without brackets; strings may be in it.
_FLAT_STRING = r"""(?:"[^"\\\n\0]*+(?:\\.[^"\\\n\0]*+)*+"[^(){}\[\]"'\n\0]*+)*+"""
_FLAT = re.compile(
    "|".join(rf"""\{a}[^(){{}}\[\]"'\n\0]*+{_FLAT_STRING}\{b}""" for a, b in ("()", "{}", "[]"))
)
_MARK = re.compile(rf"""{STRING}|[(){{}}\[\],"'\0]|\n\s*+{INSTRUCTION}""")
_JSON_MARK = re.compile(rf"""{_DOUBLE_QUOTED}|[{{}}"\0]|\n\s*+{INSTRUCTION}""")
_MODULE_MARK = re.compile(r""""(?:[^"\\\0]|\\.)*+"|[{}"\0]""", re.DOTALL)
_MAX_UNCLOSED = 4  # JSON dictionaries; each costs one pass over the text
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_WORD = re.compile(r"""[^\s,(){}\[\]"']++""")
_QUOTED = re.compile(STRING)
# f32[2] {0}, f32[] 0.1, [2,2] <= [4] T(1,0)
_CONTINUED = re.compile(r"\s*+(?=[({\[<]|T\s*+\()|\s++(?=[-.\d]|(?:true|false|inf|nan)\b(?!\s*+=))")
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_CONTROLS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


def without_comments(text: str) -> str:
    """Return the text with spaces instead of comments, so that positions and line numbers stay."""
    if "/*" not in text and "//" not in text:
        return text
    pieces: list[str] = []
    done = at = unclosed = 0
    while found := _STRING_OR_COMMENT.search(text, at):
        at = found.end()
        if found[2]:
            if unclosed < _MAX_UNCLOSED:
                try:
                    at = skip_json(text, at)
                except Malformed:
                    unclosed += 1
        elif not found[1] and (found[3] or not found[0].startswith("/*")):
            comment = found[0]
            blank = _VISIBLE.sub(" ", comment) if "\n" in comment else " " * len(comment)
            pieces += (text[done : found.start()], blank)
            done = at
    return "".join((*pieces, text[done:]))


def skip_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def skip_brackets(text: str, at: int, limit: int = sys.maxsize) -> int:
    """Return the position after the bracket that closes the one at `at`.

    Raises Malformed if none does before `limit`.
    """
    if flat := _FLAT.match(text, at):
        return flat.end()
    return _split(text, at, [], limit)


def skip_json(text: str, at: int, limit: int = sys.maxsize) -> int:
    """Return the position after the brace that closes the one at `at`, where only braces and "strings" count."""
    return _skip_braces(text, at, _JSON_MARK, limit)


def skip_modules(text: str, at: int, limit: int = sys.maxsize) -> int:
    """Return the same where strings may hold whole modules, with lines that look like instructions."""
    return _skip_braces(text, at, _MODULE_MARK, limit)


def _skip_braces(text: str, at: int, marks: re.Pattern[str], limit: int) -> int:
    depth = 0
    for token in marks.finditer(text, at, limit):
        mark = token[0]
        if mark in "{}":
            depth += 1 if mark == "{" else -1
            if not depth:
                return token.end()
        elif len(mark) == 1 or mark[0] == "\n":
            break
    raise Malformed("a brace or a quote that is not closed")


def split_brackets(text: str, at: int) -> tuple[list[tuple[int, int]], int]:
    """Return where the elements in the brackets at `at` begin and end, and the position after the closing bracket."""
    commas: list[int] = []
    end = _split(text, at, commas)
    begins = [at + 1, *(comma + 1 for comma in commas)]
    spans = [(skip_space(text, begin), stop) for begin, stop in zip(begins, [*commas, end - 1], strict=True)]
    return [span for span in spans if span[0] < span[1]], end


def _split(text: str, at: int, commas: list[int], limit: int = sys.maxsize) -> int:
    closing: list[str] = []
    for token in _MARK.finditer(text, at, limit):
        mark = token[0]
        if mark == ",":
            if len(closing) == 1:
                commas.append(token.start())
        elif mark in _CLOSING:
            closing.append(_CLOSING[mark])
        elif mark in ")}]":
            if closing.pop() != mark:
                raise Malformed("brackets that do not match")
            if not closing:
                return token.end()
        elif mark in "\"'\0" or mark[0] == "\n":
            raise Malformed("a bracket or a quote that is not closed")
    raise Malformed("a bracket that is not closed")


def skip_value(text: str, at: int, limit: int = sys.maxsize) -> int:
    """Return where an attribute's value ends: %name, 3, {0,1}, "text", [2,2]<=[4], f32[2]{0}, ..."""
    start = at
    continued: re.Match[str] | None
    while at < len(text):
        if text[at] in _CLOSING:
            at = skip_brackets(text, at, limit)
        elif piece := _WORD.match(text, at) or _QUOTED.match(text, at):
            at = piece.end()
        else:
            break
        if not (continued := _CONTINUED.match(text, at)):
            return at
        at = continued.end()
    if at == start:
        raise Malformed("an attribute without a value")
    return at


def string(value: str) -> str:
    """Return the text of a quoted string with its escapes resolved, as XLA writes them; other text as it is."""
    if value[:1] not in ('"', "'") or value[-1:] != value[:1]:
        return value
    return unescape(value[1:-1])


def unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPE.sub(_character, text.encode(errors="replace")).decode(errors="replace")


def _character(escape: re.Match[bytes]) -> bytes:
    octal, hexadecimal, other = escape.groups()
    if other is not None:
        return _CONTROLS.get(other, other)
    return bytes([(int(octal, 8) if octal else int(hexadecimal, 16)) & 0xFF])
