"""Channels in plain threads: ports and receivers, without `await`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast, overload

import trio

from trimesh._runtime import channels
from trimesh.actor import channel
from trimesh.blocking.body import AnyBody, FacedBody, body_of
from trimesh.blocking.handle import ClosedByBlock, FacedObject, inner_of, itself
from trimesh.blocking.work import Each, wait_now

T = TypeVar("T")


class Port(FacedObject["channels.Port[T]"], ClosedByBlock, Generic[T]):
    """The sending end of a channel; see `trimesh.Port`. Sent to an actor it is that.

    Waits end as those of calls do: by `Cancelled`, or by Ctrl-C, and nothing was sent then.
    """

    @property
    def capacity(self) -> int:
        """Items of each process that may wait for the receiver."""
        return self._inner.capacity

    def send(self, value: T) -> None:
        """Send an item; wait while there is no room. See `trimesh.Port.send` for what is raised."""
        item: Any = inner_of(value)
        self._wait(self._inner.send, item)

    def send_nowait(self, value: T) -> None:
        """Send an item now; `trio.WouldBlock` says that there is no room. See `trimesh.Port.send_nowait`."""
        item: Any = inner_of(value)
        self._now(lambda: self._inner.send_nowait(item))

    def clone(self) -> Port[T]:
        """Return another port of the same channel, which is closed by itself."""
        return Port(self._now(self._inner.clone), self._home)

    def close(self) -> None:
        """Give this port up. What it has sent arrives. Idempotent."""
        self._now(self._inner.close)

    def __reduce__(self) -> Any:
        """Let messages carry the port itself, which they count; nothing else may."""
        return itself, (self._inner,)


class Receiver(Each[T], ClosedByBlock):
    """The receiving end of a channel: `for item in receiver` ends when no port is left. See `trimesh.Receiver`."""

    def __init__(self, inner: channels.Receiver[T], home: AnyBody | None = None) -> None:
        super().__init__(inner, home)
        self._inner = inner

    def receive(self) -> T:
        """Return the next item; wait for it. One that comes together with a Ctrl-C is not lost.

        Raises:
            trio.EndOfChannel: No port is left, and everything that was sent has been received.
            trio.ClosedResourceError: This receiver is closed.
        """
        try:
            return next(self)
        except StopIteration:
            raise trio.EndOfChannel from None

    def receive_nowait(self) -> T:
        """Return the next item, which must have come already; `trio.WouldBlock` says that none has."""
        return self.take_kept() if self.has_kept else wait_now(self._inner.receive_nowait, self._home)

    def close(self) -> None:
        """Take no more items; what has come and was not received is lost. Idempotent."""
        wait_now(self._inner.close, self._home)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse, as the receiver of `trimesh` does."""
        return self._inner.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self._inner)


@overload
def open_channel(item_type: type[T], /, *, capacity: int) -> AbstractContextManager[tuple[Port[T], Receiver[T]]]: ...
@overload
def open_channel(
    item_type: None = None, /, *, capacity: int
) -> AbstractContextManager[tuple[Port[Any], Receiver[Any]]]: ...
def open_channel(
    item_type: type[Any] | None = None, /, *, capacity: int
) -> AbstractContextManager[tuple[Port[Any], Receiver[Any]]]:
    """Open a channel: `with tb.open_channel(int, capacity=64) as (port, receiver):`.

    Whoever is given its port may send, this process receives; leaving the block closes both. See
    `trimesh.open_channel`.
    """
    opening = cast("Any", channel.open_channel)(item_type, capacity=capacity)
    body: Any = body_of(opening, "a channel")
    return FacedBody(body, lambda ends: (Port(ends[0], body), Receiver(ends[1], body)))
