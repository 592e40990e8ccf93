"""A profile as text and as JSON: the time of a step, its kernels and its gaps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..base.text import printable
from ..base.usage import join_some
from ..graph import formats
from ..graph.alike import any_layer
from ..graph.analyse.roofline import Ceilings
from ..graph.model import Kernel
from ..graph.render import text_view
from ..model.places import parse, sources_beside
from ..profiles.gap_causes import Cause, gap_causes
from ..profiles.host_parts import host_parts
from ..profiles.kernel_times import KernelTimes, Times, kernel_times
from ..profiles.steps import Gap, device_seconds, gaps
from ..sources.profiled import ProfiledSteps

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "xlafuse.profile/1"
MOST_ROWS = 25
MOST_REMARKS = 5
MOST_STAGES = 3
MOST_STEPS = 6
_LEAST_CAUSE = 0.01  # of a step: a sentence names a cause of its gaps
# Methods that wait for the device, by the operation of PyTorch that they are.
WAITING_CALLS = {"item": ("item", "tolist"), "_local_scalar_dense": ("item", "tolist"), "copy_": ("cpu", "numpy"),
                 "_to_copy": ("cpu", "numpy"), "to": ("cpu", "numpy"), "nonzero": ("nonzero",)}
_HOST_LATE = 0.5  # the share of a gap in which the host had not launched, above which the host caused it


class ProfileView:
    """The numbers of an opened profile. Times are in microseconds."""

    def __init__(self, opened: ProfiledSteps, ceilings: Mapping[str, Ceilings | None]) -> None:
        self.opened = opened
        self.steps = opened.steps
        self.kernels = kernel_times(opened.steps, opened.joined, ceilings)
        self._gaps = [gaps(step.events) for step in opened.steps]
        device = [device_seconds(step.events) for step in opened.steps]
        idle = [sum(gap.seconds for gap in found) for found in self._gaps]
        self._by_step = [(seconds * 1e6, gap * 1e6) for seconds, gap in zip(device, idle, strict=True)]  # device, idle
        self.device_us, self.idle_us = (Times.of(samples) for samples in zip(*self._by_step, strict=True))
        self._kernels_us = sum(kernel.step.median for kernel in self.kernels)
        self.busy_us = Times.of([(seconds - gap) * 1e6 for seconds, gap in zip(device, idle, strict=True)])

    def operator_shares(self) -> dict[str, float]:
        """Return the shares of kernels that are in no graph, by the operation of PyTorch, most time first.

        The name "" stands for kernels of an unknown operation.
        """
        total = sum(kernel.step.total for kernel in self.kernels) or 1.0  # kernels that take no time have no share
        shares: dict[str, float] = {}
        for kernel in self.kernels:
            if not kernel.graph:
                name = ", ".join(kernel.host_ops)
                shares[name] = shares.get(name, 0.0) + kernel.step.total / total
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def host_late_us(self) -> float | None:
        """The idle time of a median step before the host's launches that are known; None where none is."""
        known = [[gap.host_late for gap in found if gap.host_late is not None] for found in self._gaps]
        return statistics.median(sum(found) * 1e6 for found in known) if any(known) else None

    def causes(self) -> dict[Cause, float]:
        """Return the microseconds of a step's gaps by cause, the mean of the steps."""
        total: dict[Cause, float] = {}
        for step, owners, found in zip(self.steps, self.opened.joined.owners, self._gaps, strict=True):
            launches = {
                number: Cause(
                    "launches",
                    f"compiled code of {owner[0]}" if owner and part.phase != "update" else part.name,
                    event.host_function,
                )
                for number, (event, owner, part) in enumerate(
                    zip(step.events, owners, host_parts(step.events), strict=True)
                )
            }
            for cause, seconds in gap_causes(found, self.opened.profile.waits, launches).items():
                total[cause] = total.get(cause, 0.0) + seconds * 1e6 / len(self.steps)
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def _causes(self) -> str:
        """Return the causes in words; "" where the host caused nothing that is worth a word."""
        words = {
            "synchronisation": "after {}, which waits for the device", "input": "while the host gets input",
            "copy": "after {}, which waits for a copy from pageable memory", "compile": "while the host compiles {}",
            "launches": "before launches of {}",
        }
        named = []
        for cause, us in self.causes().items():
            if cause.kind in words and us >= _LEAST_CAUSE * self.device_us.median:
                what = words[cause.kind].format(cause.name or "other work")
                lines = self._lines_of(cause)
                named.append(f"{formats.microseconds(us)} {what}{f' ({join_some(lines, MOST_STAGES)})' * bool(lines)}")
        return "; ".join(named)

    def _lines_of(self, cause: Cause) -> list[str]:
        """Return the user's function that calls what delays the device, else the lines that may; [] if unknown."""
        if cause.function:
            return [f"in {cause.function}"]
        if line := self.opened.compile_places.get(cause.name):
            return [line]
        if cause.kind in ("launches", "compile"):
            lines = self._calls((cause.name.rpartition(".")[2],))
            return lines if len(lines) == 1 else []  # of several, such as a scheduler's step(), one would be a guess
        if cause.kind == "synchronisation":
            return self._calls(WAITING_CALLS.get(cause.name.removeprefix("aten::"), ()))
        return []

    def _calls(self, names: Sequence[str]) -> list[str]:
        """Return the lines in the user's files that call a method or function of these names."""
        sources = sources_beside(self.opened.path)
        places = {
            place.file: None for graph in self.opened.joined.graphs.values() for kernel in graph.kernels or ()
            for op in kernel.source_ops if (place := parse(op.place)) is not None
        }
        return sources.calls(names, sources.own_files or places)

    def gap_pairs(self) -> list[tuple[str, str, float, bool | None]]:
        """Return pairs of kernels with the idle time between them in a median step, and whether the host was late."""
        pairs: dict[tuple[str, str], list[list[Gap]]] = {}
        for number, found in enumerate(self._gaps):
            for gap in found:
                pairs.setdefault((gap.before, gap.after), [[] for _ in self._gaps])[number].append(gap)
        rows = []
        for (before, after), by_step in pairs.items():
            idle = sum(gap.seconds for each in by_step for gap in each)
            late = [gap.host_late for each in by_step for gap in each if gap.host_late is not None]
            median = statistics.median(sum(gap.seconds for gap in each) for each in by_step) * 1e6
            rows.append((before, after, median, sum(late) > _HOST_LATE * idle if late else None))
        return sorted(rows, key=lambda row: -row[2])

    # Text

    def text(self, *, width: int = 80, every: bool = False) -> RenderableType:
        tree = text_view.titled(str(self.opened.path), self._lines())
        shown = self.kernels if every else self.kernels[:MOST_ROWS]
        title = f"{formats.count(len(self.kernels), 'kernel')}; kernels that do the same work are one line"
        above = "above" if any(each.roofline_us is not None for each in self.kernels) else ""
        branch = tree.add(text_view.plain(title, "bold"))
        if above:
            branch.add(text_view.plain("above: µs above the roofline time", "dim"))
        branch.add(self._row("in a median step", "times", "µs", "share", above, style="dim"))
        for each in shown:
            branch.add(self._kernel(each, width))
        if len(shown) < len(self.kernels):
            rest = sum(each.step.median for each in self.kernels[len(shown):])
            more = formats.count(len(self.kernels) - len(shown), "cheaper one")
            branch.add(self._row(f"… {more}; --all shows them", "", formats.number_of_us(rest), "", ""))
        if remarks := self._remarks():
            branch = tree.add(text_view.plain("what stands out", "bold"))
            for remark in remarks:
                branch.add(text_view.plain(printable(remark, text_view.MOST_WORDS)))
        return tree

    def _lines(self) -> list[str]:
        profile, found = self.opened.profile, []
        versions = "".join(f", {package} {version}" for package, version in profile.versions.items())
        found.append(f"{profile.tool} on {profile.device}{versions}: {profile.source}")
        named = [step.name for step in self.steps if step.name]
        steps = f"{formats.count(len(named), 'step')} ({join_some(named, MOST_STEPS)})"
        whole = steps if named else "no steps announced, so all is one step"
        busy = formats.share(self.busy_us.median, self.device_us.median)
        found.append(f"{whole}; a step takes {time_range(self.device_us)} on the device; kernels run in {busy} of it")
        if self.idle_us.median:
            late = self.host_late_us
            some = "at least " * any(gap.host_late is None for found in self._gaps for gap in found)
            cause = "" if late is None else f", {some}{formats.microseconds(late)} of it before the host's launch"
            found.append(f"gaps between kernels take {time_range(self.idle_us)}{cause}")
            if causes := self._causes():
                found.append(f"of it {causes}")
        if compile_s := self.opened.compile_s:
            longest = sorted(compile_s, key=lambda name: -compile_s[name])
            most = join_some([f"{formats.name(name, 40)} {compile_s[name]:.1f} s" for name in longest], MOST_STAGES)
            found.append(f"the program was compiled for {sum(compile_s.values()):.1f} s: {most}")
        graphs = ", ".join(
            name + (f" ({calls} times a step)" if calls > 1 else "") for name, calls in self.opened.joined.calls.items()
        )
        if graphs:
            share = formats.share(self.opened.joined_share, 1)
            joined = f"{share} of the kernels' time is joined to kernels of {graphs}"
        else:
            joined = "no kernel is joined to a graph; --dump PATH names the compilers' files of this program"
        found.append(joined + self._operators())
        if others := self.opened.others:
            found.append(f"{others}; --rank chooses another")
        return [*found, *self.opened.notes]

    def _operators(self) -> str:
        """Return the shares of kernels that PyTorch launched outside of the graphs, and of those of unknown origin."""
        shares = self.operator_shares()
        other = shares.pop("", 0.0)
        named = [f"{formats.name(name, 40)} {formats.share(share, 1)}" for name, share in shares.items()]
        share = formats.share(sum(shares.values()), 1)
        found = f"; {share} to operators of PyTorch: {join_some(named, MOST_STAGES)}" if named else ""
        return found + (f"; {formats.share(other, 1)} to none" if other else "")

    def _row(self, title: str, launches: str, us: str, share: str, above: str, style: str = "") -> Any:
        grid = text_view.columns(None, 5, 7, 5, 7, right=(1, 2, 3, 4), gap=1)
        grid.add_row(text_view.plain(title, style), *map(text_view.plain, (launches, us, share, above)))
        return grid

    def _kernel(self, each: KernelTimes, width: int) -> Any:
        from rich.console import Group

        above = "" if each.above_roofline_us is None else formats.number_of_us(each.above_roofline_us)
        head = self._row(
            formats.runtime(each.name, max(20, width - 40)), str(each.launches), formats.number_of_us(each.step.median),
            formats.share(each.step.median, self._kernels_us), above, style="bold",
        )
        return Group(head, text_view.plain(" · ".join(self._facts(each)), "dim"))

    def _facts(self, each: KernelTimes) -> list[str]:
        found = [f"{time_range(each.step)} a step"] if len(self.steps) > 1 else []
        if each.launches > 1:
            found.append(f"{time_range(each.launch)} a launch")
        found += [
            f"with {helper.launches} {formats.runtime(helper.name, 30)}: {formats.microseconds(helper.step.median)}"
            for helper in each.helpers
        ]
        kernels = self._graph_kernels(each)
        if kernels:
            numbers = ", ".join(str(index + 1) for index in each.kernels[:4])
            more = f" and {len(each.kernels) - 4} more" if len(each.kernels) > 4 else ""
            found += [f"{formats.name(each.graph, 30)} {numbers}{more}", kernels[0].kind]
            for stage, words, line in text_view.operations(kernels[0].source_ops)[:MOST_STAGES]:
                shown = any_layer(stage) if len(kernels) > 1 else stage
                place = f" ({formats.place(line, 40)})" if line else ""
                found.append(f"{formats.name(shown, 30)}: " * bool(stage) + printable(words, 80) + place)
        else:
            found += [f"grid {'x'.join(map(str, each.grid))}"] if each.grid else []
            part, phase = each.host_part
            found += [f"{phase}: {formats.name(part, 40)}"] if phase else []
            found += [f"by {formats.name(name, 40)}" for name in each.host_ops[:MOST_STAGES]]
            found += [f"in {formats.name(name, 60)}" for name in each.host_functions[:MOST_STAGES]]
        return found

    def operations(self, each: KernelTimes) -> tuple[str, ...]:
        """Return the operations of a line with their stages, without a layer's number.

        Those of a kernel without a graph are the operations of PyTorch that launched it.
        """
        operations = [op for kernel in self._graph_kernels(each)[:1] for op in kernel.source_ops]
        found = tuple(f"{any_layer(op.stage)}: {op.op}".removeprefix(": ") for op in operations)
        return found or each.host_ops

    def _graph_kernels(self, each: KernelTimes) -> list[Kernel]:
        graph = self.opened.joined.graphs.get(each.graph)
        return [] if graph is None else [(graph.kernels or ())[index] for index in each.kernels]

    def _of(self, each: KernelTimes) -> str:
        """Return the stages, else the lines of the user's program: " of train.py:8"; "" where neither is known."""
        kernel = next(iter(self._graph_kernels(each)), None)
        words = [] if kernel is None else [*map(any_layer, kernel.stages)] or [*map(formats.place, kernel.lines)]
        return f" of {join_some(dict.fromkeys(words), MOST_STAGES)}" if words else ""

    def _remarks(self) -> list[str]:
        worth = [
            (kernel.above_roofline_us, (
                f"{formats.runtime(kernel.name, 50)}{self._of(kernel)} ({kernel.launches} a step) takes "
                f"{formats.microseconds(kernel.step.median)}, "
                f"{formats.microseconds(kernel.above_roofline_us)} above its roofline time"
            ))
            for kernel in self.kernels if kernel.above_roofline_us
        ]
        for before, after, us, late in self.gap_pairs()[:MOST_REMARKS]:
            cause = ": launched in time" if late is False else ""
            worth.append((us, (
                f"the device does nothing for {formats.microseconds(us)} between {formats.runtime(before, 40)} and "
                f"{formats.runtime(after, 40)}{cause}"
            )))
        return [text for _, text in sorted(worth, key=lambda item: -item[0])[:MOST_REMARKS]]

    # JSON

    def to_json(self) -> dict[str, Any]:
        profile = self.opened.profile
        return {
            "schema": SCHEMA, "tool": profile.tool, "source": profile.source, "device": profile.device,
            "rank": profile.rank, "gpu": profile.gpu, "versions": dict(profile.versions),
            "same_kernels": list(self.opened.alike), "other_kernels": list(self.opened.unlike),
            "notes": list(self.opened.notes), "compile_s": dict(self.opened.compile_s),
            "steps": [
                {"name": step.name, "kernels": len(step.events), "device_us": device, "idle_us": idle}
                for step, (device, idle) in zip(self.steps, self._by_step, strict=True)
            ],
            "device_us": self.device_us.to_json(), "idle_us": self.idle_us.to_json(),
            "host_late_us": self.host_late_us, "joined_share": self.opened.joined_share,
            "operator_shares": self.operator_shares(),
            "graphs": dict(self.opened.joined.calls),
            "kernels": [self._kernel_json(each) for each in self.kernels],
            "gap_causes": [
                {"kind": cause.kind, "name": cause.name, "lines": self._lines_of(cause), "us": us}
                for cause, us in self.causes().items()
            ],
            "gaps": [
                {"before": before, "after": after, "us": us, "host_late": late}
                for before, after, us, late in self.gap_pairs()
            ],
        }

    def _kernel_json(self, each: KernelTimes) -> dict[str, Any]:
        kernels = self._graph_kernels(each)
        return {
            "name": each.name, "grid": each.grid, "launches": each.launches, "step_us": each.step.to_json(),
            "launch_us": each.launch.to_json(),
            "helpers": [
                {"name": helper.name, "launches": helper.launches, "step_us": helper.step.to_json()}
                for helper in each.helpers
            ],
            "graph": each.graph or None, "kernels": list(each.kernels),
            "host_ops": list(each.host_ops), "host_functions": list(each.host_functions),
            "part": each.host_part.name or None, "phase": each.host_part.phase or None,
            "kind": kernels[0].kind if kernels else None,
            "operations": [[op.op, op.stage, op.line] for op in kernels[0].source_ops] if kernels else [],
            "lines": list(dict.fromkeys(line for kernel in kernels for line in kernel.lines)),
            "roofline_us": each.roofline_us, "above_roofline_us": each.above_roofline_us,
        }


def time_range(times: Times) -> str:
    """Return a median with its least and most."""
    median = formats.microseconds(times.median)
    if times.least == times.most:
        return median
    return f"{median} ({formats.number_of_us(times.least)} to {formats.number_of_us(times.most)})"

