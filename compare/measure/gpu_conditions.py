"""Clocks, power, temperature and throttling of the GPU at one moment, through NVML (nvidia-ml-py)."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

from ..record.record_fields import Condition

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


@cache
def _device() -> tuple[Any, Any] | None:
    """Return (pynvml, handle) of the first GPU in CUDA_VISIBLE_DEVICES, by index or UUID, else of GPU 0."""
    if missing():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        if first.isdecimal():
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(first))
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(first)
    except pynvml.NVMLError:
        return None
