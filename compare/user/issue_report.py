"""The text of an issue for a compiler's project, about one kernel. It has what the path holds, and nothing else."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.text import code_block, code_span, escaped, number, printable
from ..base.usage import UsageError, write_file
from ..graph import formats
from ..graph.analyse.missed_fusions import MissedFusion, ranked
from ..graph.analyse.roofline import roofline_time_us
from ..graph.analyse.totals import known_declared_bytes
from ..graph.model import FusionGraph, Kernel, Reason
from ..profiles.files import capture_folders, captured_versions
from ..sources.opening import open_source
from ..sources.result import Result
from ..sources.source import Source
from .extract import Program, kernel_of, program_of

_PROJECTS = {"xla": "openxla/xla", "inductor": "pytorch/pytorch"}
_NAMES = {"xla": "XLA", "inductor": "Inductor"}
_WORKERS = {"xla": "xla", "inductor": "torch"}  # of a run's segments
_OTHER = {"xla": "inductor", "inductor": "xla"}
_VERSIONS = ("python", "cuda", "torch", "triton", "jax", "jaxlib", "jax-cuda13-plugin")
_MOST_OPERATIONS = 6
_MOST_MISSED = 3
_MOST_KERNELS = 3  # of the other compiler
_LONGEST = 65_536  # characters of an issue at GitHub


def extract_and_report(path: Path, kernel: str, module: str | None, out: Path) -> list[str]:
    """Write the program and, beside it, the text of an issue; return lines about them. Raises as `extract` does."""
    opened = open_source(path)
    source, name = kernel_of(opened, kernel, module)
    program = program_of(source, name)
    text = out.with_suffix(".md")
    if text == out:
        raise UsageError(f"{out}: the text of the issue gets this name; end the program's with .py")
    whole = _report(_About(opened, source, name), program, out.name)
    write_file(out, program.text.encode())
    write_file(text, whole.encode())
    project = _PROJECTS[source.load().compiler]
    return [f"{out}: {program.about}", f"python {out}", f"{text}: the text of an issue for {project}"]


def _report(about: _About, program: Program, file: str) -> str:
    """Return the text in Markdown. program: the reproducer, which is in `file`."""
    check, unchecked = " checks the results against the kernel's operations one by one,", ""
    if not program.checked:
        check, unchecked = "", " It does not check the results, because the dump lacks the operations of this kernel."
    run = [
        "## Reproducer", f"{code_span(f'python {file}')} needs no other file. It runs the kernel on random inputs,"
        f"{check} and on a GPU times it.{unchecked}",
    ]
    inlined = _folded(file, program.text, "python")
    attached = f"The file {code_span(file)} is attached."
    versions = "\n".join(about.versions())
    before = [f"# {about.title()}", " ".join(about.description()), *(["## Versions", versions] if versions else [])]
    behind = [*about.output(program), *about.other_compiler()]
    whole = "\n\n".join([*before, *run, inlined, *behind])
    return (whole if len(whole) < _LONGEST else "\n\n".join([*before, *run, attached, *behind])) + "\n"


@dataclass(frozen=True)
class _About:
    """A kernel's description in Markdown."""

    opened: Source
    source: Result
    name: str  # of the kernel

    @cached_property
    def kernel(self) -> Kernel:
        return self._named(self.name)

    @property
    def graph(self) -> FusionGraph:
        return self.source.load()

    @property
    def compiler(self) -> str:
        return _NAMES[self.graph.compiler]

    def missed(self) -> list[MissedFusion]:
        """Return the missed fusions of the kernel that would save a tenth of its bytes or more, most costly first."""
        least = 0.1 * known_declared_bytes(self.kernel)
        return [
            one for one in ranked(self.source.timed_graph or self.graph, self.source.ceilings)
            if one.price.bytes >= least and {one.reason.producer, one.reason.consumer} <= self.graph.named.keys()
            and self.kernel.name in (one.reason.producer, one.reason.consumer)
        ][:_MOST_MISSED]

    def device(self) -> str:
        """Return the GPU that ran the kernel, or "" where nothing says it."""
        if self.kernel.device_time_us is None:
            return ""
        return str(self._environment().get("device", "")) or self.graph.target

    def title(self) -> str:
        if missed := self.missed():
            return (
                f"{self.compiler} does not fuse {self._operations(missed[0].reason.producer)} with "
                f"{self._operations(missed[0].reason.consumer)}: {formats.size(missed[0].price.bytes)} of traffic"
            )
        words = f"{self.compiler}: {self.kernel.kind} kernel of {self._operations(self.kernel.name)}"
        return words + "".join(f", {cost}" for cost in self._costs()[:1])

    def description(self) -> Iterator[str]:
        kernels = self.graph.kernels or ()
        record = self.source.record
        sizes = [] if record is None else [f"{name}={value}" for name, value in record.case.sizes.items()]
        block = "" if record is None else f" of the block {code_span(record.case.id)} ({escaped(', '.join(sizes))})"
        which = "the only kernel" if len(kernels) == 1 else f"one of {len(kernels)} kernels"
        yield f"{code_span(self.kernel.name)} is {which} that {self.compiler} makes{block}."
        yield f"It computes {self._operations(self.kernel.name)}."
        if None not in (self.kernel.bytes_read, self.kernel.bytes_written):
            read, written = formats.size(self.kernel.bytes_read), formats.size(self.kernel.bytes_written)
            yield f"It reads {read} and writes {written}."
        if costs := self._costs():
            yield f"{self._launches()} {', '.join(costs)}."
        for one in self.missed():
            other = one.reason.producer if one.reason.consumer == self.kernel.name else one.reason.consumer
            how = "predicted times" if one.price.predicted else "bytes and launches"
            us = f", {one.price.time} by {how}" if one.price.time else ""
            text = re.sub(r" \[said of [^\]]*\]", "", one.reason.text) or one.reason.code  # words of this project
            yield (
                f"It is not fused with {code_span(other)} ({self._operations(other)}); "
                f"{self._whose(one.reason)}: {code_span(text)}. "
                f"One kernel would save {formats.size(one.price.bytes)}{us}."
            )

    def versions(self) -> Iterator[str]:
        around = {**self._captured_versions(), **self._environment()}
        found = {**{name: str(around[name]) for name in _VERSIONS if name in around}, **self.graph.versions}
        yield from (f"- {escaped(name)} {code_span(version)}" for name, version in found.items())
        if device := self.device():
            yield f"- GPU: {code_span(device)}"
        elif self.graph.target:
            yield f"- compiled for {code_span(self.graph.target)}; nothing was measured"
        driver = self._segment().get("environment", {}).get("host", {}).get("nvidia_driver")
        if number_of_driver := re.search(r"\d+\.\d[\d.]*", str(driver)):
            yield f"- driver: {code_span(number_of_driver[0])}"

    def output(self, program: Program) -> Iterator[str]:
        yield f"## What {self.compiler} makes of it"
        yield _folded(self.kernel.name, program.code, program.language)

    def other_compiler(self) -> Iterator[str]:
        """Yield what a run says of the other compiler and the same block."""
        if (other := self._other()) is None:
            return
        graph, name = other.load(), _NAMES[other.load().compiler]
        kernels = _same_work(self.kernel, graph.kernels or ())
        yield f"## What {name} makes of the same block"
        many = formats.count(len(graph.kernels or ()), "kernel")
        times = (self.source.time_us, other.time_us)
        both = None not in times and self.source.group == other.group
        took = f" {name} takes {formats.microseconds(times[1])}, {self.compiler} {formats.microseconds(times[0])}."
        versions = ", ".join(f"{package} {version}" for package, version in graph.versions.items())
        yield f"{name} ({escaped(versions)}) makes {many} of it.{took if both else ''}"
        for kernel in kernels[:_MOST_KERNELS]:
            us = "" if kernel.device_time_us is None else f", {formats.microseconds(kernel.device_time_us)}"
            yield f"{code_span(kernel.name)}: {code_span(_words(kernel))}{us}"
            try:
                program = program_of(other, kernel.name)
            except UsageError:  # a library's call has no code
                continue
            yield _folded(kernel.name, program.code, program.language)

    def _other(self) -> Result | None:
        """Return the other compiler's result for the same case: that of its default mode, else the fastest."""
        if self.source.record is None:
            return None
        found = [
            each for each in self.opened.results
            if each.record is not None and each.record.case == self.source.record.case and each.graph is not None
            and each.graph.compiler == _OTHER[self.graph.compiler] and each.graph.kernels
        ]
        default = [each for each in found if each.name == _OTHER[self.graph.compiler]]
        return min(default or found, key=lambda each: (each.time_us is None, each.time_us), default=None)

    def _whose(self, reason: Reason) -> str:
        """Return the words before a reason's text. Without the compiler's reason, xlafuse infers one from the kernels.
        """
        if reason.origin != "inferred":
            return f"{self.compiler}'s reason"
        return "no reason is known" if reason.code == "other" else "xlafuse infers the reason"

    def _launches(self) -> str:
        """Return subject and verb of the sentence about the kernel's time."""
        match self.kernel.launches:
            case 1:
                return "Its launch takes"
            case None:
                return "Its launches in one call take"
            case several:
                return f"Its {several} launches in one call take"

    def _costs(self) -> list[str]:
        """Return the kernel's time, with its GPU, and how that compares with its roofline time; nothing unmeasured."""
        us, device = self.kernel.device_time_us, self.device()
        if us is None:
            return []
        ceilings = self.source.ceilings
        least = None if ceilings is None else roofline_time_us(self.graph, self.kernel, ceilings)
        costs = [formats.microseconds(us) + (f" on {escaped(device)}" if device else "")]
        return costs + ([f"{number(us / least)} times its roofline time"] if least else [])

    def _named(self, name: str) -> Kernel:
        return next(kernel for kernel in self.graph.kernels or () if kernel.name == name)

    def _operations(self, name: str) -> str:
        return code_span(_words(self._named(name)))

    def _captured_versions(self) -> dict[str, str]:
        """Return the versions that a capture or a profile recorded."""
        for folder in capture_folders(self.opened.path):
            return captured_versions(folder)
        return {} if self.opened.profile is None else dict(self.opened.profile.profile.versions)

    def _segment(self) -> Mapping[str, Any]:
        record, run = self.source.record, self.opened.run or {}
        return next((each for each in run.get("segments", ()) if record and each["id"] == record.segment), {})

    def _environment(self) -> Mapping[str, Any]:
        workers = self._segment().get("environment", {}).get("workers", {})
        found: Mapping[str, Any] = workers.get(_WORKERS[self.graph.compiler], {})
        return found


def _words(kernel: Kernel) -> str:
    words = list(dict.fromkeys(op.op for op in kernel.source_ops)) or [kernel.kind]
    more = f" and {len(words) - _MOST_OPERATIONS} more" if len(words) > _MOST_OPERATIONS else ""
    return ", ".join(words[:_MOST_OPERATIONS]) + more


def _same_work(kernel: Kernel, others: Sequence[Kernel]) -> list[Kernel]:
    """Return kernels with stages of this kernel; all where there are none."""
    shared = [other for other in others if set(other.stages) & set(kernel.stages)]
    return shared or list(others)


def _folded(title: str, text: str, language: str) -> str:
    return f"<details><summary>{html.escape(printable(title))}</summary>\n\n{code_block(text, language)}\n\n</details>"
