"""HLO text in full, as XLA prints it: of a proto, and of text that people write and no compiler prints, such as XLA's
own tests.

XLA's parser infers what such text leaves out. Malformed input can crash XLA, so it runs in a process with limits: this
file as a program, which needs jaxlib alone. Nothing in the module is executed. The private names of jaxlib in this file
exist in jaxlib 0.10.2 and 0.11.2.
"""

import importlib.util
import re
import subprocess
import sys

MAX_CHARACTERS = 16 << 20  # of the text, and of what XLA prints of it; XLA's largest test has fewer than a million
MAX_OF_PROTO = 256 << 20  # of what XLA prints of a proto; a training step's text has a few million
_TEXT, _PROTO = "text", "proto"  # what the program reads
_SECONDS = 20
_MEMORY = 4 << 30

# INVALID_ARGUMENT: ... the text as a HloModule:\nwas parsing 3:13: error: expects opcode but sees: foo
_PROBLEM = re.compile(r"was parsing (\d+:\d+: .*)")


class NotPrinted(ValueError):
    """XLA does not read the module, or cannot be asked; the message is a clause that says why."""


def has_xla() -> bool:
    """Return whether jaxlib is installed; nothing is imported."""
    return importlib.util.find_spec("jaxlib") is not None


def printed(text: str) -> str:
    """Return the module as XLA prints it, with all literals. Raises NotPrinted where XLA does not accept the text."""
    if len(text) > MAX_CHARACTERS:
        raise NotPrinted(f"it is too long for XLA's parser: more than {MAX_CHARACTERS >> 20} MiB")
    return _printed(_TEXT, text.encode(errors="replace"), "XLA's parser")


def printed_proto(module: bytes) -> str:
    """Return a serialized HloModuleProto as XLA prints it, with all literals. Raises NotPrinted."""
    return _printed(_PROTO, module, "XLA's printer")


def _printed(kind: str, module: bytes, who: str) -> str:
    if not has_xla():
        raise NotPrinted(f"jaxlib, which has {who}, is not installed here")
    try:
        process = subprocess.run(  # -P: the current folder may have a module jaxlib, and this one has others
            [sys.executable, "-P", __file__, kind], input=module, capture_output=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise NotPrinted(f"{who} takes more than {_SECONDS} s") from None
    if process.returncode:
        found = _PROBLEM.search(process.stderr.decode(errors="replace"))
        problem = "".join(filter(str.isprintable, found[1][:200])) if found else ""
        raise NotPrinted(f"{who} refuses it at {problem}" if problem else f"{who} fails on it")
    return process.stdout.decode()


def _limit() -> None:
    """Limit this process, whose hard limits may already be lower."""
    import resource

    for kind, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _SECONDS), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _main(kind: str) -> None:
    _limit()
    from jaxlib import _hlo  # type: ignore[attr-defined]

    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    given = sys.stdin.buffer.read()
    try:
        if kind == _PROTO:
            found = _hlo.HloModule.from_serialized_hlo_module_proto(given).to_string(options)
        else:
            found = _hlo.hlo_module_from_text(given.decode()).to_string(options)
    except Exception as problem:
        sys.exit(str(problem))
    if len(found) > (MAX_OF_PROTO if kind == _PROTO else MAX_CHARACTERS):
        sys.exit("too long")
    sys.stdout.buffer.write(found.encode())


if __name__ == "__main__":
    _main(sys.argv[1])
