"""The driver's answers become the properties that PyTorch has of a GPU; CUDA_VISIBLE_DEVICES chooses."""

from __future__ import annotations

import json

import pytest
from pretended_gpus import GPUS, PretendedGpu, as_seen, pretend

from xlafuse.compare import targets
from xlafuse.compile import gpus

SLICES = [
    PretendedGpu({**GPUS["b200"].properties, "name": f"NVIDIA B200 MIG 1g.23gb {number}"}, slice_of="NVIDIA B200")
    for number in (1, 2)
]


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert gpus.gpus() == [] and not gpus.gpu_present()


def test_the_properties_are_those_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, *GPUS.values())
    assert gpus.gpus() == [as_seen(gpu) for gpu in GPUS.values()]
    assert {*gpus.gpus()[0].properties} == {*targets.load("h200").device_properties()}


@pytest.mark.gpu
def test_the_properties_are_pytorchs() -> None:
    torch = pytest.importorskip("torch")
    found = torch.cuda.get_device_properties()
    (first, *_) = gpus.gpus()
    assert first.properties == {name: getattr(found, name) for name in first.properties}
    assert first.uuid == f"GPU-{found.uuid}" or first.is_slice
    json.dumps(first.properties)


def test_the_numbers_are_the_drivers() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    names = {int(each): each.name for each in driver.CUdevice_attribute}
    for name, number in gpus.ATTRIBUTES.items():
        words = set(name.upper().replace("MULTI_PROCESSOR", "MULTIPROCESSOR").split("_")) - {"MEMORY", "IS", "COUNT"}
        assert {word.rstrip("S") for word in words} & {word.rstrip("S") for word in names[number].split("_")}, name
    assert names[20].endswith("COMPUTE_MODE")


@pytest.mark.parametrize(
    ("visible", "named"),
    [
        ("1", ["l4"]), (GPUS["l4"].visible_as, ["l4"]), (GPUS["sm_86"].visible_as[:12], ["sm_86"]),
        ("2,0", ["sm_86", "b200"]), ("", []), ("GPU-of-another-machine", []), ("7", []),
    ],
)
def test_cuda_visible_devices_chooses(monkeypatch: pytest.MonkeyPatch, visible: str, named: list[str]) -> None:
    pretend(monkeypatch, GPUS["b200"], GPUS["l4"], GPUS["sm_86"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in gpus.gpus()] == [GPUS[name].name for name in named]


def test_a_slice_has_the_uuid_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, *SLICES)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SLICES[1].visible_as)
    (found,) = gpus.gpus()
    assert found.is_slice and found.name == SLICES[1].name and found.uuid == f"GPU-{SLICES[0].uuid}"
