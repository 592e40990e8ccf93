"""`ProfiledSteps`: a profile by steps, joined to the graphs of its programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..base.usage import join_some
from ..graph import formats
from ..graph.analyse.roofline import Ceilings
from ..profiles.join import Joined
from ..profiles.model import Profile
from ..profiles.steps import ProfiledStep
from .target_ceilings import own_ceilings, target_ceilings

MOST_NAMED = 10


@dataclass(frozen=True)
class ProfiledSteps:
    """A profile by steps.

    choice: what tells the profiles of a path apart: "rank", "GPU", or "profile" for their places. number: of this one.
    alike, unlike: the numbers of those that run the same kernels as this one, and of those that do not.
    notes: facts without which the numbers mislead.
    compile_s: the seconds of compilation by function, where `xlafuse capture` ran the program.
    compile_places: the user's lines whose calls made torch.compile compile, by its number: "torch.compile 0/1".
    """

    path: Path
    profile: Profile
    steps: tuple[ProfiledStep, ...]
    joined: Joined
    choice: str = "rank"
    number: int = 0
    alike: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    compile_s: Mapping[str, float] = field(default_factory=dict)
    compile_places: Mapping[str, str] = field(default_factory=dict)

    @property
    def others(self) -> str:
        """The sentence about other ranks or GPUs; "" where there are none."""
        groups = (("the same", self.alike), ("other", self.unlike))
        named = [f"{words} kernels: {join_some(which, MOST_NAMED)}" for words, which in groups if which]
        count = 1 + len(self.alike) + len(self.unlike)
        return f"{self.choice} {self.number} of {count}; {'; '.join(named)}" if named else ""

    @property
    def warnings(self) -> list[str]:
        """The origin of the graphs' times, and the share of the time that is in no graph."""
        if not self.joined.graphs:
            return []
        outside = formats.share(1 - self.joined_share, 1)
        step = f"kernels have the times of a median step of {len(self.steps)}"
        return [f"{self.path}: {step}; {outside} of the time is of other kernels", *filter(None, [self.others])]

    @property
    def joined_share(self) -> float:
        """The share of the kernels' time that is joined to a graph."""
        ran = [
            (event.seconds, owner) for step, owners in zip(self.steps, self.joined.owners, strict=True)
            for event, owner in zip(step.events, owners, strict=True)
        ]
        total = sum(seconds for seconds, _ in ran)
        return sum(seconds for seconds, owner in ran if owner is not None) / total if total else 0.0

    def ceilings(self, target: str | None) -> dict[str, Ceilings | None]:
        """Return ceilings by the graph's name: the target's, else those of the GPU that was profiled.

        Raises UsageError for an unknown target.
        """
        named = None if target is None else target_ceilings(target)
        return {name: named or own_ceilings(graph)[0] for name, graph in self.joined.graphs.items()}
