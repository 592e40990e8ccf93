"""Read compute-sanitizer's reports by kernel, and summarise them in Markdown."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SHOWN = 3  # reports per kernel in the summary


@dataclass
class Launched:
    """One hand-written kernel in the run.

    names: names that a report may use for it. shared_bytes: the largest shared memory of a block.
    cases: the cases that launch it.
    """

    kernel: str
    language: str
    names: list[str] = field(default_factory=list)
    launches: int = 0
    shared_bytes: int = 0
    cases: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """One message of a tool. kernel: the hand-written kernel that it names, or None."""

    kernel: str | None
    warning: bool
    text: str


@dataclass(frozen=True)
class Outcome:
    """The result of one tool.

    errors, warnings: the tool's own counts; errors is None if it printed no summary. A process without a summary
    adds the errors that it printed to those of the others.
    failure: why it did not check every launch. checked: the cases that were checked, None if they are not known.
    """

    tool: str
    reports: tuple[Report, ...]
    errors: int | None
    warnings: int
    failure: str | None = None
    checked: frozenset[str] | None = None

    def count(self, kernel: str | None, warnings: bool) -> int:
        return sum(report.kernel == kernel and report.warning == warnings for report in self.reports)

    @property
    def unattributed(self) -> int:
        """The number of errors in other kernels, or not printed."""
        named = sum(report.kernel is not None and not report.warning for report in self.reports)
        return max(0, (self.errors or 0) - named)


def joined(outcomes: list[Outcome]) -> Outcome:
    """Combine the outcomes of one tool's processes, each of which had a share of the cases."""
    errors = [
        sum(not report.warning for report in outcome.reports) if outcome.errors is None else outcome.errors
        for outcome in outcomes
    ]
    return Outcome(
        outcomes[0].tool,
        tuple(report for outcome in outcomes for report in outcome.reports),
        None if all(outcome.errors is None for outcome in outcomes) else sum(errors),
        sum(outcome.warnings for outcome in outcomes),
        "; ".join(dict.fromkeys(outcome.failure for outcome in outcomes if outcome.failure)) or None,
        frozenset().union(*(outcome.checked or () for outcome in outcomes)),
    )


_PREFIX = "========= "
# "ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)"
_MEMCHECK_SUMMARY = re.compile(r"^========= ERROR SUMMARY: (\d+) error", re.MULTILINE)
_RACECHECK_SUMMARY = re.compile(
    r"^========= RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", re.MULTILINE
)
_NO_REPORT = re.compile(
    r"COMPUTE-SANITIZER|.*SUMMARY:|(Error: )?Target application|Error: process|Error: No attachable|Tracking kernels"
)
_UNTRACKED = "Internal Sanitizer Error"


def parse(tool: str, log: str, launched: list[Launched]) -> Outcome:
    """Read the log of `tool`. A message begins with "========= " and a letter; its details are indented."""
    messages: list[list[str]] = []
    for line in log.splitlines():
        if not line.startswith(_PREFIX.rstrip()):
            continue
        text = line[len(_PREFIX) :]
        if text[:1].strip():
            messages.append([text])
        elif messages and text.strip():
            messages[-1].append(text.strip())
    reports = []
    for message in messages:
        if _NO_REPORT.match(message[0]):
            continue
        where = " ".join(line for line in message if "Host Frame" not in line)
        kernel = next((entry.kernel for entry in launched if _names_any(where, entry.names)), None)
        reports.append(Report(kernel, message[0].lower().startswith("warning"), "; ".join(message[:4])))
    untracked = next((report.text for report in reports if report.text.startswith(_UNTRACKED)), None)
    found = (_MEMCHECK_SUMMARY if tool == "memcheck" else _RACECHECK_SUMMARY).search(log)
    if found:
        warnings = int(found[2]) if tool == "racecheck" else 0
        return Outcome(tool, tuple(reports), int(found[1]), warnings, untracked)
    return Outcome(tool, tuple(reports), None, 0, f"{tool} printed no summary: {end_of(log)}")


def _names_any(text: str, names: list[str]) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)


def end_of(text: str, lines: int = 3) -> str:
    """Return the last lines that are not empty."""
    last = [line.strip("= \n") for line in text.splitlines()]
    return "; ".join([line for line in last if line][-lines:]) or "no output"


def summary(launched: list[Launched], outcomes: list[Outcome], environment: str) -> str:
    """Return Markdown: a row for every kernel, a column for every tool, and the first reports."""
    lines = [
        "# compute-sanitizer on every hand-written kernel", "", environment, "",
        "Errors, and racecheck's warnings, by kernel. Each kernel ran forward or backward on small odd shapes.", "",
        "| kernel | written in | launches | shared memory, bytes per block | "
        + " | ".join(outcome.tool for outcome in outcomes) + " |",
        "|---|---|--:|--:|" + "--:|" * len(outcomes),
    ]
    for entry in sorted(launched, key=lambda entry: (entry.language, entry.kernel)):
        cells = " | ".join(_cell(entry, outcome) for outcome in outcomes)
        lines.append(f"| {entry.kernel} | {entry.language} | {entry.launches} | {entry.shared_bytes} | {cells} |")
    lines.append("")
    every = len({case for entry in launched for case in entry.cases})
    for outcome in outcomes:
        if outcome.failure:
            lines.append(f"- **{outcome.failure}**")
        left = _left(launched, outcome)
        if left:
            names = ", ".join(f"`{case}`" for case in left)
            lines.append(f"- **{outcome.tool}: {len(left)} cases were not checked**: {names}")
        if outcome.errors is None:
            continue
        warnings = f", {outcome.warnings} warnings" if outcome.tool == "racecheck" else ""
        other = f", {outcome.unattributed} of them in other kernels or not printed" if outcome.unattributed else ""
        whole = "" if left or outcome.failure else f"; it checked all {every} cases that were compiled"
        lines.append(f"- {outcome.tool}: {outcome.errors} errors{other}{warnings}{whole}")
    reports = _first_reports(outcomes)
    return "\n".join([*lines, *(["", "## Reports", "", *reports] if reports else [])]) + "\n"


def _cell(entry: Launched, outcome: Outcome) -> str:
    errors, warnings = (outcome.count(entry.kernel, kind) for kind in (False, True))
    if outcome.failure and outcome.checked is None and not errors:
        return "not fully checked"
    if outcome.tool == "racecheck" and entry.shared_bytes == 0:
        return "no shared memory"
    left = len(_left([entry], outcome))
    if left == len(entry.cases) and left and not errors:
        return "not checked"
    part = f", {len(entry.cases) - left} of {len(entry.cases)} cases" if left else ""
    return f"{errors} ({warnings} warnings){part}" if warnings else f"{errors}{part}"


def _left(launched: list[Launched], outcome: Outcome) -> list[str]:
    """Return the cases of these kernels that a tool did not check, each once."""
    if outcome.checked is None:
        return []
    return [case for case in dict.fromkeys(c for entry in launched for c in entry.cases) if case not in outcome.checked]


def _first_reports(outcomes: list[Outcome]) -> list[str]:
    lines = []
    for outcome in outcomes:
        for kernel in sorted({report.kernel or "" for report in outcome.reports}):
            of_kernel = [report for report in outcome.reports if (report.kernel or "") == kernel]
            lines += [f"- {outcome.tool}, {kernel or 'another kernel'}: {r.text}" for r in of_kernel[:SHOWN]]
            if len(of_kernel) > SHOWN:
                lines.append(f"- {outcome.tool}, {kernel or 'another kernel'}: {len(of_kernel) - SHOWN} more")
    return lines
