"""Clocks, power, temperature and throttling of the GPU at one moment, through NVML (nvidia-ml-py)."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

from ..base import host
from ..record.record_fields import Condition

BUSY = 10  # percent; drawing a desktop takes less

# Reasons for throttling, by NVML's bit.
_THROTTLES = {
    0x04: "power cap", 0x08: "hardware slowdown", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "power brake",
}


def missing() -> str | None:
    """Return why conditions cannot be read here, with the remedy, or None."""
    if importlib.util.find_spec("pynvml") is None:
        return "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
    return None


def read() -> Condition | None:
    """Return the present conditions of the GPU that runs use, or None without nvidia-ml-py or NVML."""
    found = _device()
    if found is None:
        return None
    nvml, device = found
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
        return Condition(
            throttled=[name for bit, name in _THROTTLES.items() if reasons & bit],
            sm_mhz=nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            memory_mhz=nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
            power_w=nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
            temperature_c=nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        )
    except nvml.NVMLError:
        return None


def in_use() -> str | None:
    """Return which work of other programs may disturb measurements, or None. Call it before a run's own workers."""
    found = _device()
    if found is None:
        return None
    nvml, device = found
    try:
        processes = len(nvml.nvmlDeviceGetComputeRunningProcesses(device))
        busy = nvml.nvmlDeviceGetUtilizationRates(device).gpu
    except nvml.NVMLError:  # a slice has no rate
        return None
    if not processes and busy < BUSY:  # in a container, NVML may not show processes of others
        return None
    others = f"{processes or 'some'} other process{'' if processes == 1 else 'es'}"
    return f"{others} may compute on this GPU, which was {busy}% busy: that disturbs times (nvidia-smi lists them)"


@cache
def _device() -> tuple[Any, Any] | None:
    """Return (pynvml, handle) of the GPU that CUDA names first, which NVML's order and numbers need not."""
    if missing():
        return None
    import pynvml

    gpus = host.gpus()
    try:
        pynvml.nvmlInit()
        return (pynvml, pynvml.nvmlDeviceGetHandleByUUID(gpus[0].uuid)) if gpus else None
    except pynvml.NVMLError:
        return None
