"""GPUs that this machine lacks: answers of CUDA's driver and of NVML, with the properties of each target.

GPUS has each target of a data sheet under a name that no table and no target knows, and invented GPUs. `pretend` makes
the driver and NVML of this process answer for some of them. Nothing can be launched.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid5

import pytest

from xlafuse.compare import targets
from xlafuse.compare.measure import gpu_conditions
from xlafuse.compile.gpus import ATTRIBUTES, Gpu

NAMESPACE = UUID(int=7)
_nvml_device = gpu_conditions._device.__wrapped__


@dataclass(frozen=True)
class PretendedGpu:
    """A GPU, or a slice of one (`slice_of`).

    mode: the driver's number of its compute mode. processes, busy: of other programs.
    """

    properties: dict[str, Any]
    mode: int = 0
    slice_of: str = ""
    processes: int = 0
    busy: int = 0
    uuid: UUID = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "uuid", uuid5(NAMESPACE, self.slice_of or self.name))

    @property
    def name(self) -> str:
        return str(self.properties["name"])

    @property
    def visible_as(self) -> str:
        """Its name in CUDA_VISIBLE_DEVICES."""
        return f"MIG-{uuid5(NAMESPACE, self.name)}" if self.slice_of else f"GPU-{self.uuid}"


def gpu(target: str, name: str = "", **changes: Any) -> PretendedGpu:
    """Return a GPU with a target's properties, or others where `changes` has some, under a name that nothing knows."""
    properties = targets.load(target).device_properties()
    named = name or f"{properties['name']} pretended"
    return PretendedGpu({**properties, "name": named, "gcnArchName": named, **changes})


GPUS = {name: gpu(name) for name in targets.names() if targets.load(name).facts} | {
    # The shared memory of compute capability 8.6 and 12.1 is that of 8.9; 8.7 has that of 8.0 (CUDA programming guide).
    "sm_86": gpu("l4", "NVIDIA Pretended 86", minor=6, multi_processor_count=84),
    "sm_87": gpu("a100-40gb", "NVIDIA Pretended 87", minor=7, multi_processor_count=16, is_integrated=1),
    "sm_121": gpu("rtx-5090", "NVIDIA Pretended 121", minor=1, multi_processor_count=48, is_integrated=1),
}


class Driver:
    """Answers as libcuda does, for the devices that CUDA_VISIBLE_DEVICES names."""

    def __init__(self, devices: Sequence[PretendedGpu]) -> None:
        self._all = devices

    @property
    def _devices(self) -> list[PretendedGpu]:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if named is None:
            return [*self._all]
        found = []
        for word in named.split(","):
            fitting = [
                each for number, each in enumerate(self._all)
                if word == str(number) or (not word.isdecimal() and word and each.visible_as.startswith(word))
            ]
            if len(fitting) != 1:
                break  # CUDA shows those before the first that it does not know
            found += fitting
        return found

    def cuInit(self, flags: int) -> int:
        return 0 if self._devices else 100  # CUDA_ERROR_NO_DEVICE

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._devices)
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: int) -> int:
        name.value = self._devices[device].name.encode()
        return 0

    def cuDeviceGetUuid(self, uuid: Any, device: int) -> int:
        uuid.raw = self._devices[device].uuid.bytes
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: int) -> int:
        size._obj.value = self._devices[device].properties["total_memory"]
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: int) -> int:
        names = {number: name for name, number in ATTRIBUTES.items()}
        found = self._devices[device]
        value._obj.value = found.mode if number == 20 else found.properties[names[number]]
        return 0


def nvml(devices: Sequence[PretendedGpu]) -> types.ModuleType:
    """Return a module that answers as pynvml does; a handle is a whole GPU's UUID."""

    class NVMLError(Exception):
        pass

    module: Any = types.ModuleType("pynvml")
    module.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)
    by_uuid = {f"GPU-{each.uuid}": each for each in devices}

    def handle(uuid: str) -> PretendedGpu:
        if uuid not in by_uuid:
            raise NVMLError("not found")
        return by_uuid[uuid]

    def utilization(device: PretendedGpu) -> Any:
        if device.slice_of:
            raise NVMLError("not supported")
        return types.SimpleNamespace(gpu=device.busy)

    def clock(device: PretendedGpu, kind: int) -> int:
        return int(device.properties["memory_clock_rate" if kind else "clock_rate"]) // 1000

    answers = {
        "NVMLError": NVMLError, "NVML_CLOCK_SM": 0, "NVML_CLOCK_MEM": 1, "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None, "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetComputeRunningProcesses": lambda device: [None] * device.processes,
        "nvmlDeviceGetUtilizationRates": utilization, "nvmlDeviceGetClockInfo": clock,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda device: 0x04,
        "nvmlDeviceGetPowerUsage": lambda device: 100_000, "nvmlDeviceGetTemperature": lambda device, sensor: 40,
    }
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module


def pretend(monkeypatch: pytest.MonkeyPatch, *devices: PretendedGpu) -> None:
    """Make this process's CUDA driver and NVML answer for these devices. None of them: there is no driver."""
    load = ctypes.CDLL

    def loaded(name: Any, *args: Any, **options: Any) -> Any:
        if name != "libcuda.so.1":
            return load(name, *args, **options)
        if not devices:
            raise OSError(f"{name}: cannot open shared object file")
        return Driver(devices)

    monkeypatch.setattr(ctypes, "CDLL", loaded)
    monkeypatch.setitem(sys.modules, "pynvml", nvml(devices))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_conditions, "_device", _nvml_device)


def as_seen(device: PretendedGpu) -> Gpu:
    """Return the device as xlafuse.compile.gpus describes it."""
    modes = {0: "default", 2: "prohibited", 3: "exclusive process"}
    return Gpu(device.name, f"GPU-{device.uuid}", modes[device.mode], device.properties)
