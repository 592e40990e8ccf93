"""Add the installed jax, torch and Triton to the tested versions of this checkout: `python -m tools.accept_installed`.

xlafuse refuses untested versions, because it uses private names of these packages. The nightly tests run this program
first, to learn what the next release breaks. A new series of jax gets the description of each target GPU that the
newest tested series has.
"""

from __future__ import annotations

import re
import shutil
from importlib.metadata import version
from pathlib import Path

from xlafuse import versions as jax_versions
from xlafuse.triton_side import versions as torch_versions

ROOT = Path(__file__).resolve().parents[1]


def main(root: Path = ROOT) -> None:
    import torch

    build = (torch.__version__.partition("+")[0], torch.version.cuda)
    of_torch = root / "triton_side" / "versions.py"
    if (jax := series("jax")) not in jax_versions.JAX:
        for config in root.glob(f"compare/targets/*/xla/gpu_target_config-{jax_versions.JAX[-1]}.pbtxt"):
            shutil.copy(config, config.with_name(f"gpu_target_config-{jax}.pbtxt"))
    add(root / "xlafuse" / "versions.py", "JAX", jax_versions.JAX, jax)
    add(of_torch, "TRITON", torch_versions.TRITON, series("triton"))
    add(of_torch, "TORCH_BUILDS", torch_versions.TORCH_BUILDS, build)


def series(package: str) -> str:
    """Return the first two numbers of a package's version, such as "0.11"."""
    return ".".join(version(package).split(".")[:2])


def add(file: Path, name: str, tested: tuple[object, ...], installed: object) -> None:
    """Write the tuple `name` of a file anew, with the installed version at its end unless it is in it."""
    if installed not in tested:
        print(f"{file}: {name} has {installed} now")
        file.write_text(re.sub(rf"^{name} = \(.*\)", f"{name} = {(*tested, installed)}", file.read_text(), flags=re.M))


if __name__ == "__main__":
    main()
