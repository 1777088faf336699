"""How the tensors of one publication lie in its memory: names, kinds, shapes and offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import msgspec

from trimesh import limits
from trimesh.errors import ProtocolError
from trimesh.rdma.memory.local import memory_of

ALIGN_BYTES: Final = 64
"""Where a tensor begins: a cache line, and the widest vector load."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One tensor.

    Attributes:
        name: Its name.
        kind: "torch", "numpy" or "bytes".
        dtype: As its library writes it; empty for bytes.
        shape: Its sizes.
        offset, nbytes: Where it lies.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def describe(self) -> str:
        return f"{self.dtype or 'bytes'} of shape {self.shape}"


@attrs.frozen
class Layout:
    """All tensors of a publication.

    Attributes:
        entries: By name, in order.
        head: The layout itself as bytes, which come first.
        nbytes: Of all.
    """

    entries: Mapping[str, TensorEntry]
    head: bytes
    nbytes: int


def layout_of(tensors: Mapping[str, object], room: int = 0) -> Layout:
    """Return how tensors are to lie.

    Args:
        tensors: By name.
        room: How many bytes are to stay free between the layout and the first of them.

    Raises:
        TypeError, ValueError: One cannot be published; or there are none, or too many.
    """
    if not tensors:
        raise ValueError("at least one tensor must be published, got none")
    if len(tensors) > limits.PUBLISHED_TENSORS_MAX:
        raise ValueError(
            f"at most {limits.PUBLISHED_TENSORS_MAX} tensors can be published together, got {len(tensors)}"
        )
    described = dict[str, tuple[tuple[str, str, tuple[int, ...]], int]]()
    for name, data in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"published tensors are named by texts, got {name!r}")
        nbytes = memory_of(data, f"the published tensor {name!r}").nbytes
        described[name] = (describe(data), nbytes)
    start = _aligned(len(_encode(described, 0)) + _SLACK_BYTES * len(described) + room)
    head = _encode(described, start)
    entries = {entry.name: entry for entry in _DECODER.decode(head)}
    last = list(entries.values())[-1]
    return Layout(entries, head, last.offset + last.nbytes)


def read_layout(data: bytes | bytearray | memoryview, nbytes: int) -> dict[str, TensorEntry]:
    """Return the entries of a layout that lies in a slot of `nbytes`.

    Raises:
        ProtocolError: It cannot be one.
    """
    try:
        entries = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"the layout of a publication cannot be read: {error}") from error
    for entry in entries:
        if not 0 <= entry.offset <= nbytes or not 0 < entry.nbytes <= nbytes - entry.offset:
            raise ProtocolError(f"a published tensor must lie in its slot, got {entry}")
    return {entry.name: entry for entry in entries}


_DECODER: Final = msgspec.msgpack.Decoder(list[TensorEntry])

_SLACK_BYTES: Final = 9
"""An offset that is not known yet is written as 0, and takes at most this much more."""


def _encode(described: Mapping[str, tuple[tuple[str, str, tuple[int, ...]], int]], start: int) -> bytes:
    entries = list[TensorEntry]()
    at = start
    for name, ((kind, dtype, shape), nbytes) in described.items():
        entries.append(TensorEntry(name, kind, dtype, shape, at if start else 0, nbytes))
        at = _aligned(at + nbytes)
    return msgspec.msgpack.encode(entries)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def describe(data: Any) -> tuple[str, str, tuple[int, ...]]:
    """Return the kind, type and shape of what `memory_of` has taken."""
    module = type(data).__module__.partition(".")[0]
    if hasattr(data, "untyped_storage"):
        return "torch", str(data.dtype).removeprefix("torch."), tuple(data.shape)
    if module == "numpy":
        return "numpy", data.dtype.str, tuple(data.shape)
    return "bytes", "", (memoryview(data).nbytes,)
