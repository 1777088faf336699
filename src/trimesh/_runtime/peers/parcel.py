"""One encoded message on its way to peers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trimesh._transport.interface import Buffer
from trimesh._wire.memory import DefinitionId


class Parcel(msgspec.Struct, frozen=True, eq=False):
    """One encoded message, shared by all the peers that it goes to; never changed.

    Attributes:
        head: The control struct.
        bodies: Buffers lent by the sender.
        definitions: What goes by value and must be known to the peer first.
        nbytes: For the credit window.
        attachments: What the payload refers to (`Encoded.attachments`): the ports among them are lent to the peer.
        flow: Order that it needs beside other messages, as `Link.send` takes it; 0 with attachments, which are told
            of by messages that must come right before it.
    """

    head: bytes
    bodies: Sequence[Buffer] = ()
    definitions: Sequence[DefinitionId] = ()
    nbytes: int = 0
    attachments: Sequence[object] = ()
    flow: int = 0


class SpreadParcel(Parcel, frozen=True, eq=False):
    """A message that is another one for each target.

    Attributes:
        nbytes: Of the largest.
        attachments: Of all.
        each: By the index of the target.
    """

    each: Sequence[Parcel] = ()
