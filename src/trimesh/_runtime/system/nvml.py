"""NVML, the management library of NVIDIA's driver: GPUs of this machine with their memory and use, without CUDA.

`libnvidia-ml.so.1` is loaded when it is first needed. Every failure is an `NVMLError` whose text says what is missing.

NV-1 A device that the driver does not give to this process (a container, a device cgroup) is left out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

LIBRARY: Final = "libnvidia-ml.so.1"

_TEXT_BYTES: Final = 96
_PROCESSES_MAX: Final = 1024
_UNKNOWN: Final = (1 << 64) - 1
_INSUFFICIENT_SIZE: Final = 7
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


class NVMLError(Exception):
    """The library is missing, or a function of it has failed."""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


class _Pci(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("ids", ctypes.c_uint * 2),
        ("bus_id", ctypes.c_char * 32),
    ]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("instances", ctypes.c_uint * 2),
    ]


class GPUDevice(msgspec.Struct, frozen=True):
    """One GPU, or one slice of a GPU (MIG).

    Attributes:
        index: Its number, in the order of PCI addresses; slices have that of their GPU.
        uuid: As `CUDA_VISIBLE_DEVICES` takes it: "GPU-..." or "MIG-...".
        name: Model.
        memory, free: Bytes of its memory, and those that are not used now.
        node: NUMA node of its PCI slot; -1 if unknown.
        is_slice: Whether it is a slice.
        parent: Of a slice, the uuid of its GPU.
    """

    index: int
    uuid: str
    name: str
    memory: int
    free: int
    node: int = -1
    is_slice: bool = False
    parent: str = ""


class Utilization(msgspec.Struct, frozen=True):
    """Use of a GPU in the driver's last sample period: percent of the time in which a kernel ran, or memory moved."""

    gpu: int
    memory: int


class NVML:
    """The loaded and initialized library; see `open_nvml`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            NVMLError: It has failed, or this library has none of that name.
        """
        status = self._status(name, *arguments)
        if status:
            raise NVMLError(f"{name} failed: {self._text_of(status)}")

    def _status(self, name: str, *arguments: Any) -> int:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NVMLError(f"this NVML has no function {name}: the driver is too old") from None
        return int(function(*arguments))

    def _text_of(self, status: int) -> str:
        try:
            function = self._library.nvmlErrorString
        except AttributeError:
            return f"error {status}"
        function.restype = ctypes.c_char_p
        text = function(status)
        return f"error {status}" if text is None else text.decode(errors="replace")

    def count(self) -> int:
        """Return the number of GPUs, with those that this process may not use."""
        found = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(found))
        return found.value

    def handle(self, index: int) -> ctypes.c_void_p:
        """Return the handle of a GPU.

        Raises:
            NVMLError: There is none, or this process may not use it.
        """
        found = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(found))
        return found

    def handle_of(self, uuid: str) -> ctypes.c_void_p:
        """Return the handle of the GPU, or slice, of a uuid.

        Raises:
            NVMLError: There is none, or this process may not use it.
        """
        found = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(found))
        return found

    def devices(self) -> Sequence[GPUDevice]:
        """Return all GPUs that this process may use; of one that is divided (MIG), its slices."""
        found = list[GPUDevice]()
        for index in range(self.count()):
            try:
                handle = self.handle(index)
            except NVMLError:  # NV-1
                continue
            device = self._device(handle, index, self._node(handle))
            found += self._slices(handle, device) or [device]
        return found

    def utilization(self, handle: ctypes.c_void_p) -> Utilization:
        """Return the present use of a GPU; slices have none."""
        found = _Utilization()
        self.call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(found))
        return Utilization(found.gpu, found.memory)

    def celsius(self, handle: ctypes.c_void_p) -> int:
        """Return the temperature of a GPU."""
        found = ctypes.c_uint()
        self.call("nvmlDeviceGetTemperature", handle, ctypes.c_uint(0), ctypes.byref(found))
        return found.value

    def memory_by_process(self, handle: ctypes.c_void_p) -> Mapping[int, int]:
        """Return the bytes of a GPU's memory that each process has; pids are those of this process's namespace."""
        count = ctypes.c_uint(_PROCESSES_MAX)
        found = (_Process * _PROCESSES_MAX)()
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        status = self._status(name, handle, ctypes.byref(count), found)
        if status and status != _INSUFFICIENT_SIZE:
            raise NVMLError(f"{name} failed: {self._text_of(status)}")
        listed = found[: min(count.value, _PROCESSES_MAX)]
        return {one.pid: 0 if one.memory == _UNKNOWN else one.memory for one in listed}

    def _device(self, handle: ctypes.c_void_p, index: int, node: int, parent: str = "") -> GPUDevice:
        memory = _Memory()
        self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        uuid, name = self._text("nvmlDeviceGetUUID", handle), self._text("nvmlDeviceGetName", handle)
        return GPUDevice(index, uuid, name, memory.total, memory.free, node, bool(parent), parent)

    def _slices(self, handle: ctypes.c_void_p, device: GPUDevice) -> list[GPUDevice]:
        now, pending, count = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        try:
            self.call("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(pending))
            if not now.value:
                return []
            self.call("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(count))
        except NVMLError:  # a GPU, or a driver, without MIG
            return []
        found = list[GPUDevice]()
        for number in range(count.value):
            part = ctypes.c_void_p()
            try:
                self.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(number), ctypes.byref(part))
            except NVMLError:  # this number is not in use
                continue
            found.append(self._device(part, device.index, device.node, device.uuid))
        return found

    def _node(self, handle: ctypes.c_void_p) -> int:
        try:
            return node_of(self.pci_bus_id(handle))
        except NVMLError:
            return -1

    def pci_bus_id(self, handle: ctypes.c_void_p) -> str:
        """Return the PCI address of a GPU, as `0000:3b:00.0`."""
        found = _Pci()
        self.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(found))
        domain, _, rest = found.bus_id.decode(errors="replace").lower().partition(":")
        return f"{domain[-4:]}:{rest}"

    def _text(self, name: str, handle: ctypes.c_void_p) -> str:
        found = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(name, handle, found, ctypes.c_uint(_TEXT_BYTES))
        return found.value.decode(errors="replace")


def node_of(bus_id: str, devices: Path = _PCI_DEVICES) -> int:
    """Return the NUMA node of a PCI address; -1 if the kernel does not know it."""
    try:
        return int((devices / bus_id / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


@contextmanager
def open_nvml(path: str = "") -> Generator[NVML, None, None]:
    """Load and initialize NVML, for `nvml.devices()`.

    Args:
        path: The library; "" for the one that the system's loader finds.

    Raises:
        NVMLError: There is none, or the driver does not answer.

    Blocking: the first use after the start of a machine may take a second, while the driver loads.
    """
    try:
        library = ctypes.CDLL(path or LIBRARY)
    except OSError as error:
        raise NVMLError(f"NVML cannot be loaded: {error}") from None
    nvml = NVML(library)
    nvml.call("nvmlInit_v2")
    try:
        yield nvml
    finally:
        library.nvmlShutdown()
