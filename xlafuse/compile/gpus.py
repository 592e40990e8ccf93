"""The GPUs of this machine as CUDA's driver describes them, without a framework.

The driver honours CUDA_VISIBLE_DEVICES (numbers, UUIDs, MIG slices). Its order is that of every framework.
"""

import ctypes
from typing import Any, NamedTuple
from uuid import UUID

# The driver's numbers (CUdevice_attribute) of the properties that torch.cuda.get_device_properties names so.
ATTRIBUTES = {
    "max_threads_per_block": 1, "shared_memory_per_block": 8, "warp_size": 10, "clock_rate": 13,
    "multi_processor_count": 16, "is_integrated": 18, "memory_clock_rate": 36, "memory_bus_width": 37,
    "L2_cache_size": 38, "max_threads_per_multi_processor": 39, "major": 75, "minor": 76,
    "shared_memory_per_multiprocessor": 81, "regs_per_multiprocessor": 82, "is_multi_gpu_board": 84,
    "shared_memory_per_block_optin": 97,
}
_COMPUTE_MODE = 20
_COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}


class Gpu(NamedTuple):
    """A GPU, or a MIG slice of one.

    uuid: of the whole GPU, also for a slice. compute_mode: "default", "prohibited" or "exclusive process".
    properties: those of torch.cuda.get_device_properties.
    """

    name: str
    uuid: str
    compute_mode: str
    properties: dict[str, Any]

    @property
    def memory_bytes(self) -> int:
        return int(self.properties["total_memory"])

    @property
    def is_slice(self) -> bool:
        """True for a slice, such as "NVIDIA H200 MIG 1g.18gb"."""
        return " MIG " in self.name


def gpus() -> list[Gpu]:
    """Return the devices that CUDA's driver sees, [] without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_gpu(driver, number) for number in range(count.value)]


def gpu_present() -> bool:
    """Return whether CUDA's driver is installed and sees at least one device."""
    return bool(gpus())


def _gpu(driver: Any, device: int) -> Gpu:
    name, uuid, memory = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16), ctypes.c_size_t(0)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetUuid(uuid, device)  # _v2 would return a slice's own, which has no clocks
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int(0)
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    label, mode = name.value.decode(), attribute(_COMPUTE_MODE)
    properties = {
        "name": label, "gcnArchName": label, "total_memory": memory.value,
        **{property: attribute(number) for property, number in ATTRIBUTES.items()},
    }
    return Gpu(label, f"GPU-{UUID(bytes=uuid.raw)}", _COMPUTE_MODES.get(mode, f"{mode}"), properties)
