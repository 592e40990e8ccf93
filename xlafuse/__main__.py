"""The program `xlafuse`, also as `python -m xlafuse`."""

import sys

from .compare.cli.main import cli


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without µ shows ? instead of a traceback
    cli(prog_name="xlafuse")


if __name__ == "__main__":
    main()
