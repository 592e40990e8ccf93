"""`import xlafuse` loads nothing heavy. Its public names are imported on first use."""

import subprocess
import sys

import pytest

import xlafuse


def test_import_loads_nothing_heavy():
    heavy = "('compare', 'triton_side', 'jax', 'torch', 'numpy', 'rich', 'click', 'cloudpickle')"
    program = f"import sys, xlafuse; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_api_imports_no_framework():
    program = "import sys, xlafuse; xlafuse.explain, xlafuse.load; print('jax' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("name", [name for name in xlafuse.__all__ if name != "__version__"])
def test_every_public_name_is_found(name: str):
    assert getattr(xlafuse, name).__name__ == name
    assert name in dir(xlafuse)


def test_an_unknown_name_is_an_error():
    with pytest.raises(AttributeError, match="explane"):
        _ = xlafuse.explane
