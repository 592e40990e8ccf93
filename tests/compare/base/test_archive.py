"""Archives of artifacts: complete, readable with zipfile, and without this machine's paths."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from xlafuse.compare.base import archive
from xlafuse.compare.base.paths import PROJECT


def test_paths_become_relative_and_the_rest_stays() -> None:
    text = (
        f'File: "{PROJECT}/triton_side/blocks/gelu.py":12 in f\n'
        '.file 1 "/opt/env/lib/python3.12/site-packages/torch/x.py"\n'
        '#loc = loc("/tmp/torchinductor_me/tmpx_1/em/cem.py":3:0)\n'
        "/usr/include/math.h a/b\n"
    )
    assert archive.portable(text.encode()).decode() == (
        'File: "triton_side/blocks/gelu.py":12 in f\n.file 1 "torch/x.py"\n#loc = loc("em/cem.py":3:0)\n'
        "/usr/include/math.h a/b\n"
    )


def test_lines_of_the_package_itself_are_dropped() -> None:
    own = Path(archive.__file__).parents[1] / "workers" / "explaining.py"
    assert archive.users_line(f"{own}:3") == "" and archive.users_line("xlafuse/compare/workers/x.py:3") == ""
    assert archive.users_line("/home/me/compare/model.py:7") == "/home/me/compare/model.py:7"
    assert archive.users_line(f"{PROJECT}/triton_side/blocks/gelu.py:1") == "triton_side/blocks/gelu.py:1"


def test_paths_below_pythonpath_become_relative() -> None:
    """A new process is needed, because PYTHONPATH is read at import."""
    program = "from compare.base.archive import portable_line; print(portable_line('/opt/extra/deep/liger/x.py:3'))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), "/opt/extra", "/opt/extra/deep"])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "liger/x.py:3"


def test_an_archive_holds_the_artifacts(tmp_path: Path) -> None:
    source = tmp_path / "dumps"
    (source / "forward").mkdir(parents=True)
    (source / "forward" / "code.py").write_text(f"# {PROJECT}/compare/spec/block.py\n")
    proto = f"{PROJECT}/x".encode()
    (source / "forward" / "module.pb").write_bytes(proto)
    (source / "forward" / "kernel.cubin").write_bytes(b"\x7fELF")
    assert archive.pack(source, tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as packed:
        assert packed.namelist() == ["forward/code.py", "forward/module.pb"]
        assert packed.read("forward/code.py") == b"# compare/spec/block.py\n"
        assert packed.read("forward/module.pb") == proto


def test_no_artifacts_make_no_archive(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert not archive.pack(tmp_path / "empty", tmp_path / "a.zip")
    assert not archive.pack(tmp_path / "missing", tmp_path / "a.zip")
    assert not (tmp_path / "a.zip").exists()
