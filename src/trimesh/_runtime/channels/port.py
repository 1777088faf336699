"""The sending end of a channel: an object that may be sent anywhere, and keeps its channel open while it lives."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import trio

from trimesh._runtime.actors.context import refuse_if_forked
from trimesh._runtime.peers.parcel import Parcel
from trimesh._runtime.tasks.foreign import in_trio, in_trio_now
from trimesh._runtime.values.payload import place_payload
from trimesh._wire import messages

if TYPE_CHECKING:
    from trimesh._runtime.channels.holding import Holding

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Port(trio.abc.SendChannel[T_contra], Generic[T_contra]):
    """The sending end of a channel.

    It can be an argument or a result of an endpoint, an attribute of one, an item of another channel: what arrives
    there is a port of the same channel. All ports of one process share one window of `capacity` items. The receiver
    sees the end when every process has closed its ports, or dropped them, or has died, and no message that carries one
    is under way.

    Attributes:
        capacity: Items of each process that may wait for the receiver.
    """

    __slots__ = ("__weakref__", "_holding", "_is_closed")

    def __init__(self, holding: Holding | None) -> None:
        self._is_closed = holding is None
        self._holding = holding
        if holding is not None:
            holding.share.refer()

    @property
    def holding(self) -> Holding | None:
        """What this process holds of the channel, or None when this port is closed."""
        return None if self._is_closed else self._holding

    @property
    def capacity(self) -> int:
        """Items of each process that may wait for the receiver."""
        return 0 if self._holding is None else self._holding.capacity

    @trio.lowlevel.enable_ki_protection
    async def send(self, value: T_contra) -> None:
        """Send an item; wait while `capacity` items of this process, or `limits.MAILBOX_BYTES`, wait for the receiver.

        With a capacity of 0 it returns when the receiver has taken the item. Items of one process arrive in the order
        in which they were sent; items are copied, and what they were made from may be changed when this returns.

        Raises:
            trio.ClosedResourceError: This port is closed.
            trio.BrokenResourceError: The receiver is closed, or its process is gone: then the cause says how.
            TypeError: The item cannot be serialised; with pickle="off" also: it is not what the channel was opened for.
            PayloadError: With pickle="off": the class that the channel was opened for cannot be had in this process.

        Blocking: a checkpoint, cancellable: cancelled, it has sent nothing. (Should the process of the receiver not
        run, so that it answers no recall of an item for `limits.CANCEL_ACK_SECONDS`, it may yet take that item.)
        """
        await in_trio(self._send)(value)

    async def _send(self, value: T_contra) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        holding = self._check()
        parcel = self._encode(holding, value)
        if holding.home.link is None:
            refuse_if_forked()
            await holding.channels.connect(holding.home)
            self._check()
        await holding.send(self, parcel)

    @trio.lowlevel.enable_ki_protection
    def send_nowait(self, value: T_contra) -> None:
        """Send an item now.

        Raises:
            trio.WouldBlock: There is no room for it, or no link to the receiver's process yet; nothing was sent. So it
                is always with a capacity of 0, because only the receiver's process knows whether a task waits there.
            trio.ClosedResourceError, trio.BrokenResourceError, TypeError, PayloadError: See `send`.
        """
        in_trio_now(self._send_nowait)(value)

    def _send_nowait(self, value: T_contra) -> None:
        holding = self._check()
        parcel = self._encode(holding, value)
        if holding.home.link is None:
            refuse_if_forked()
            holding.channels.start_connecting(holding.home)
        if not holding.has_room(parcel.nbytes):
            raise trio.WouldBlock
        holding.transmit(parcel)

    @trio.lowlevel.enable_ki_protection
    def clone(self) -> Port[T_contra]:
        """Return another port of the same channel, which is closed by itself.

        Raises:
            trio.ClosedResourceError: This port is closed.
        """
        if self._is_closed:
            self._raise_closed()
        return in_trio_now(Port[T_contra])(self._holding)

    @trio.lowlevel.enable_ki_protection
    def close(self) -> None:
        """Give this port up, at once and without a checkpoint. What it has sent arrives. Idempotent."""
        in_trio_now(self._close)()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        assert self._holding is not None
        self._holding.closed(self, self._raise_closed)
        self._holding.channels.release(self._holding)

    @trio.lowlevel.enable_ki_protection
    async def aclose(self) -> None:
        """Give this port up; see `close`. A checkpoint."""
        await in_trio(self._aclose)()

    async def _aclose(self) -> None:
        self._close()
        await trio.lowlevel.checkpoint()

    def _check(self) -> Holding:
        if self._is_closed:
            self._raise_closed()
        assert self._holding is not None
        self._holding.check()
        return self._holding

    def _raise_closed(self) -> NoReturn:
        raise trio.ClosedResourceError("this port is closed")

    def _encode(self, holding: Holding, value: object) -> Parcel:
        encoded = holding.channels.proc.values.encode_sent(value, holding.item_type)
        payload, bodies = place_payload(encoded)
        head = messages.encode(messages.PortItem(holding.channel, payload))
        return Parcel(head, bodies, encoded.definitions, encoded.nbytes, encoded.attachments)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse: only messages carry ports, so that they are counted."""
        raise TypeError(
            "a port travels in messages only, as an argument, a result or an item, got pickled or copied by itself: "
            "use port.clone() for another one here"
        )

    def __del__(self) -> None:
        # Anywhere, also in the middle of any other code: it is only noted here.
        with contextlib.suppress(AttributeError):  # half-made
            if not self._is_closed and self._holding is not None:
                self._is_closed = True
                self._holding.channels.note_release(self._holding)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"of channel {self._holding and self._holding.channel}"
        return f"<port {state}>"
