"""The one file that touches jax API without a stability promise. Tested on jax 0.10.2 and 0.11.2."""

import functools
from typing import Any

import jax
from jax.experimental import topologies

TESTED = ((0, 10), (0, 11))


def check_version() -> None:
    """Raise RuntimeError unless this jax is of a series that the calls below were tested on."""
    if jax.__version_info__[:2] not in TESTED:
        series = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
        raise RuntimeError(
            f"xlafuse reads XLA's output through jax {series}; this is jax {jax.__version__}. "
            "Install one of those"
        )


@functools.cache
def target_device(config_text: str) -> Any:
    """A device that exists only as a GpuTargetConfigProto: code can be compiled for it, not run on it."""
    check_version()
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=config_text)
    return topology.devices[0]


def optimized_module_proto(compiled: jax.stages.Compiled) -> bytes:
    """The optimized module as a serialized HloModuleProto."""
    check_version()
    executable: Any = compiled.runtime_executable()
    (module,) = executable.hlo_modules()
    return module.as_serialized_hlo_module_proto()
