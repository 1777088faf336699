"""Memory of other processes that this one goes on reading when they have ended.

KP-1 It is mapped here without a claim: its owner may revoke and reuse it at any time, as if it were not kept. So
only who knows by other means that it has not changed keeps it: a pinned version of a publication has not.
KP-2 It is read, and never written, and only once its owner has ended. The kernel frees it with the last mapping,
however the processes that have one end.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._transport.interface import Carrier, Transfer, TransferDone, TransferKind
from trimesh._wire.memory import memory_at

if TYPE_CHECKING:
    from trimesh._runtime.services.bulk import Granted


class KeptMemory:
    """What one process keeps of others."""

    def __init__(self) -> None:
        self._views: dict[tuple[int, int, int, bytes], list[memoryview]] = {}

    @contextmanager
    def holding(self, granted: Granted, view: memoryview) -> Generator[None]:
        """Let transfers find some memory for as long as a block."""
        key = _key(granted)
        views = self._views.setdefault(key, [])
        views.append(view)
        try:
            yield
        finally:
            views.remove(view)
            if not views:
                self._views.pop(key, None)

    def find(self, granted: Granted) -> memoryview | None:
        views = self._views.get(_key(granted))
        return views[0] if views else None

    async def move(self, granted: Granted, transfer: Transfer) -> TransferDone | None:
        """Make a transfer whose owner has ended; return None if it cannot be made.

        Blocking: a checkpoint, cancellable, after each piece.
        """
        view, size = self.find(granted), transfer.local.nbytes
        if view is None or transfer.kind is not TransferKind.READ or transfer.offset + size > view.nbytes:
            return None
        here = memory_at(transfer.local.address, size, None)
        for at in range(0, size, limits.KEPT_PIECE_BYTES):
            end = min(size, at + limits.KEPT_PIECE_BYTES)
            here[at:end] = view[transfer.offset + at : transfer.offset + end]
            await trio.lowlevel.checkpoint()
        return TransferDone(Carrier.SHM)


def _key(granted: Granted) -> tuple[int, int, int, bytes]:
    grant = granted.grant
    return granted.home.epoch, grant.place, grant.generation, grant.secret
