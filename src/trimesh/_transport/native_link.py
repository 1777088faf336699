"""Links and groups of the native transport, as the runtime holds them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import trio

from trimesh import limits
from trimesh._native import status
from trimesh._transport.assembly import Assembly, AssemblyError
from trimesh._transport.base import (
    Buffer,
    DownReason,
    Group,
    Lane,
    Link,
    LinkDown,
    LinkHandler,
    LinkStatistics,
)
from trimesh._transport.outgoing import Bodies, Completion, Outgoing
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._transport.native import NativeTransport

_FLAG_MORE: Final = 1


class NativeLink(Link):
    """One end of a connection to one peer.

    Attributes:
        up: Set when the peer has said hello, so that it is known who it is.
        peer_epoch: The peer's incarnation; 0 before `up`.
        peer_pid: Its process id, verified by the kernel on one host, else what the peer said; 0 before `up`.
        peer_host: Its host identity; 0 when not known.
        transport: Whose link this is.
        handle: Its number in the native library.
        view: The memory that offsets of records refer to.
    """

    def __init__(self, transport: NativeTransport, handle: int) -> None:
        self.up = trio.Event()
        self.peer_epoch = ProcId(0)
        self.peer_pid = 0
        self.peer_host = 0
        self.transport: Final = transport
        self.handle: Final = handle
        self.view = transport.view_of(handle)
        self._assembly: Assembly | None = None
        self._control: deque[Outgoing] = deque()
        self._data: deque[Outgoing] = deque()
        self._unsent: list[tuple[Outgoing, Lane]] = []
        self._ended = False
        self._closing = False
        self._bye_said = False
        self._last = LinkStatistics(0, 0, 0, 0, 0, 0)
        library = transport.library
        self._bus = transport.bus
        self._send_head = library.lib.tm_link_send_head

    # ---- sending ----

    def send(self, head: bytes, bodies: Sequence[Buffer] = (), *, lane: Lane = Lane.DATA) -> trio.Event | None:
        """See `Link.send`."""
        if self._closing or self._ended:
            return None
        if not bodies and not (self._data if lane else self._control):
            code = self._send_head(self._bus, self.handle, lane, head, len(head))
            if code == status.OK:
                self.transport.dirty = True
                return None
            if code != status.FULL and not self.is_unborn(code):
                self._refused(code, head)
                return None
        if not lane and bodies:
            raise ValueError("a CONTROL message carries no bodies; send them on the DATA lane")
        if len(head) > limits.HEAD_BYTES_MAX:
            raise LimitExceeded("HEAD_BYTES_MAX", len(head))
        library = self.transport.library
        one = Outgoing(head, Bodies(library, self._bus, bodies), library.ffi.new("tm_cursor *"))
        if self.enqueue(one, lane):
            return None
        one.completion = Completion(1)
        return one.completion.event

    def _refused(self, code: int, head: bytes) -> None:
        if code == status.ERR_DOWN:
            return
        if code == status.ERR_TOO_LARGE:
            raise LimitExceeded("HEAD_BYTES_MAX", len(head))
        raise status.error_of(code, "sending a message")

    def enqueue(self, one: Outgoing, lane: Lane) -> bool:
        """Send a message now if nothing waits before it and it fits; else queue it. True: all of it has left."""
        queue = self._data if lane else self._control
        if not queue and self._advance(one, lane):
            return True
        queue.append(one)
        return False

    def _advance(self, one: Outgoing, lane: Lane) -> bool:
        """Send what fits of a message. True: no more of it has to wait."""
        bodies = one.bodies
        code = self.transport.library.lib.tm_link_send(
            self._bus, self.handle, lane, one.head, len(one.head), bodies.spans, bodies.count, one.cursor
        )
        self.transport.dirty = True
        if code == status.FULL or self.is_unborn(code):
            return False
        if code not in (status.OK, status.ERR_DOWN):
            raise status.error_of(code, "sending a message")
        one.finish()
        return True

    def is_unborn(self, code: int) -> bool:
        """Whether `code` says that the link has ended before it came up: what it is given waits for `hand_over`."""
        return code == status.ERR_DOWN and not self.up.is_set()

    def is_clear(self) -> bool:
        """Whether a DATA message would go out at once (if there is room)."""
        return not (self._data or self._ended or self._closing)

    def is_open(self) -> bool:
        """Whether messages are taken at all."""
        return not (self._ended or self._closing)

    def _resume(self) -> None:
        """Send what waits, CONTROL first; there is room again."""
        for queue, lane in ((self._control, Lane.CONTROL), (self._data, Lane.DATA)):
            while queue:
                if not self._advance(queue[0], lane):
                    return
                queue.popleft()
        if self._closing:
            self._say_bye()

    # ---- ending ----

    def close(self) -> None:
        """See `Link.close`."""
        if self._closing or self._ended:
            return
        self._closing = True
        code = self.transport.library.lib.tm_link_leave(self._bus, self.handle)
        status.check(code, "closing a link")
        if not self._control and not self._data:
            self._say_bye()

    def _say_bye(self) -> None:
        if self._bye_said:
            return
        code = self.transport.library.lib.tm_link_close(self._bus, self.handle)
        if code == status.FULL:
            return  # tried again when there is room, or when the peer has come up
        if code not in (status.OK, status.ERR_DOWN):
            raise status.error_of(code, "closing a link")
        self._bye_said = True
        self.transport.dirty = True

    def abort(self) -> None:
        """See `Link.abort`."""
        if not self._ended:
            self.end()

    def end(self) -> None:
        """Give back everything native and let go of what waits."""
        with contextlib.suppress(trio.ClosedResourceError):  # in a forked child
            self._last = self.statistics()
        self._ended = True
        self._assembly = None
        self.transport.forget(self, self.handle)
        self.view = memoryview(b"")
        for queue in (self._control, self._data):
            while queue:
                queue.popleft().finish()

    def hand_over(self, heir: Link | None) -> bool:
        """See `Link.hand_over`."""
        if self.up.is_set() or self._last.messages_sent:  # a stream takes messages before it is up
            return False
        if isinstance(heir, NativeLink):
            for one, lane in self._unsent:
                heir.enqueue(one, lane)
            self._unsent.clear()
        return not self._unsent

    def statistics(self) -> LinkStatistics:
        """See `Link.statistics`."""
        if self._ended:
            return self._last
        info = self.transport.info_of(self.handle)
        waiting = sum(one.waiting_bytes for queue in (self._control, self._data) for one in queue)
        return LinkStatistics(
            messages_sent=info.messages_sent,
            messages_received=info.messages_received,
            bytes_sent=info.bytes_sent,
            bytes_received=info.bytes_received,
            queued_bytes=waiting,
            dropped_frames=info.frames_dropped,
        )

    # ---- receiving, called by the transport's task ----

    def take_message(self, handler: LinkHandler, record: tuple[int, ...]) -> None:
        """Hand over a message with bodies, or begin to put one together."""
        _, _, n_bodies, flags, head_at, head_size, sizes_at, body_at, body_size = record
        view = self.view
        sizes, piece = view[sizes_at : sizes_at + 8 * n_bodies], view[body_at : body_at + body_size]
        assembly = Assembly(sizes, piece, self._take)
        if flags & _FLAG_MORE:
            assembly.head = bytes(view[head_at : head_at + head_size])
            self._assembly = assembly
            return
        head = view[head_at : head_at + head_size]
        handler.received(self, head, assembly.finish())
        head.release()

    def _take(self, word: int) -> memoryview:
        """Return a body in shared memory."""
        return self.transport.lending.take(self.handle, word)

    def take_fragment(self, handler: LinkHandler, record: tuple[int, ...]) -> None:
        """Add a fragment; hand the message over if it was the last."""
        _, _, _, flags, _, _, _, body_at, body_size = record
        assembly = self._assembly
        if assembly is None:
            raise AssemblyError("a fragment of no message")
        assembly.add(self.view[body_at : body_at + body_size])
        if not flags & _FLAG_MORE:
            self._assembly = None
            handler.received(self, memoryview(assembly.head), assembly.finish())

    def take_up(self) -> None:
        """The peer has said hello."""
        info = self.transport.info_of(self.handle)
        self.peer_epoch = ProcId(info.peer_epoch)
        self.peer_pid = info.peer_pid
        self.peer_host = info.peer_host
        self.up.set()
        self._resume()

    def take_space(self) -> None:
        """There is room again."""
        self.transport.dirty = True  # bodies that were given back may have waited for it, too
        self._resume()

    def take_down(self, handler: LinkHandler, reason: DownReason, detail: str) -> None:
        """The link has ended."""
        if not self.up.is_set():
            for queue, lane in ((self._control, Lane.CONTROL), (self._data, Lane.DATA)):
                self._unsent += [(one, lane) for one in queue]
                queue.clear()
        self.end()
        handler.link_down(self, LinkDown(reason, detail))
        for one, _ in self._unsent:
            one.finish()
        self._unsent.clear()


class NativeGroup(Group):
    """A set of links that are sent the same message by one call."""

    def __init__(self, transport: NativeTransport, links: Sequence[NativeLink]) -> None:
        self._transport = transport
        self._links = list(dict.fromkeys(links))
        ffi = transport.library.ffi
        n = max(1, len(links))
        self._handles = ffi.new("uint32_t[]", n)
        self._statuses = ffi.new("int32_t[]", n)

    def cast(self, head: bytes, bodies: Sequence[Buffer] = ()) -> trio.Event | None:
        """See `Group.cast`."""
        if len(head) > limits.HEAD_BYTES_MAX:
            raise LimitExceeded("HEAD_BYTES_MAX", len(head))
        ffi, lib = self._transport.library.ffi, self._transport.library.lib
        spans = Bodies(self._transport.library, self._transport.bus, bodies)
        clear = [link for link in self._links if link.is_clear()]
        behind = [link for link in self._links if link.is_open() and not link.is_clear()]
        for i, link in enumerate(clear):
            self._handles[i] = link.handle
        cursors = ffi.new("tm_cursor[]", max(1, len(clear)))
        code = lib.tm_links_send(
            self._transport.bus,
            self._handles,
            len(clear),
            head,
            len(head),
            spans.spans,
            spans.count,
            self._statuses,
            cursors,
        )
        status.check(code, "sending a message to a group")
        self._transport.dirty = True
        rest: list[tuple[NativeLink, Any]] = []
        for i, link in enumerate(clear):
            if self._statuses[i] == status.FULL or link.is_unborn(self._statuses[i]):
                cursor = ffi.new("tm_cursor *", cursors[i])
                rest.append((link, cursor))
            elif self._statuses[i] not in (status.OK, status.ERR_DOWN):
                raise status.error_of(self._statuses[i], "sending a message to a group")
        rest.extend((link, ffi.new("tm_cursor *")) for link in behind)
        if not rest:
            spans.left()
            return None
        spans.links = len(rest)
        completion = Completion(len(rest))
        for link, cursor in rest:
            link.enqueue(Outgoing(head, spans, cursor, completion), Lane.DATA)
        return completion.event

    def close(self) -> None:
        """See `Group.close`."""
        self._links.clear()
