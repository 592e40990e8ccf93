"""The configuration of a kernel in XLA's words, from the backend_config of its HLO instruction."""

import json
import re
from collections.abc import Iterable
from typing import Any

from xlafuse.hlo.text_reader import Instruction

_DIGITS = re.compile(r"-?\d{1,18}")  # numbers of 64 bits, which XLA writes as strings
_MAX_CONFIG = 1 << 16  # characters; a cuDNN graph's is longer than any with a launch configuration


def of(instruction: Instruction, work: Iterable[Instruction]) -> dict[str, Any]:
    """Return the configuration of a Triton fusion or the algorithm of a cuBLAS call; {} where XLA states neither.

    Names and values are those of XLA's messages BlockLevelFusionConfig, TritonGemmConfig and GemmBackendConfig. A tile
    is a list of sizes. "contracting_tiles" has the tile of each product's contracted dimensions. work: the instructions
    inside the kernel.
    """
    config = _read(instruction.backend_config)
    fusion, library = config.get("fusion_backend_config"), config.get("gemm_backend_config")
    if isinstance(library, dict) and "selected_algorithm" in library:
        return {"selected_algorithm": _plain(library["selected_algorithm"])}
    if not isinstance(fusion, dict):
        return {}
    found: dict[str, Any] = {}
    for name in ("block_level_fusion_config", "triton_gemm_config"):
        if isinstance(own := fusion.get(name), dict):
            found |= {key: _plain(value) for key, value in own.items()}
    tiles = [_plain(_read(part.backend_config)) for part in work if part.opcode == "dot"] if found else []
    if all(isinstance(tile, list) for tile in tiles) and tiles:
        found["contracting_tiles"] = tiles
    return found


def _read(text: str) -> dict[str, Any]:
    if not text.startswith("{") or len(text) > _MAX_CONFIG:
        return {}
    for candidate in (text, text.replace('\\"', '"')):  # older versions write it as a quoted string
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _plain(value: Any) -> Any:
    """Return numbers for strings of digits, and lists for messages of sizes."""
    if isinstance(value, dict):
        return _plain(value["sizes"]) if set(value) == {"sizes"} else {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value
