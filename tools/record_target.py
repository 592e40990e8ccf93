"""Record a target pack from a run on its GPU: `python -m tools.record_target reports/h100 h100`.

It copies what the run's `target/` holds (ceilings, device properties, XLA's autotune results), XLA's device description
from an archive of the run's artifacts, and the device times of the run's records. A run without `target/` or artifacts
renews the times of a known target alone. Times of records that the run lacks are kept: a fingerprint says whether they
still hold. A target of a data sheet becomes a measured one, and keeps the sheet's rates as `data_sheet.json`.
`provenance.json` names the run of each part.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

from xlafuse.compare import targets
from xlafuse.compare.base import atomic_write
from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.graph.analyse.summary import fingerprint
from xlafuse.compare.plan.paired_rounds import device_time_us
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.run_folder import RunFolderError
from xlafuse.compare.sources.run_source import open_run
from xlafuse.compare.targets import recorded_times
from xlafuse.compare.targets.recorded_times import RecordedTime

MEASURED = ("ceilings.json", "cuda_device_properties.json")


def record(run: Path, pack: Path) -> dict[str, int]:
    """Write the run's parts into the pack; return the number of entries by part."""
    times = _times(run)  # before anything is written, because a graph may be unreadable
    _require_whole(run, pack)
    (pack / "xla").mkdir(parents=True, exist_ok=True)
    done: dict[str, int] = {}
    for name in MEASURED:
        if (run / "target" / name).is_file():
            atomic_write.write(pack / name, (run / "target" / name).read_bytes())
            done[name] = 1
    for results in targets.all_autotune_results(run / "target" / "xla"):
        text = results.read_bytes()
        atomic_write.write(pack / "xla" / f"{results.name}.gz", gzip.compress(text, mtime=0))
        done[f"xla/{results.name}"] = text.count(b"\nresults {") + text.count(b"\nentries {")
    done |= _device_description(run, pack / "xla")
    before = recorded_times.read(pack)
    recorded_times.write(pack, before | times)
    done["recorded times"] = len(times)
    _note_provenance(run, pack, done, kept=len(before.keys() - times.keys()))
    _keep_rates_of_facts(pack)
    return done


def _require_whole(run: Path, pack: Path) -> None:
    """Raise UsageError for a run that makes no pack: every reader of targets needs its ceilings and properties."""
    lacking = [name for name in MEASURED if not any((folder / name).is_file() for folder in (run / "target", pack))]
    if lacking:
        raise UsageError(
            f"{run} has no target/{' and no target/'.join(lacking)}, which a new target needs: record a run that was "
            "timed on its GPU"
        )
    properties = run / "target" / "cuda_device_properties.json"
    if properties.is_file() and (pack / "provenance.json").is_file():
        device, known = json.loads(properties.read_text())["name"], targets.Pack(pack).device
        if device != known:
            raise UsageError(f"{run} ran on a {device}, and target {pack.name} is a {known}: give it another name")


def _keep_rates_of_facts(pack: Path) -> None:
    """Replace the facts of a GPU on which nothing had been recorded by the rates of its data sheet."""
    facts = targets.Pack(pack).facts
    if facts is None:
        return
    path = pack / "provenance.json"
    known = json.loads(path.read_text())
    sources = known.pop("facts.json")
    names = ("bandwidth", "products", "link", "link_bandwidth")
    rates: dict[str, Any] = {name: facts[name] for name in names if name in facts}
    rates["source"] = "; ".join(source for source, names in sources.items() if rates.keys() & {*names})
    atomic_write.write(pack / "data_sheet.json", f"{json.dumps(rates, indent=1)}\n".encode())
    atomic_write.write(path, f"{json.dumps(known, indent=1, sort_keys=True)}\n".encode())
    (pack / "facts.json").unlink()


def _device_description(run: Path, folder: Path) -> dict[str, int]:
    """Write XLA's description of the GPU from the first archive that has one, for the run's series of jax."""
    for source in open_run(run).results:
        if source.record is None or source.record.compiler != "xla" or source.record.status != "ok":
            continue
        try:
            modules = source.compiled()
        except UsageError:  # the archive was left out
            continue
        for _, artifacts in modules:
            found = artifacts.find("target_config")
            if found is not None:
                series = ".".join(source.load().versions["jax"].split(".")[:2])
                with found.open_binary() as stream:
                    atomic_write.write(folder / f"gpu_target_config-{series}.pbtxt", stream.read())
                return {f"xla/gpu_target_config-{series}.pbtxt": 1}
    return {}


def _times(run: Path) -> dict[str, RecordedTime]:
    """Return the time of each record that is `ok`, was timed, and whose graph has a fingerprint."""
    found = {}
    for source in open_run(run).results:
        record = source.record
        if record is None or record.status != "ok" or record.graph is None:
            continue
        graph, time = source.load(), device_time_us(record)
        known = fingerprint(graph)
        if time is not None and known is not None:
            found[record.id] = RecordedTime(round(time, 3), len(graph.kernels or ()), known)
    return found


def _note_provenance(run: Path, pack: Path, parts: dict[str, int], kept: int) -> None:
    """Note the run of each part. kept: recorded times of the run before."""
    path = pack / "provenance.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    about = run_folder.read_run(run)
    before = known.get("recorded times")
    if not kept:
        known.pop("recorded times, kept", None)
    elif before and before["created"] != about["created"]:
        known["recorded times, kept"] = before | {"entries": kept}
    elif "recorded times, kept" in known:  # this run was recorded before
        known["recorded times, kept"]["entries"] = kept
    workers: dict[str, Any] = about["segments"][0]["environment"]["workers"]
    torch, xla = workers.get("torch", {}), workers.get("xla", {})
    source = {
        "run": run.name, "created": about["created"], "device": torch.get("device") or xla.get("device"),
        "jax": xla.get("jax"), "torch": torch.get("torch"), "triton": torch.get("triton"),
    }
    known |= {part: {"entries": entries, **source} for part, entries in parts.items()}
    atomic_write.write(path, f"{json.dumps(known, indent=1, sort_keys=True)}\n".encode())


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m tools.record_target RUN NAME", file=sys.stderr)
        return 2
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", arguments[1]):
        print(f"{arguments[1]!r} is no name: take lower-case letters, digits, dashes, as in rtx-4090", file=sys.stderr)
        return 2
    try:
        parts = record(Path(arguments[0]), targets.FOLDER / arguments[1])
    except (RunFolderError, UsageError) as problem:
        print(problem, file=sys.stderr)
        return 2
    for part, entries in parts.items():
        print(f"{entries:>6} {part}")
    if not [*(targets.FOLDER / arguments[1] / "xla").glob("gpu_target_config-*.pbtxt")]:
        print("no record of XLA has artifacts, so XLA cannot compile for this target elsewhere", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
