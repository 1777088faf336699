"""What a rank says, beside the parts of tensors that it publishes, of how they make up the whole."""

from __future__ import annotations

from typing import Final

import msgspec

from trimesh.errors import ProtocolError
from trimesh.tensor.protocol.box import Box

LAYOUT: Final = "trimesh/layout"
"""Name of what says so, among the published tensors."""


class PartOfState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One tensor of a state, as one rank has it.

    Attributes:
        name: Its name.
        is_global: Whether the ranks have parts of one.
        dtype: As torch writes it.
        size: Of the whole.
        start, part: Which part of it: first index and length, by dimension.
        is_here: Whether this rank publishes that part; otherwise another one does, or it is empty.
    """

    name: str
    is_global: bool
    dtype: str
    size: tuple[int, ...]
    start: tuple[int, ...]
    part: tuple[int, ...]
    is_here: bool

    @property
    def box(self) -> Box:
        return Box(self.start, self.part)


_DECODER: Final = msgspec.msgpack.Decoder(list[PartOfState])


def read_parts(data: bytearray) -> list[PartOfState]:
    """Return what a rank has said.

    Raises:
        ProtocolError: It is nothing of that kind.
    """
    try:
        parts = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"the layout of a published state cannot be read: {error}") from error
    for one in parts:
        whole = zip(one.start, one.part, one.size, strict=False)
        if not len(one.start) == len(one.part) == len(one.size) or any(
            begin < 0 or length < 0 or begin + length > size for begin, length, size in whole
        ):
            raise ProtocolError(f"a published part must lie within its tensor, got {one}")
    return parts
