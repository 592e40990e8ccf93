"""FIFOs, sockets and devices in the place of files: each command refuses them in a line and never waits for them."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli.main import cli
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.run_folder import RunFolderError

DATA = PROJECT / "tests" / "data"
RUN, CAPTURE = DATA / "runs" / "h200-rmsnorm", DATA / "profiles" / "torch"
LOG = "dedicated_log_torch_trace_ghxmvsih.log"
REFUSED = "neither a regular file nor a folder"


@pytest.fixture(autouse=True)
def never_waits() -> Iterator[None]:
    """Raise an error in a test that waits."""

    def stop(*_: object) -> None:
        raise TimeoutError("a command waits for a special file")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)


def command(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def made_special(path: Path, kind: str = "fifo") -> None:
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as it:
                it.bind(f"/proc/self/fd/{here}/{path.name}")  # a socket's path is short
        finally:
            os.close(here)


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
@pytest.mark.parametrize("file", ["run.json", "records.jsonl"])
def test_a_run(tmp_path: Path, file: str, kind: str) -> None:
    folder = shutil.copytree(RUN, tmp_path / "run")
    made_special(folder / file, kind)
    for words in (["inspect", folder], ["report", folder, "-o", tmp_path / "run.md"], ["diff", RUN, folder]):
        done = command(*words)
        assert done.exit_code == 2 and str(folder / file) in done.stderr, words
        assert REFUSED in done.stderr and done.stderr.count("\n") == 1, words
    with pytest.raises(RunFolderError, match=REFUSED):  # as a resumed run begins
        run_folder.read_run(folder)
        run_folder.repair(folder)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_archives_of_a_run(tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(RUN, tmp_path / "run")
    for name in ("graphs.zip", "artifacts.zip"):
        made_special(folder / name, kind)
    for view in ("why", "findings", "passes", "kernels", "stages"):
        assert f"graphs.zip: {REFUSED}" in command("inspect", folder, "--view", view).stderr, view
    done = command(
        "export", folder, "--to", "hlo-opt", "--module", "rmsnorm/llama-8b/bf16/train/xla", "-o", tmp_path / "dumps"
    )
    assert done.exit_code == 2 and REFUSED in done.stderr


def test_a_file_in_place_of_an_archives_member(tmp_path: Path) -> None:
    folder = shutil.copytree(RUN, tmp_path / "run")
    (folder / "graphs").mkdir()
    os.mkfifo(folder / "graphs" / "rmsnorm-llama-8b-bf16-train-xla.json.gz")
    assert REFUSED in command("inspect", folder, "-i", "xla").stderr


DUMPS = {
    "xla": (DATA / "xla_reasons" / "jax-0.11.2" / "odd", "*after_optimizations.txt.gz"),
    "log": (DATA / "xla_reasons" / "jax-0.11.2" / "odd", "*priority_fusion_dump.txt.gz"),
    "code": (DATA / "inductor" / "torch-2.13.0" / "debug", "torchinductor/*forward*/output_code.py"),
    "fx": (DATA / "inductor" / "torch-2.13.0" / "debug", "torchinductor/*forward*/fx_graph_readable.py"),
    "trace": (DATA / "inductor" / "torch-2.13.0" / "trace", "*.log"),
    "capture": (CAPTURE, "capture.json"),
    "profile": (CAPTURE, "profile/torch.json.gz"),
}


@pytest.mark.parametrize("case", DUMPS)
def test_a_file_of_a_dump(tmp_path: Path, case: str) -> None:
    source, pattern = DUMPS[case]
    folder = shutil.copytree(source, tmp_path / "dump")
    (file,) = folder.glob(pattern)
    made_special(file)
    for words in (["inspect", folder], ["diff", folder, source]):
        done = command(*words)
        assert done.exit_code == 2 and f"{file}: {REFUSED}" in done.stderr.replace(": jit_reasons", ""), words


@pytest.mark.parametrize("name", ["graph.json", "module.hlo.txt", "module.zip"])
def test_a_folder_of_files(tmp_path: Path, name: str) -> None:
    text = gzip.decompress(next((DATA / "hlo" / "jax-0.11.2").glob("h200-gelu-fwd.hlo.txt.gz")).read_bytes())
    (tmp_path / "good.hlo.txt").write_bytes(text)
    os.mkfifo(tmp_path / name)
    done = command("inspect", tmp_path)
    assert done.exit_code == 2 and f"{tmp_path / name}: {REFUSED}" in done.stderr
