"""The artifacts of one compile, kept in a folder under short names.

XLA writes 60 to 120 files for each compile. Kept are those of `ARTIFACTS`, the module before and after each fusion pass
that changed it (`before_<pass>`, `after_<pass>`), and one PTX file for each code module.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from xlafuse.dumps.fusion_log import read_frames

# name -> (file in the folder, pattern of XLA's own name after its prefix "module_0001.jit_f.")
ARTIFACTS: dict[str, tuple[str, str]] = {
    "stablehlo": ("stablehlo.mlir", ""),  # written by jax, not by XLA
    "hlo_before": ("before.hlo.txt", r"before_optimizations\.txt"),
    "hlo": ("optimized.hlo.txt", r"(?:.*_)?after_optimizations(?:_after_buffer_assignment)?\.txt"),
    "hlo_proto": ("optimized.hlo.pb", r"(?:.*_)?after_optimizations(?:_after_buffer_assignment)?\.hlo\.pb"),
    "buffer_assignment": ("buffers.txt", r".*after_optimizations-buffer-assignment\.txt"),
    "memory": ("memory.txt", r".*after_optimizations-memory-usage-report\.txt"),
    "thunks": ("thunks.txt", r"thunk_sequence\.txt"),
    # only if XLA put launches into command buffers
    "thunks_after_passes": ("thunks_after_passes.txt", r"thunk_sequence_after_thunk_passes\.txt"),
    "thunk_metadata": ("thunk_metadata.txt", r"thunk_metadata\.txt"),
    "priority_fusion": ("priority_fusion.txt", r"priority_fusion_dump\.txt"),
    # labels of the fusion visualisation, only on request
    "fusion_frames": ("fusion_frames.txt", r".*_fusion\.(?:pyz|html)"),
    "autotune_results": ("autotune_results.pbtxt", r"autotune_results\.pbtxt"),
    "target_config": ("target_config.pbtxt", r"gpu_target_config\.pbtxt"),
}

# The passes that decide which operations share a kernel, and rename_fusions: the fusion log uses the names before it.
# Those of XLA for TPUs are in the last line.
PASSES = (
    "dot-merger", "triton-gemm-rewriter", "triton-softmax-rewriter", "priority-fusion",
    "multi_output_fusion", "rename_fusions", "fusion-wrapper", "copy_fusion", "fusion-block-level-rewriter",
    "tpu_fusion", "tpu_multi_output_fusion", "rename-tensor-core-fusion-ops",
)
# Protos are kept for these: only protos have the instruction ids that link names across a renaming.
_WITH_PROTO = ("priority-fusion", "rename_fusions")

# module_0001.jit_mlp.0006.fusion.after_sort-iota-fusion.before_priority-fusion.txt
_PASS_FILE = re.compile(r"(\d+)\.(?:.*\.)?after_(.+)\.before_(.+)\.(txt|hlo\.pb)$")
#     001: kCustomKernel [source | sink] fusion_3 grid: [...]
_THUNK = re.compile(r"( *)\d+: (k\w+)")
# .visible .entry fusion_11(
_PTX_ENTRY = re.compile(r"^\s*(?:\.visible )?\.entry ([\w$]+)", re.MULTILINE)


@contextmanager
def raw_dump_folder(dump_to: Path | None) -> Iterator[Path | None]:
    """Yield a temporary folder for XLA's raw dump, or None if dump_to is None.

    It is in the folder XLAFUSE_SCRATCH, where that is set. The process that set it removes that folder after a kill.

    Raises FileExistsError unless dump_to is empty or missing.
    """
    if dump_to is None:
        yield None
        return
    if dump_to.exists() and any(dump_to.iterdir()):
        raise FileExistsError(f"a dump folder holds one compile; {dump_to} is not empty. Name a new folder")
    dump_to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="xlafuse-dump-", dir=os.environ.get("XLAFUSE_SCRATCH")) as raw:
        yield Path(raw)


def dump_options(raw: Path, *, visualization: bool = False) -> dict[str, Any]:
    """Return XLA's per-compile options for a dump into `raw`.

    visualization: also dump the fusion passes' decision on every pair of instructions ("fusion_frames"). Compiling then
        takes two to four times as long. The fusion log, which is always dumped, has priority fusion's reasons.
    """
    return {
        "xla_dump_to": str(raw),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_as_proto": True,
        "xla_dump_hlo_pass_re": "|".join(PASSES),
        # jax 0.11 writes PTX only if this pattern matches; it adds no other file. jax 0.10 always writes PTX.
        "xla_dump_emitter_re": "ptx",
    } | ({"xla_dump_fusion_visualization": True} if visualization else {})


def keep_artifacts(raw: Path, dump_to: Path, module_name: str, stablehlo: str) -> dict[str, Path]:
    """Move a module's artifacts from XLA's raw dump to dump_to; return `collect_artifacts(dump_to)`."""
    (dump_to / ARTIFACTS["stablehlo"][0]).write_text(stablehlo)
    files = _last_module(raw, module_name)
    _keep_frames(files, dump_to)
    for file, pattern in ARTIFACTS.values():
        for rest, path in files.items():
            if pattern and re.fullmatch(pattern, rest):
                shutil.move(path, dump_to / file)
    results = dump_to / ARTIFACTS["autotune_results"][0]
    if results.exists() and "{" not in results.read_text():  # only a version number: nothing was autotuned
        results.unlink()
    _keep_passes(files, dump_to)
    _keep_ptx(files, dump_to)
    return collect_artifacts(dump_to)


def command_buffer_launches(folder: Path) -> tuple[int, int] | None:
    """Return (launches in command buffers, all launches) from a dump's list of thunks; None without a list."""
    found = collect_artifacts(folder)
    path = found.get("thunks_after_passes") or found.get("thunks")
    return count_command_buffer_launches(path.read_text()) if path else None


def count_command_buffer_launches(thunks: str) -> tuple[int, int]:
    """Return the same for the list's text. A thunk that contains others is not a launch."""
    inside = total = 0
    holding: list[tuple[int, str]] = []  # (indentation, kind) of the enclosing thunks
    lines = [(len(match[1]), match[2]) for line in thunks.splitlines() if (match := _THUNK.match(line))]
    for (depth, kind), (deeper, _) in pairwise([*lines, (0, "")]):
        holding = [holder for holder in holding if holder[0] < depth]
        if deeper > depth:
            holding.append((depth, kind))
            continue
        total += 1
        inside += any(kind == "kCommandBuffer" for _, kind in holding)
    return inside, total


def collect_artifacts(folder: Path) -> dict[str, Path]:
    """Return name -> file for a dump folder: ARTIFACTS' names, "before_<pass>", "after_<pass>", "ptx/<kernel>"."""
    found = {name: folder / file for name, (file, _) in ARTIFACTS.items() if (folder / file).is_file()}
    for path in sorted((folder / "passes").glob("*")):
        name = path.name.split("_", 1)[1]
        found[name.removesuffix(".txt").replace(".hlo.pb", "_proto")] = path
    for path in sorted((folder / "ptx").glob("*.ptx")):
        found[f"ptx/{path.stem}"] = path
    return found


def _last_module(raw: Path, module_name: str) -> dict[str, Path]:
    """Return the raw files of the newest module of that name, by their names without prefix.

    A retried compile and autotuning leave several modules of one name.
    """
    modules: dict[int, dict[str, Path]] = {}
    # main.9.module_0001.jit_f._fusion.pyz: a visualisation's name begins with its computation.
    # module_0001.jit_f.cl_1000038190.before_optimizations.txt: XLA for TPUs adds the number of its version.
    prefix = re.compile(rf"(.+\.)?module_(\d+)\.{re.escape(module_name)}\.(?:cl_\d+\.)?(.+)")
    for path in sorted(raw.iterdir()):
        if match := prefix.fullmatch(path.name):
            modules.setdefault(int(match[2]), {})[(match[1] or "") + match[3]] = path
    return modules[max(modules)] if modules else {}


def _keep_frames(files: dict[str, Path], dump_to: Path) -> None:
    """Keep the labels of a visualisation, one a line; they have all its text, and the file is megabytes large."""
    pattern = re.compile(ARTIFACTS["fusion_frames"][1])
    labels = [label for rest, path in files.items() if pattern.fullmatch(rest) for label in read_frames(path)]
    for rest in [rest for rest in files if pattern.fullmatch(rest)]:
        del files[rest]
    if labels:
        lines = "".join(" ".join(label.splitlines()) + "\n" for label in labels)
        (dump_to / ARTIFACTS["fusion_frames"][0]).write_text(lines)


def _keep_passes(files: dict[str, Path], dump_to: Path) -> None:
    """Keep the text, and for some passes the proto, before and after each pass that changed the module.

    XLA numbers the files in the order of the passes.
    """
    texts = []
    for rest, path in files.items():
        if (match := _PASS_FILE.fullmatch(rest)) and match[4] == "txt":
            texts.append((int(match[1]), match[2], match[3], path))
    texts.sort()
    folder = dump_to / "passes"
    for (number, _, upcoming, before), (_, done, _, after) in zip(texts, texts[1:], strict=False):
        if upcoming != done or upcoming not in PASSES or before.read_bytes() == after.read_bytes():
            continue
        folder.mkdir(exist_ok=True)
        for moment, path in (("before", before), ("after", after)):
            shutil.copyfile(path, folder / f"{number:02d}_{moment}_{upcoming}.txt")
            proto = path.with_name(path.name.removesuffix(".txt") + ".hlo.pb")
            if upcoming in _WITH_PROTO and proto.exists():
                shutil.copyfile(proto, folder / f"{number:02d}_{moment}_{upcoming}.hlo.pb")


def _keep_ptx(files: dict[str, Path], dump_to: Path) -> None:
    """Keep one file for each code module, named after its first kernel and the number of further kernels."""
    for rest, path in files.items():
        text = path.read_text() if rest.endswith(".ptx") else ""
        if entries := _PTX_ENTRY.findall(text):
            (dump_to / "ptx").mkdir(exist_ok=True)
            more = f"+{len(entries) - 1}" if len(entries) > 1 else ""
            shutil.move(path, dump_to / "ptx" / f"{entries[0]}{more}.ptx")
