"""The thunks of a compile by HLO instruction. A thunk is a step of XLA's runtime: a kernel, a copy, a library call."""

import re
from collections import Counter
from collections.abc import Iterable

#     profile_annotation: "fusion"
_INSTRUCTION = re.compile(r'\s*profile_annotation: "([^"]{1,500})"')
#   thunk_kind: "kCopy"
_KIND = re.compile(r'\s*thunk_kind: "(k\w{1,100})"')


def by_instruction(lines: Iterable[str]) -> dict[str, Counter[str]]:
    """Return instruction -> kinds of its thunks and their numbers, from the lines of a thunk_metadata.txt."""
    found: dict[str, Counter[str]] = {}
    instruction = ""
    for line in lines:
        if match := _INSTRUCTION.match(line):
            instruction = match[1]
        elif (match := _KIND.match(line)) and instruction:
            found.setdefault(instruction, Counter())[match[1]] += 1
            instruction = ""
    return found
