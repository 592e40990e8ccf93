"""Target packs: a folder for each GPU or TPU with what a machine without it needs. A GPU's is recorded on one.

- `xla/gpu_target_config-<series>.pbtxt`: device description for XLA's compiler; a series is jax's 0.10 or 0.11
- `xla/autotune-<jax version>.textproto.gz`: XLA's recorded choices, for the jax version that wrote them
- `cuda_device_properties.json`: the properties that Inductor reads (torch.cuda.get_device_properties)
- `ceilings.json`: measured bandwidths and product rates (compare.measure.ceilings)
- `data_sheet.json`: the peak rates that NVIDIA states, for shares of the peak; the links to other GPUs
- `recorded_times.json.gz`: device times of a run there (recorded_times.py)
- `predictor.npz`, `predictor.json`: trees that predict kernels' times, and their validation (tools/fit_predictor.py)
- `choices.json`: how right predicted choices of XLA's products are (tools/predicted_choices.py)
- `launches.json`: gaps between the launches of a call, by compiler, and their validation (the same program)
- `links.json`: what exchanges between two GPUs took, and the fit of their times (tools/links.py)
- `provenance.json`: the run that each part comes from

`python -m tools.record_target` writes a pack from a run.

A TPU's pack has no measurements, because nothing ran there:

- `tpu.json`: its name, the topology of one chip as libtpu names it, and the bytes of its memories
- `ceilings.json`: bandwidth and product rate of its data sheet
- `provenance.json`: the public pages that have the numbers

Nor did anything run on a GPU with `facts.json` (facts.py): its vendor's and other public numbers, from which the
device description, the properties and the ceilings are made. `provenance.json` has the source of each.
"""

from __future__ import annotations

import atexit
import gzip
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ..base.worker_protocol import Skip
from . import facts

FOLDER = Path(__file__).parent
DEFAULT = "h200"  # the target of a machine without a GPU, unless one is named


def names() -> list[str]:
    return sorted(entry.name for entry in FOLDER.iterdir() if (entry / "provenance.json").is_file())


def is_measured(name: str | None) -> bool:
    """Return whether this is the name of a target whose pack was recorded on it."""
    return name is not None and name in names() and not (Pack(FOLDER / name).tpu or Pack(FOLDER / name).facts)


def is_tpu(name: str | None) -> bool:
    """Return whether this is the name of a TPU target."""
    return name is not None and name in names() and Pack(FOLDER / name).tpu is not None


def of_device(device: str) -> str | None:
    """Return the target with this name or this device ("h200", "NVIDIA H200"), or None.

    Similar names do not count: an "NVIDIA GH200 144G HBM3e" has other memory, an "NVIDIA H200 MIG 1g.18gb" is a slice.
    """
    own = {name: Pack(FOLDER / name).device for name in names()}
    return next((name for name in own if device.lower() in (name, own[name].lower())), None)


@dataclass(frozen=True)
class Link:
    """A GPU's links to other GPUs. rate: bytes per second in one direction, half of what data sheets state."""

    name: str
    rate: float


@dataclass(frozen=True)
class Pack:
    """One target's folder."""

    folder: Path

    @property
    def device(self) -> str:
        """The device's own name."""
        return str((self.tpu or self.device_properties())["name"])

    @cached_property
    def tpu(self) -> dict[str, Any] | None:
        """A TPU's description; None for a GPU."""
        path = self.folder / "tpu.json"
        return dict(json.loads(path.read_text())) if path.is_file() else None

    @cached_property
    def facts(self) -> dict[str, Any] | None:
        """The public numbers of a GPU on which nothing was recorded; None for another one."""
        path = self.folder / "facts.json"
        return dict(json.loads(path.read_text())) if path.is_file() else None

    @cached_property
    def data_sheet(self) -> dict[str, Any]:
        """The rates that the vendor states: "bandwidth" and "products", or {}."""
        path = self.folder / "data_sheet.json"
        return self.facts or (dict(json.loads(path.read_text())) if path.is_file() else {})

    def ceilings(self) -> dict[str, Any]:
        """Return the rates to price a graph with; "source" says so where they were not measured."""
        link = {"link": self.link.rate} if self.link else {}
        if self.facts is None:
            return {**json.loads((self.folder / "ceilings.json").read_text()), **link}
        measured = [pack for name in names() if is_measured(name) and (pack := load(name)).data_sheet]
        return {**facts.ceilings(self.facts, [(pack.ceilings(), pack.data_sheet) for pack in measured]), **link}

    @property
    def link(self) -> Link | None:
        """The links to other GPUs of the same host; None where no source states them."""
        sheet = self.data_sheet
        return Link(sheet["link"], sheet["link_bandwidth"] / 2) if "link" in sheet else None

    def peak(self, dtype: str) -> float | None:
        """Return the FLOP per second of products that the data sheet states for a dtype; None where it is not known."""
        return self.data_sheet.get("products", {}).get(dtype)

    def xla_config(self, jax_version: str) -> str:
        """Return XLA's device description for this version of jax.

        Raises Skip where none of its series was recorded, because XLA rejects unknown fields.
        """
        if self.facts is not None:
            return facts.xla_config(self.facts, load(DEFAULT).xla_config(jax_version))
        series = ".".join(jax_version.split(".")[:2])
        path = self.folder / "xla" / f"gpu_target_config-{series}.pbtxt"
        if not path.is_file():
            have = sorted(p.stem.partition("-")[2] for p in path.parent.glob("gpu_target_config-*.pbtxt"))
            raise Skip(f"target {self.folder.name} has no XLA config for jax {series}; it has {', '.join(have)}")
        return path.read_text()

    def xla_autotune_results(self, jax_version: str) -> Path | None:
        return autotune_results(self.folder / "xla", jax_version)

    def device_properties(self) -> dict[str, Any]:
        if self.facts is not None:
            return facts.device_properties(self.facts)
        return dict(json.loads((self.folder / "cuda_device_properties.json").read_text()))


def autotune_results(folder: Path, jax_version: str) -> Path | None:
    """Return a file of XLA's recorded choices for this version of jax in a folder, or None.

    A compressed file is unpacked into a temporary folder, which this process removes at its end.
    """
    path = folder / f"autotune-{jax_version}.textproto"
    if path.is_file():
        return path
    packed = path.with_name(f"{path.name}.gz")
    return _unpacked(packed) if packed.is_file() else None


def all_autotune_results(folder: Path) -> list[Path]:
    """Return such a file for each version of jax that the folder has choices of."""
    names = (path.name.removesuffix(".gz") for path in folder.glob("autotune-*.textproto*"))
    versions = {name.removeprefix("autotune-").removesuffix(".textproto") for name in names}
    # A killed run leaves files of single processes, as autotune-0.11.2.4711.textproto.
    found = (autotune_results(folder, version) for version in sorted(versions) if version.count(".") == 2)
    return [path for path in found if path is not None]


@cache
def _unpacked(packed: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="xlafuse-autotune-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / packed.name.removesuffix(".gz")
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return path


def load(name: str) -> Pack:
    """Return a target's pack. Raises Skip for an unknown name."""
    if name not in names():
        raise Skip(f"unknown target {name!r}; known: {', '.join(names())}")
    return Pack(FOLDER / name)
