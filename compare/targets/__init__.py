"""Target packs: all that a machine without a GPU must know of it, recorded on one, a folder each.

    xla/gpu_target_config-<series>.pbtxt   what XLA's compiler asks of the device; a series is jax's 0.10 or 0.11
    xla/autotune-<jax version>.textproto   XLA's recorded choices; they serve the version that wrote them
    cuda_device_properties.json            what Inductor asks of torch.cuda.get_device_properties
    ceilings.json                          measured bandwidths and product rates
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.worker_protocol import Skip

FOLDER = Path(__file__).parent
DEFAULT = "h200"  # where a machine has no GPU and none is named


def names() -> list[str]:
    return sorted(entry.name for entry in FOLDER.iterdir() if (entry / "cuda_device_properties.json").is_file())


def of_device(device: str) -> str | None:
    """The target that is called so, or whose GPU calls itself so ("h200", "NVIDIA H200"); None where there is none: an
    "NVIDIA GH200 480GB" has other memory, and an "NVIDIA H200 MIG 1g.18gb" is a slice of one."""
    own = {name: str(Pack(FOLDER / name).device_properties()["name"]) for name in names()}
    return next((name for name in own if device.lower() in (name, own[name].lower())), None)


@dataclass(frozen=True)
class Pack:
    """One target's folder."""

    folder: Path

    def xla_config(self, jax_version: str) -> str:
        """Raises Skip where no config of this jax's series was recorded: XLA rejects fields that it does not know."""
        series = ".".join(jax_version.split(".")[:2])
        path = self.folder / "xla" / f"gpu_target_config-{series}.pbtxt"
        if not path.is_file():
            have = sorted(p.stem.partition("-")[2] for p in path.parent.glob("gpu_target_config-*.pbtxt"))
            raise Skip(f"target {self.folder.name} has no XLA config for jax {series}; it has {', '.join(have)}")
        return path.read_text()

    def xla_autotune_results(self, jax_version: str) -> Path | None:
        return autotune_results(self.folder / "xla", jax_version)

    def device_properties(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "cuda_device_properties.json").read_text()))


def autotune_results(folder: Path, jax_version: str) -> Path | None:
    """XLA's recorded choices in a folder, where that version of jax wrote some."""
    path = folder / f"autotune-{jax_version}.textproto"
    return path if path.is_file() else None


def load(name: str) -> Pack:
    """Raises Skip on an unknown target."""
    if name not in names():
        raise Skip(f"unknown target {name!r}; known: {', '.join(names())}")
    return Pack(FOLDER / name)
