"""One machine, as the self-test of GPUDirect RDMA looks at it: its UCX, its device, its memory that adapters reach."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable
from typing import Any, Final

import attrs
import msgspec

from trimesh._transport.interface import Grant, MemoryKind, ProcessAddress, Right, Span
from trimesh._transport.native.mover import NativeMover, adapter_name
from trimesh.rdma.memory.device import settle_writes
from trimesh.rdma.memory.local import address_of

ADAPTERS = "/sys/class/infiniband"
_BOTH: Final = Right.READ | Right.WRITE


class CheckLine(msgspec.Struct, frozen=True, array_like=True):
    """What came of one check.

    Attributes:
        name: What was looked at.
        ok: Whether it is as it must be.
        text: What was found; or the reason why not, and what to do.
    """

    name: str
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"  {'ok' if self.ok else 'NO':<4}{self.name}: {self.text}"


@attrs.frozen
class TriedHostMemory:
    """Memory of the host."""

    memory: bytearray
    kind: MemoryKind = MemoryKind.HOST

    @property
    def span(self) -> Span:
        return Span(address_of(memoryview(self.memory)), len(self.memory), self.memory, self.kind)

    def put(self, data: bytes) -> None:
        self.memory[:] = data

    def get(self) -> bytes:
        return bytes(self.memory)

    def settle(self) -> None:
        """Do nothing: adapters and the processor agree."""


@attrs.frozen
class TriedDeviceMemory:
    """Memory of the first CUDA device that torch sees."""

    torch: Any
    tensor: Any

    @property
    def span(self) -> Span:
        return Span(self.tensor.data_ptr(), self.tensor.numel(), self.tensor, MemoryKind.CUDA)

    def put(self, data: bytes) -> None:
        self.tensor.copy_(self.torch.frombuffer(bytearray(data), dtype=self.torch.uint8))
        self.torch.cuda.synchronize()

    def get(self) -> bytes:
        return bytes(self.tensor.cpu().numpy())

    def settle(self) -> None:
        """Have the driver flush what adapters have written."""
        settle_writes(self.tensor.device.index)


TriedMemory = TriedHostMemory | TriedDeviceMemory


def on_device(nbytes: int) -> tuple[TriedMemory | None, str]:
    """Return memory of a device, and its name; or None, and why there is none, and what to do."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return None, f"torch cannot be imported ({error}): install a torch for CUDA"
    try:
        if not torch.cuda.is_available():
            return None, "torch sees no CUDA device: look at `nvidia-smi`, CUDA_VISIBLE_DEVICES, and torch.version.cuda"
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
        return TriedDeviceMemory(torch, tensor), str(torch.cuda.get_device_name(0))
    except (RuntimeError, AssertionError) as error:
        return None, f"CUDA does not start: {error}"


MakeMemory = Callable[[int], tuple[TriedMemory | None, str]]


class Reached(msgspec.Struct, frozen=True):
    """How the other side reaches this one.

    Attributes:
        home: The process.
        device, host: Its memory; None if no adapter reaches it.
    """

    home: ProcessAddress
    device: Grant | None
    host: Grant | None


class CheckedSide:
    """This process, as one of the two sides.

    Attributes:
        lines: What has come of its checks.
        device, host: Its memory; None if there is no device.
        reached: How the other side reaches it.
    """

    def __init__(self, mover: NativeMover, nbytes: int, make: MakeMemory) -> None:
        self.mover = mover
        self.nbytes = nbytes
        self.lines = list[CheckLine]()
        self.device: TriedMemory | None = None
        self.host = TriedHostMemory(bytearray(nbytes))
        self._look_at_ucx()
        self.device, text = make(nbytes)
        self._say("CUDA device", text, ok=self.device is not None)
        self.granted = {"host": self._grant("host memory", self.host)}
        if self.device is not None:
            self.granted["device"] = self._grant("device memory", self.device)
        self.reached = Reached(mover.home, self.granted.get("device"), self.granted["host"])

    def _say(self, name: str, text: str, *, ok: bool) -> None:
        self.lines.append(CheckLine(name, ok=ok, text=text))

    def _look_at_ucx(self) -> None:
        try:
            adapters = ", ".join(sorted(os.listdir(ADAPTERS)))
        except OSError:
            adapters = ""
        text = adapters or f"none in {ADAPTERS}: is there one, and its kernel module loaded (`ibv_devices`)?"
        about = self.mover.adapters.about
        self._say("adapters", text, ok=bool(adapters))
        help_ = "" if self.mover.has_adapters else ". Install the UCX of HPC-X or DOCA, and name it by TRIMESH_UCX"
        self._say("libucp", about + help_, ok=self.mover.has_adapters)
        if not self.mover.has_adapters:
            return
        name = adapter_name(about)
        is_verbs = name in ("ibverbs", "efa")
        help_ = "" if is_verbs else ": this UCX has no transport for verbs; see UCX_TLS, and `ucx_info -d`"
        self._say("verbs in UCX", name + help_, ok=is_verbs)
        knows = self.mover.adapters.knows_devices
        self._say("CUDA in UCX", "ucp_context_query names its memory" if knows else self.mover.why_no_device, ok=knows)

    def _grant(self, name: str, piece: TriedMemory) -> Grant | None:
        granted = self.mover.grant(piece.span, _BOTH)
        if granted.exported:
            self._say(f"{name} registered", f"{self.nbytes >> 20} MiB", ok=True)
            return granted
        is_device = piece.span.kind is MemoryKind.CUDA
        why = self.mover.why_no_device if is_device else self.mover.adapters.about
        self._say(f"{name} registered", why or "the adapter refuses it: see `ulimit -l`", ok=False)
        self.mover.revoke(granted)
        self.mover.drop(granted)
        return None

    def pieces(self) -> dict[str, TriedMemory]:
        """Return its memory that adapters reach, by name."""
        made: dict[str, TriedMemory | None] = {"device": self.device, "host": self.host}
        return {name: piece for name, piece in made.items() if piece is not None and self.granted.get(name) is not None}

    def fill(self, seed: int) -> None:
        """Put numbers into all of it."""
        for piece in self.pieces().values():
            piece.put(numbers(self.nbytes, seed))

    def has(self, name: str, seed: int) -> bool:
        """Return whether some of it has these numbers, as what is queued on the device from now on would see."""
        piece = self.pieces().get(name)
        return piece is not None and piece.get() == numbers(self.nbytes, seed)

    def revoke(self) -> None:
        """Let the other side reach nothing any more."""
        for granted in self.granted.values():
            if granted is not None:
                self.mover.revoke(granted)


def numbers(nbytes: int, seed: int) -> bytes:
    """Return bytes that no mistake makes."""
    return random.Random(seed).randbytes(nbytes)  # noqa: S311 - no secret
