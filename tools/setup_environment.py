"""Make the environment .venv, and .venv-xla where XLA needs a newer Python; `make setup` runs this program.

    python3 tools/setup_environment.py .venv cpu     # or cuda, on a machine with an NVIDIA GPU

Without a GPU, XLA makes the H200's kernels only by reading the choices that the H200 recorded. They are read by jax
0.11.2, which needs Python 3.12. Where the default Python is older, .venv-xla has a newer one of this machine, and XLA's
worker runs there (compare/workers/client.py). Where no newer one runs, a line says what is lost.

Each environment has the output of pip in its setup.log. This program imports only the standard library, and its syntax
is that of Python 3.6, so that an old Python, too, prints which one is needed.
"""

import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

if sys.version_info < (3, 11):  # noqa: UP036  (an older one reads this file, too)
    sys.exit(
        f"xlafuse needs Python 3.11 or newer; {sys.executable} is Python {platform.python_version()}. "
        "Name another one: make PYTHON=python3.12"
    )

ROOT = Path(__file__).resolve().parents[1]
NEWER = ("3.12", "3.13")  # both tested with the pinned packages; the H200's choices were recorded on 3.12
WORKER_STARTS = "xla-worker-starts"  # a file in .venv-xla; compare/workers/client.py looks for it
PATIENCE_S = 10  # for a Python to start
_LOG_LINES = 15
# Some Linux distributions package these modules separately.
_PROBE = "import ctypes, ensurepip, platform, ssl, venv; print('usable', platform.python_version())"


class SetupError(Exception):
    """A command failed. The message has the last lines of its log."""


class Python(NamedTuple):
    path: str
    version: str

    @property
    def is_newer(self) -> bool:
        return tuple(map(int, self.version.split(".")[:2])) >= (3, 12)


def main(folder: str, kind: str) -> int:
    venv = Path(folder).absolute()
    xla = venv.with_name(f"{venv.name}-xla")
    own = usable(interpreter(venv)) or Python(sys.executable, platform.python_version())
    newer = own if own.is_newer else newer_python(interpreter(xla))
    if kind == "cuda" and newer is None:
        say(f"The packages for a GPU need Python 3.12 or newer; {own.path} is Python {own.version}, and no other was "
            "found. Install one, and name it: make PYTHON=python3.12")
        return 1
    base = newer if kind == "cuda" and newer else own
    say("Set-up, done once, takes 1 to 3 minutes: it downloads JAX, PyTorch, Triton and tools.")
    with ThreadPoolExecutor() as threads:
        second = threads.submit(make_for_xla, xla, newer) if newer and newer != base else None
        try:
            make(venv, base, f"{kind},dev", kind)
        except SetupError as problem:
            say(f"{problem}")
            return 1
        try:
            if newer is None:
                raise SetupError(f"no Python {' or '.join(NEWER)} was found that can make an environment")
            if second is not None:
                second.result()
        except SetupError as problem:
            say(f'XLA\'s kernels will be "not autotuned" guesses, not the H200\'s recorded choices: {problem}')
    return 0


def interpreter(environment: Path) -> str:
    return str(environment / "bin" / "python")


def newer_python(*first: str) -> Python | None:
    """Return a Python of this machine that jax 0.11.2 runs on and that can make an environment, or None."""
    found = (usable(path) for path in itertools.chain(first, candidates()))
    return next((python for python in found if python and python.version.startswith(NEWER)), None)


def candidates() -> Iterator[str]:
    """Yield paths of newer Pythons, "" for none: from the search path, pyenv's folders and uv."""
    pyenv, uv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"), shutil.which("uv")
    for series in NEWER:
        yield shutil.which(f"python{series}") or ""
        yield from sorted(map(str, pyenv.glob(f"versions/{series}*/bin/python")))
        yield answer(uv, "python", "find", series) if uv else ""


def usable(path: str) -> Python | None:
    """Run a Python, for its file alone proves nothing: a pyenv shim, for one, may only print an error."""
    word, _, version = answer(path, "-c", _PROBE).partition(" ")
    return Python(path, version) if word == "usable" else None


def answer(*command: str) -> str:
    """Return what a command prints, or "" where it fails or takes too long."""
    with tempfile.TemporaryFile("w+") as output:  # a pipe would stay open in the children of a command that is killed
        try:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, check=True,
                timeout=PATIENCE_S,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        output.seek(0)
        return output.read().strip()


def make_for_xla(folder: Path, python: Python) -> None:
    """Make the environment of XLA's worker, and start that worker once. Raises SetupError."""
    (folder / WORKER_STARTS).unlink(missing_ok=True)
    make(folder, python, "xla", "cpu")
    run(folder, interpreter(folder), "-m", "xlafuse.compare.workers.main", "xla")  # ends at once: its input is empty
    (folder / WORKER_STARTS).touch()


def make(folder: Path, python: Python, extras: str, pins: str) -> None:
    """Install the project and its packages into an environment, which is made unless it exists. Raises SetupError."""
    started = time.monotonic()
    existing = usable(interpreter(folder))
    if existing is None or existing.version != python.version:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run(folder, python.path, "-m", "venv", str(folder))
    run(
        folder, interpreter(folder), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off",
        "-c", f"constraints/{pins}.txt", "-e", f".[{extras}]",
    )
    say(f"  {folder.name} is ready after {time.monotonic() - started:.0f} s, on Python {python.version}")


def run(folder: Path, *command: str) -> None:
    """Run a command of an environment, its output in the environment's setup.log. Raises SetupError."""
    path = folder / "setup.log"
    with path.open("a") as log:
        print("$", *command, file=log, flush=True)
        try:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT).returncode
        except OSError as problem:
            raise SetupError(f"{command[0]} does not start: {problem.strerror}") from None
    if code:
        last = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        raise SetupError("\n".join([f"exit code {code}; the end of {path}:", *(f"    {line}" for line in last)]))


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
