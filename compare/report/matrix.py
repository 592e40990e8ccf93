"""Rows at a glance: a line for each case and direction, a column for each implementation, device times in it."""

from __future__ import annotations

from compare.report import printable
from compare.report.rows import Row
from compare.report.table import escaped, number, title

LEGEND = "* the smallest median of its line; a lead within the spread that the full table shows decides nothing."


def render(rows: list[Row], *, markdown: bool = False) -> str:
    """Device times in µs, * marking the fastest of a line; the status where there is no time, nothing without a row."""
    from tabulate import tabulate

    if not rows:
        return "no records"
    names = list(dict.fromkeys(str(row["implementation"]) for row in rows))
    lines: dict[str, dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(title(row), {})[str(row["implementation"])] = row
    body = [[label, *(_cell(members.get(name), members) for name in names)] for label, members in lines.items()]
    headers = ["device time, µs", *(printable(name, 40) for name in names)]
    if markdown:
        headers, body = [escaped(h) for h in headers], [[escaped(cell) for cell in line] for line in body]
    table = tabulate(
        body, headers=headers, tablefmt="github" if markdown else "simple", disable_numparse=True,
        colalign=["left"] + ["right"] * len(names),
    )
    return f"{table}\n\n{LEGEND}"


def _cell(row: Row | None, members: dict[str, Row]) -> str:
    if row is None:
        return ""
    time = row["device_time_us"]
    if time is None:
        return printable(str(row["status"]), 20)
    # Only what one clock timed in one segment is compared.
    rivals = [
        other["device_time_us"] for other in members.values()
        if other["device_time_us"] is not None
        and (other["segment"], other["timer"]) == (row["segment"], row["timer"])
    ]
    return number(time) + (" *" if time == min(rivals) and len(rivals) > 1 else "")
