"""The flush gives back what a kernel reserved of L2, before it reads; on a pretended driver, and on a GPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xlafuse.compare.base import host
from xlafuse.compare.measure import ptx_launch
from xlafuse.compare.measure.l2_flush import L2Flush


class Driver:
    """Keeps a limit as CUDA's driver does. `log` lists the calls that change anything."""

    CUlimit = SimpleNamespace(CU_LIMIT_PERSISTING_L2_CACHE_SIZE="persisting")
    CUresult = SimpleNamespace(CUDA_ERROR_UNSUPPORTED_LIMIT=215)

    def __init__(self, reserved: int, status: int = 0, current: int = 7) -> None:
        self.reserved, self.status, self.current, self.log = reserved, status, current, list[str]()

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self.current

    def cuDeviceGet(self, number: int) -> tuple[int, int]:
        return 0, number

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, str]:
        return 0, f"context of GPU {device}"

    def cuCtxSetCurrent(self, context: str) -> tuple[int]:
        self.log.append(context)
        return (0,)

    def cuCtxGetLimit(self, limit: str) -> tuple[int, int]:
        assert limit == "persisting"
        return self.status, self.reserved

    def cuCtxSetLimit(self, limit: str, size: int) -> tuple[int]:
        self.reserved = size
        self.log.append(f"limit {size}")
        return (0,)

    def cuCtxResetPersistingL2Cache(self) -> tuple[int]:
        self.log.append("reset")
        return (0,)


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def flushed(driver: Driver) -> int:
        monkeypatch.setattr(ptx_launch, "_driver", lambda: driver)
        monkeypatch.setattr(host, "installed", lambda *names: {name: "1" for name in names})
        return L2Flush(lambda count: "buffer", lambda buffer: driver.log.append(f"read {buffer}"))()

    return flushed


def test_reserved_l2_is_given_back_before_the_read(flushed: Any) -> None:
    driver = Driver(reserved=4096)
    assert flushed(driver) == 4096
    assert driver.log == ["reset", "limit 0", "read buffer"]
    assert flushed(driver) == 0
    assert driver.log[3:] == ["read buffer"]


def test_a_gpu_without_persisting_accesses_is_only_read(flushed: Any) -> None:
    driver = Driver(reserved=4096, status=215)
    assert flushed(driver) == 0
    assert driver.log == ["read buffer"]


@pytest.mark.parametrize(("current", "entered"), [(7, []), (0, ["context of GPU 1"])])
def test_a_threads_own_context_stays_current(
    current: int, entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's thread in PyTorch has the context of the rank's GPU, and a thread in JAX has none."""
    driver = Driver(reserved=0, current=current)
    monkeypatch.setattr(ptx_launch, "_driver", lambda: driver)
    assert ptx_launch.give_back_persisting_l2(device=1) == 0
    assert driver.log == entered


@pytest.mark.gpu
def test_the_driver_gives_reserved_l2_back() -> None:
    from cuda.bindings import driver

    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    ptx_launch.give_back_persisting_l2()  # what the driver or an earlier test reserved
    assert ptx_launch.give_back_persisting_l2() == 0
    status, *_ = driver.cuCtxSetLimit(limit, 1 << 20)
    assert status == driver.CUresult.CUDA_SUCCESS
    assert ptx_launch.give_back_persisting_l2() >= 1 << 20
    assert driver.cuCtxGetLimit(limit) == (driver.CUresult.CUDA_SUCCESS, 0)
