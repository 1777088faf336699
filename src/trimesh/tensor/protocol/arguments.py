"""Encoding of operator arguments as plain lists, and decoding on the ranks.

None, bool, int, float, str    themselves
["r"] ["n"] ["b"]              a tensor; a number that varies; a body of the message
["l", ...] ["t", ...]          list, tuple
["d", key, value, ...]         dict with string keys
[kind, text]                   a dtype, device, layout, memory format
["c", real, imaginary]         a complex number
["y", bytes]                   bytes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from trimesh import limits
from trimesh._wire.memory import ask_for_huge_pages, memory_at
from trimesh.errors import ProtocolError
from trimesh.tensor.protocol.messages import BODY, NUMBER, REF

Build = Callable[[Sequence[Any]], Any]
"""Builds one argument from the operands of a command."""

PLAIN: Final = frozenset({type(None), bool, int, float, str})

_NAMED: Final[dict[type, str]] = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "format",
}
_KINDS: Final = {kind: cls for cls, kind in _NAMED.items()}


class OperandSlot:
    """Placeholder for an operand in the arguments to be encoded; `kind` is "r", "n" or "b"."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


SLOT: Final = OperandSlot(REF)
NUMBER_SLOT: Final = OperandSlot(NUMBER)
BODY_SLOT: Final = OperandSlot(BODY)


def describe(value: Any) -> Any:
    """Encode an argument whose tensors and varying numbers have been replaced by slots.

    Raises:
        TypeError: The argument has a type that cannot be sent.
    """
    if type(value) in PLAIN:
        return value
    match value:
        case OperandSlot():
            return [value.kind]
        case list():
            return ["l", *map(describe, value)]
        case tuple():
            return ["t", *map(describe, value)]
        case dict():
            return ["d", *(part for key, item in value.items() for part in (key, describe(item)))]
        case torch.device():
            return ["device", value.type]  # each rank has its own device of this type
        case complex():
            return ["c", value.real, value.imag]
        case bytes():
            return ["y", value]
        case _:
            kind = _NAMED.get(type(value))
            if kind is None:
                raise TypeError(f"an argument of a tensor operation must be data, got {value!r}")
            return [kind, str(value).removeprefix("torch.")]


def read(described: Any, at: int, device: torch.device) -> tuple[Build | None, Any, int]:
    """Decode one argument.

    Args:
        described: The output of `describe`, from another process.
        at: Index of the next operand.
        device: Device of this rank; replaces every device of the same type.

    Returns:
        Its builder, or None for a constant; the constant; the index of the next operand.

    Raises:
        ProtocolError: `described` is malformed.
    """
    if not isinstance(described, list):
        if type(described) not in PLAIN:
            raise ProtocolError(f"an argument must be described as data, got {described!r}")
        return None, described, at
    match described:
        case ["r"] | ["n"] | ["b"]:
            return _pick(at), None, at + 1
        case ["l" | "t" as kind, *parts]:
            builds, after = _read_all(parts, at, device)
            return *_joined(list if kind == "l" else tuple, builds), after
        case ["d", *parts] if len(parts) % 2 == 0:
            keys = parts[::2]
            builds, after = _read_all(parts[1::2], at, device)
            return *_joined(lambda values: dict(zip(keys, values, strict=True)), builds), after
        case ["c", float(real), float(imaginary)]:
            return None, complex(real, imaginary), at
        case ["y", bytes(data)]:
            return None, data, at
        case [str(kind), str(text)] if kind in _KINDS:
            return None, _named(kind, text, device), at
        case _:
            raise ProtocolError(f"an argument must be described by its kind and parts, got {described!r}")


def _pick(at: int) -> Build:
    return lambda operands: operands[at]


def _read_all(parts: Sequence[Any], at: int, device: torch.device) -> tuple[list[tuple[Build | None, Any]], int]:
    found: list[tuple[Build | None, Any]] = []
    for part in parts:
        build, constant, at = read(part, at, device)
        found.append((build, constant))
    return found, at


def _joined(make: Callable[[list[Any]], Any], parts: list[tuple[Build | None, Any]]) -> tuple[Build | None, Any]:
    if all(build is None for build, _ in parts):
        # Each command gets new lists: the called function may keep or change them.
        values = [constant for _, constant in parts]
        return (lambda _: make(list(values))), None
    return (lambda operands: make([constant if build is None else build(operands) for build, constant in parts])), None


def _named(kind: str, text: str, device: torch.device) -> Any:
    if kind == "device":
        if text not in ("cpu", "meta", device.type):
            raise ProtocolError(f"a rank on {device} has no device {text!r}")
        return device if text == device.type else torch.device(text)
    found = getattr(torch, text, None)
    if not isinstance(found, _KINDS[kind]):
        raise ProtocolError(f"torch has no {kind} {text!r}")
    return found


# ---- devices of the ranks --------------------------------------------------------------------------------------------


def default_device() -> torch.device:
    """Return the device that the controller assumes for ranks: CUDA if the controller has it, else the CPU.

    Its index is the one of the controller's device, as fake tensors need one; each rank uses its own.
    """
    if torch.cuda.is_available():
        from trimesh.untried import warn_untried  # noqa: PLC0415 - few programs have a device

        warn_untried("the tensor engine on CUDA devices")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank_device(number: int) -> torch.device:
    """Return the device of a rank. Ranks take the devices of their host in turn, so several may share one."""
    if torch.cuda.is_available():
        return torch.device("cuda", number % torch.cuda.device_count())
    return torch.device("cpu")


# ---- new tensors on the CPU that are filled by a copy, or read from another process ----------------------------------


def new_tensor(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised row-major tensor on the CPU.

    Large tensors use huge pages: the first copy into pages of 4 KiB takes twice as long (64 MiB: 38 instead of 17 ms).
    """
    made = torch.empty(size, dtype=dtype)
    if type(made) is torch.Tensor and made.device.type == "cpu":  # a mode of torch may make others
        ask_for_huge_pages(made.data_ptr(), made.nbytes)
    return made


# ---- small tensors as bytes, in the head of a message ----------------------------------------------------------------

_ALIGN_BYTES: Final = 16
"""Alignment of a packed tensor: the size of the widest element."""
_QUANTIZED: Final = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""Dtypes whose elements mean nothing without a scale."""


def pack(values: Sequence[torch.Tensor]) -> bytes | None:
    """Return the bytes of small tensors, concatenated; None if one is too large or is more than row-major bytes."""
    if sum(value.numel() * value.element_size() + _ALIGN_BYTES for value in values) > limits.HEAD_PAYLOAD_BYTES_MAX:
        return None
    memory = bytearray()
    for value in values:
        here = value.detach()
        is_plain = type(here) is torch.Tensor and here.layout is torch.strided and here.is_contiguous()
        if not is_plain or here.is_meta or here.dtype in _QUANTIZED or here.is_conj() or here.is_neg():
            return None
        here = here.cpu()
        memory += bytes(-len(memory) % _ALIGN_BYTES)
        memory += memory_at(here.data_ptr(), here.nbytes, here)
    return bytes(memory)


def unpack(data: bytes, likes: Iterable[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    """Return the tensors that `pack` has packed; `likes` has size and dtype of each.

    Raises:
        ValueError: The data does not have these sizes and dtypes.
    """
    made: list[torch.Tensor] = []
    memory, at = bytearray(data), 0
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # a mesh may be active
        for size, dtype in likes:
            at += -at % _ALIGN_BYTES
            count = math.prod(size)
            if dtype in _QUANTIZED:
                raise ValueError("quantized tensors are not packed")
            if not count:
                made.append(torch.empty(size, dtype=dtype))
                continue
            made.append(torch.frombuffer(memory, dtype=dtype, count=count, offset=at).resize_(size))
            at += made[-1].nbytes
    if at != len(data):
        raise ValueError(f"they take {at} bytes")
    return made
