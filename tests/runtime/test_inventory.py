"""The inventory of a host: GPUs by NVML, CPUs and memory by affinity and cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.rows import rows
from tests.runtime import fake_nvml

from trimesh import limits, this_proc
from trimesh._runtime.system.inventory import (
    cpu_limit,
    gpus_here,
    labels_of,
    memory_limit,
    own_settings,
    take_inventory,
    visible_of,
)
from trimesh._runtime.system.nvml import GPUDevice, NVMLError, node_of, open_nvml
from trimesh.actor.placement.placement import Inspector
from trimesh.config import Settings
from trimesh.errors import ConfigError


def test_gpus_are_those_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, 4, FAKE_SLICED="2", FAKE_HIDDEN="1")

    gpus, why = gpus_here(os.environ["TRIMESH_NVML"])

    assert why == ""
    assert [(gpu.index, gpu.is_slice, gpu.memory >> 30) for gpu in gpus] == [
        (0, False, 80),
        (2, True, 40),
        (2, True, 40),
        (3, False, 80),
    ]
    assert all(gpu.memory - gpu.memory_free == 1 << 30 for gpu in gpus)
    assert len({gpu.uuid for gpu in gpus}) == 4
    assert [gpu.uuid[:4] for gpu in gpus] == ["GPU-", "MIG-", "MIG-", "GPU-"]


def test_nvml_has_the_use_of_a_gpu_and_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, 2)

    with open_nvml(os.environ["TRIMESH_NVML"]) as nvml:
        handle = nvml.handle_of(nvml.devices()[1].uuid)
        use, memory = nvml.utilization(handle), nvml.memory_by_process(handle)

    assert (use.gpu, use.memory) == (11, 5)
    assert memory == {os.getpid(): 7 << 20, 1: 0}


def test_there_is_a_reason_where_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_here("/nowhere/libnvidia-ml.so.1")[1].startswith("NVML cannot be loaded: /nowhere/libnvidia-ml.so.1")
    fake_nvml.install(monkeypatch, 0, FAKE_BROKEN="1")
    library = os.environ["TRIMESH_NVML"]
    assert gpus_here(library) == ((), "nvmlInit_v2 failed: Driver Not Loaded")
    monkeypatch.delenv("FAKE_BROKEN")
    assert gpus_here(library) == ((), "the driver shows none to this process")
    monkeypatch.setenv("FAKE_GPUS", "2")
    assert gpus_here(library, "") == ((), "CUDA_VISIBLE_DEVICES is ''")
    with open_nvml(library) as nvml, pytest.raises(NVMLError, match="no function nvmlNoSuch"):
        nvml.call("nvmlNoSuch")


def device(index: int, uuid: str, parent: str = "") -> GPUDevice:
    return GPUDevice(index, uuid, "H1", 1, 1, is_slice=bool(parent), parent=parent)


DEVICES = [
    device(0, "GPU-aa00"),
    device(1, "GPU-ab00"),
    device(2, "MIG-1", "GPU-cc00"),
    device(2, "MIG-2", "GPU-cc00"),
]


@rows(
    "visible, seen",
    [
        ("1,0", ["GPU-ab00", "GPU-aa00"]),
        ("0,7,1", ["GPU-aa00"]),
        ("0, 0", ["GPU-aa00"]),
        ("GPU-ab", ["GPU-ab00"]),
        ("GPU-a", []),
        ("MIG-2,GPU-aa00", ["MIG-2", "GPU-aa00"]),
        ("2", ["MIG-1", "MIG-2"]),
        ("GPU-cc00", ["MIG-1", "MIG-2"]),
        ("-1", []),
        ("", []),
        ("none", []),
    ],
)
def test_visible_devices_restrict_the_gpus(visible: str, seen: list[str]) -> None:
    assert [one.uuid for one in visible_of(DEVICES, visible)] == seen


def test_limits_of_cgroups_are_the_tightest_of_all_above(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "cpu.max").write_text("250000 100000\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5\n")
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    (tmp_path / "a" / "memory.current").write_text("400\n")

    assert cpu_limit(tmp_path, "0::/a/b\n") == 2.5
    assert memory_limit(tmp_path, "0::/a/b\n") == (1000, 600)
    assert cpu_limit(tmp_path, "0::/\n") is None
    assert memory_limit(tmp_path, "0::/other\n") is None


def test_limits_of_cgroups_of_the_first_version(tmp_path: Path) -> None:
    cpu, memory = tmp_path / "cpu" / "job", tmp_path / "memory" / "job"
    cpu.mkdir(parents=True)
    memory.mkdir(parents=True)
    (cpu / "cpu.cfs_quota_us").write_text("300000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (memory / "memory.limit_in_bytes").write_text("1000\n")
    (memory / "memory.usage_in_bytes").write_text("1500\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1500\n")
    own = "4:memory:/job\n3:cpu,cpuacct:/job\n"

    assert cpu_limit(tmp_path, own) == 3
    assert memory_limit(tmp_path, own) == (1000, 0)


def test_node_of_a_pci_address(tmp_path: Path) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")

    assert node_of("0000:3b:00.0", tmp_path) == 1
    assert node_of("0000:3c:00.0", tmp_path) == -1


async def test_a_driver_that_hangs_is_a_host_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, 2, FAKE_SLOW="1")
    monkeypatch.setattr(limits, "NVML_SECONDS", 0.01)

    async with this_proc().spawn("inspector", Inspector) as inspector:
        found = await inspector.inspect.call_one()

    assert found.gpus == ()
    assert found.no_gpus == "the driver did not answer within limits.NVML_SECONDS (0.01 s)"
    assert found.cpus


def test_cpus_memory_and_labels_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMESH_LABELS", "zone=a, fast")

    found = take_inventory(own_settings(Settings()).labels)

    assert set(found.cpus) == os.sched_getaffinity(0)
    assert len(found.nodes) == len(found.cpus)
    assert 0 < found.memory_free <= found.memory
    assert found.labels == {"zone": "a", "fast": ""}
    assert labels_of(["a=b=c"]) == {"a": "b=c"}
    monkeypatch.setenv("TRIMESH_NVLM", "x")
    with pytest.raises(ConfigError, match="TRIMESH_NVLM"):
        own_settings(Settings())
