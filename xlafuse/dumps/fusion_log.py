"""A reader of the logs of XLA's GPU fusion passes: priority fusion's log, and the fusion visualisation.

- The log (`*.priority_fusion_dump.txt`, text of `xla.gpu.FusionProcessDumpProto`) is written if `xla_dump_hlo_pass_re`
  matches priority-fusion. A refusal in it names the producer and not the consumer.
- The visualisation (`xla_dump_fusion_visualization`) names both, also for multi-output fusion. jax 0.11 writes a `.pyz`
  with an SQLite database, jax 0.10 an HTML page with the frames in a JavaScript array. Nothing in it is executed.
"""

import contextlib
import json
import re
import shutil
import sqlite3
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_BYTES = 1 << 30
_MAX_SECONDS = 10.0
_MAX_FRAMES = 1_000_000


class LogError(ValueError):
    """The content does not match the file's name; the message names the file and the expected content."""


@dataclass(frozen=True)
class Fused:
    """XLA fused `producer` into `consumer`; the result is named `fusion` and keeps the consumer's root."""

    producer: str
    consumer: str
    fusion: str


@dataclass(frozen=True)
class Estimated:
    """The cost model's times for fusing `producer` into all of `consumers`, in microseconds, with and without fusion.

    If only some consumers changed, XLA logs the change since its last estimate. One estimate alone can therefore be far
    off, even negative.
    """

    producer: str
    consumers: tuple[str, ...]
    fused_us: float
    unfused_us: float


@dataclass(frozen=True)
class Ineligible:
    """`producer` cannot be fused into all of its consumers, so XLA fuses it into none."""

    producer: str
    reason: str


Step = Fused | Estimated | Ineligible


@dataclass
class FusionLog:
    """A priority fusion log.

    steps: in the order of the log. module: HLO text before the pass, with the names that the steps use. unparsed: (line
    number from 1, text) of lines that were not understood.
    """

    steps: list[Step] = field(default_factory=list)
    module: str = ""
    unparsed: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Refusal:
    """A pass's reason not to fuse one pair. fusion_pass: "priority-fusion" or "multi_output_fusion"."""

    fusion_pass: str
    producer: str
    consumer: str
    reason: str


_FIELD = re.compile(r'\s*(\w+): (?:"((?:[^"\\]|\\.)*)"|(\S+))$')
_BLOCK = re.compile(r"\s*(\w+) \{$")
_KINDS = ("fusion", "update_priority", "producer_ineligible")
_ESCAPE = re.compile(r"\\([0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def read_log(lines: Iterable[str]) -> FusionLog:
    """Read a log's text line by line. No content makes it raise."""
    log = FusionLog()
    path: list[str] = []
    fields: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r\n")
        if block := _BLOCK.match(line):
            path.append(block[1])
            fields = {}
        elif line.strip() == "}":
            if path[:1] == ["fusion_steps"] and len(path) == 2 and not _add_step(log, path[1], fields):
                log.unparsed.append((number, path[1]))
            if path:
                path.pop()
        elif pair := _FIELD.match(line):
            value = pair[3] if pair[2] is None else _unescape(pair[2])
            if path[:1] == ["fusion_steps"]:
                fields.setdefault(pair[1], []).append(value)
            elif not path and pair[1] == "hlo_module_before_fusion":
                log.module = value
        elif line.strip():
            log.unparsed.append((number, line[:200]))
    return log


def _add_step(log: FusionLog, kind: str, fields: dict[str, list[str]]) -> bool:
    def one(name: str) -> str:
        return fields.get(name, [""])[0]

    producer = one("producer_name")
    try:
        if kind not in _KINDS or not producer:
            return False
        if kind == "fusion":
            log.steps.append(Fused(producer, one("consumer_name"), one("fusion_name")))
        elif kind == "update_priority":
            fused, unfused = float(one("us_fused") or 0), float(one("us_unfused") or 0)  # proto3 omits a zero
            log.steps.append(Estimated(producer, tuple(fields.get("consumer_names", ())), fused, unfused))
        else:
            log.steps.append(Ineligible(producer, one("reason")))
    except ValueError:
        return False
    return True


def _unescape(text: str) -> str:
    """Return a string of the proto text format without its escapes; octal escapes are bytes of UTF-8."""
    if "\\" not in text:
        return text

    def plain(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code, 8) & 0xFF) if code[0] in "01234567" else _ESCAPED.get(code, code)

    text = _ESCAPE.sub(plain, text)
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text


def read_frames(path: Path) -> list[str]:
    """Return the labels of a fusion visualisation in order: `.pyz`, `.html`, or the `.txt` of `keep_artifacts`.

    Raises LogError, which names the file, for other content; OSError if the file cannot be read.
    """
    try:
        if path.suffix == ".txt":
            return _text(path).splitlines()
        return _pyz_labels(path) if path.suffix == ".pyz" else _html_labels(path)
    except (RecursionError, ValueError, NotImplementedError, zipfile.BadZipFile, sqlite3.Error) as problem:
        raise LogError(f"{path}: not a fusion visualisation of XLA: {problem}") from None


def _text(path: Path) -> str:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES >> 30} GiB")
    return path.read_text(errors="replace")


def _pyz_labels(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(prefix="xlafuse-") as folder:
        found = next((info for info in archive.infolist() if info.filename == "fusions.db"), None)
        if found is None or found.file_size > MAX_BYTES:
            raise ValueError("it holds no fusions.db" if found is None else f"fusions.db is over {MAX_BYTES >> 30} GiB")
        copy = Path(folder) / "fusions.db"
        with archive.open(found) as packed, copy.open("wb") as out:
            shutil.copyfileobj(packed, out)  # reads no more than file_size, whatever the compressed data hold
        with contextlib.closing(sqlite3.connect(f"{copy.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            return list(_labels(database))


def _labels(database: sqlite3.Connection) -> Iterator[str]:
    # A view in a hostile file could run forever, so only a table is read, for a limited time.
    deadline = time.monotonic() + _MAX_SECONDS
    database.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
    database.execute("PRAGMA trusted_schema=OFF")
    if database.execute("SELECT type FROM sqlite_master WHERE name='frames'").fetchall() != [("table",)]:
        raise ValueError("fusions.db has no table `frames`")
    for (label,) in database.execute("SELECT label FROM frames ORDER BY id LIMIT ?", (_MAX_FRAMES,)):
        if isinstance(label, str):
            yield label


_FRAMES = "const frames = "


def _html_labels(path: Path) -> list[str]:
    text = _text(path)
    start = text.find(_FRAMES)
    if start < 0:
        raise ValueError("it has no array `frames`")
    frames, _ = json.JSONDecoder().raw_decode(text, start + len(_FRAMES))
    # [graph, label, what to highlight]
    return [frame[1] for frame in frames if len(frame) == 3 and isinstance(frame[1], str)]


_REFUSALS = (
    ("priority-fusion", re.compile(r"Cannot fuse producer \|([^|]+)\| with consumer \|([^|]+)\|: (.*)", re.DOTALL)),
    (
        "multi_output_fusion",
        re.compile(r"Not considering fusion of producer \|([^|]+)\| into consumer \|([^|]+)\| due to: (.*)", re.DOTALL),
    ),
    ("multi_output_fusion", re.compile(r"Not fusing siblings \|([^|]+)\| and \|([^|]+)\| due to: (.*)", re.DOTALL)),
)


def refusals(labels: Iterable[str]) -> list[Refusal]:
    """Return the reasons in the labels why pairs were not fused. For siblings, `producer` and `consumer` are the two.

    "using Triton (will try fallback)" is left out, because XLA then tries the other emitter.
    """
    found = []
    for label in labels:
        for fusion_pass, pattern in _REFUSALS:
            if match := pattern.fullmatch(label):
                found.append(Refusal(fusion_pass, match[1], match[2], match[3]))
                break
    return found
