"""With an NVIDIA GPU, kernels run on it; without, GPU tests are skipped and Triton interprets its kernels."""

import ctypes
import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A shell ignores interrupts in the jobs that it starts in the background, and so would all that tests start there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an example takes is the machine's business.
settings.register_profile("untimed", deadline=None, max_examples=40)
settings.register_profile("full", deadline=None, max_examples=150)  # of `make test-full`
settings.load_profile("untimed")


# With the default of 700 objects, collections took a fifth of the time to import torch and to collect the tests.
gc.set_threshold(50_000)


def _gpu_count() -> int:
    """NVIDIA GPUs visible to this process, asked of the driver so that no framework is imported."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


HAS_GPU = _gpu_count() > 0

# Tests run in parallel, so threads beyond one a process compete for cores. With two processes on two cores, 150
# examples of one property took 1.4 s with one thread and 10.5 s with two. With eight processes of 16 threads on 16
# cores, they took about 50 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton reads the variable when a kernel is decorated, so it is set here, before a test module imports one.
if HAS_GPU:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # for the other cores there are other processes
else:
    os.environ["TRITON_INTERPRET"] = "1"
    # Each of Inductor's pools of compile processes takes a while to start.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start the system's Chromium, or playwright's own. Without one, skip, or fail with XLAFUSE_REQUIRE_BROWSER."""
    missing = pytest.fail if os.environ.get("XLAFUSE_REQUIRE_BROWSER") else pytest.skip
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed (extra dev)")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    with sync_playwright() as driver:
        if found is None and not Path(driver.chromium.executable_path).exists():
            missing("no Chromium: apt-get install chromium, or playwright install chromium")
        with driver.chromium.launch(executable_path=found, args=["--no-sandbox"]) as launched:
            yield launched


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the compiler artifacts of records of an H200, one zip archive a record."""
    from xlafuse.compare.record import run_files

    folder = tmp_path_factory.mktemp("artifacts")
    for file in run_files.archived(Path(__file__).parent / "data" / "runs" / "h200-small", "dumps"):
        (folder / Path(file.name).name).write_bytes(file.read_bytes())
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # under pytest-xdist long files start first, so that no core waits for one
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, none is visible"))


class FailuresAsTheyCome:
    """Name each failure when it happens: a run of minutes may be cut off before its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._config.get_terminal_writer().line(f"\nfailed: {report.nodeid} ({report.when})")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # under pytest-xdist the controller gets all reports
        config.pluginmanager.register(FailuresAsTheyCome(config))


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the fixture `fusion` where no installed entry point has done so."""
    from xlafuse import pytest_plugin

    if not pluginmanager.is_registered(pytest_plugin):
        pluginmanager.register(pytest_plugin)
