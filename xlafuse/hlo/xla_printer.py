"""HLO text in full, as XLA prints it: for text that people write and no compiler prints, such as XLA's own tests.

XLA's parser infers what such text leaves out. Malformed text can crash it, so it runs in a process with limits: this
file as a program, which needs jaxlib alone. Nothing in the text is executed. The private names of jaxlib in this file
exist in jaxlib 0.10.2 and 0.11.2.
"""

import importlib.util
import re
import subprocess
import sys

MAX_CHARACTERS = 16 << 20  # of the text, and of what XLA prints; XLA's largest test has fewer than a million
_SECONDS = 20
_MEMORY = 4 << 30

# INVALID_ARGUMENT: ... the text as a HloModule:\nwas parsing 3:13: error: expects opcode but sees: foo
_PROBLEM = re.compile(r"was parsing (\d+:\d+: .*)")


class NotPrinted(ValueError):
    """XLA does not read the text, or cannot be asked; the message is a clause that says why."""


def has_xla() -> bool:
    """Return whether jaxlib is installed; nothing is imported."""
    return importlib.util.find_spec("jaxlib") is not None


def printed(text: str) -> str:
    """Return the module as XLA prints it, with all literals. Raises NotPrinted where XLA does not accept the text."""
    if not has_xla():
        raise NotPrinted("jaxlib, which has XLA's parser, is not installed here")
    if len(text) > MAX_CHARACTERS:
        raise NotPrinted(f"it is too long for XLA's parser: more than {MAX_CHARACTERS >> 20} MiB")
    try:
        process = subprocess.run(  # -P: the current folder may have a module jaxlib, and this one has others
            [sys.executable, "-P", __file__], input=text.encode(errors="replace"), capture_output=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise NotPrinted(f"XLA's parser takes more than {_SECONDS} s") from None
    if process.returncode:
        found = _PROBLEM.search(process.stderr.decode(errors="replace"))
        problem = "".join(filter(str.isprintable, found[1][:200])) if found else ""
        raise NotPrinted(f"XLA's parser refuses it at {problem}" if problem else "XLA's parser fails on it")
    return process.stdout.decode()


def _limit() -> None:
    """Limit this process, whose hard limits may already be lower."""
    import resource

    for kind, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _SECONDS), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _main() -> None:
    _limit()
    from jaxlib import _hlo  # type: ignore[attr-defined]

    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    try:
        found = _hlo.hlo_module_from_text(sys.stdin.buffer.read().decode()).to_string(options)
    except Exception as problem:
        sys.exit(str(problem))
    if len(found) > MAX_CHARACTERS:
        sys.exit("too long")
    sys.stdout.buffer.write(found.encode())


if __name__ == "__main__":
    _main()
