"""Links and link groups of the native transport."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import trio

from trimesh import limits
from trimesh._native import lib
from trimesh._native import lib as status
from trimesh._transport.interface import (
    Buffer,
    DownReason,
    Lane,
    Link,
    LinkDown,
    LinkGroup,
    LinkHandler,
    LinkStatistics,
)
from trimesh._transport.messages.casts import ORDERED, CastBody, CastLeaf, HostCaster, Precedence, begin_casts
from trimesh._transport.messages.incoming import (
    Arrivals,
    Assembly,
    AssemblyError,
    HostMemoryError,
    map_bodies,
    one_body,
    read_head,
    read_piece,
    read_table,
)
from trimesh._transport.messages.outgoing import (
    CHUNK,
    Bodies,
    ChunkedMessage,
    Completion,
    Departure,
    Outgoing,
    Piece,
    goes_in_chunks,
)
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._transport.native.transport import NativeTransport


_FLAG_MORE: Final = 1
_FLAG_CHUNK: Final = 4
_LANE_CHUNK: Final = 2
_CHUNKED_NUMBER_MAX: Final = (1 << 32) - 1


class NativeLink(Link):
    """One end of a connection to one peer.

    Attributes:
        up: Set when the peer's hello has arrived, so that its identity is known.
        peer_epoch: The peer's incarnation; 0 before `up`.
        peer_pid: Its process id, verified by the kernel on one host, else as the peer reported; 0 before `up`.
        peer_host: Its host identity; 0 if unknown.
        handle: Number of the link in the native library.
        local: Whether the peer is on this host.
        view: The memory that offsets of records refer to.
        caster: Caster for the peer's host; None if that is this host, or another process sends its casts.
    """

    def __init__(self, transport: NativeTransport, handle: int, *, local: bool) -> None:
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
        self._large = Precedence()
        self._busy: Final = self._large.busy
        self._chunk: Outgoing | None = None  # a chunk that found no room
        self._chunked_sent = 0
        self._chunked_received = 0
        self._arrivals = Arrivals(transport.kept)
        self._unsent: list[tuple[Outgoing | ChunkedMessage, Lane, int]] = []
        self.local: Final = local
        self.caster: HostCaster | None = None
        self._chunked_begun = 0
        self._ended = False
        self._closing = False
        self._bye_said = False
        self._last = LinkStatistics(0, 0, 0, 0, 0, 0)
        library = transport.library
        self._bus = transport.bus
        self._send_head = library.lib.tm_link_send_head
        self._departure: Final = Departure(library, self._bus, handle)

    # ---- sending ----

    def send(
        self, head: bytes, bodies: Sequence[Buffer] = (), *, lane: Lane = Lane.DATA, flow: int = ORDERED
    ) -> trio.Event | None:
        if self._closing or self._ended:
            return None
        is_held = bool(lane and self._busy and not self._large.may_pass(flow))
        if not bodies and not is_held and not (self._data if lane else self._control):
            code = self._send_head(self._bus, self.handle, lane, head, len(head))
            if code == lib.OK:
                self.transport.dirty = True
                return None
            if code != lib.FULL and not self.is_unborn(code):
                self._refused(code, head)
                return None
        if not lane and bodies:
            raise ValueError(f"a CONTROL message carries no bodies, got {len(bodies)}: send them on Lane.DATA")
        if len(bodies) == 1 and not is_held and not self._data and self._departure.leave(head, bodies[0]):
            self.transport.dirty = True
            return None
        if bodies and goes_in_chunks(bodies, local=self.local):
            completion = Completion(1)
            self.launch(ChunkedMessage(head, bodies, flow, completion))
            return completion.event
        if len(head) > limits.HEAD_BYTES_MAX:
            raise LimitExceeded("HEAD_BYTES_MAX", len(head))
        library = self.transport.library
        one = Outgoing(head, Bodies(library, self._bus, bodies), library.ffi.new("tm_cursor *"))
        if is_held:
            self._large.hold(one, flow)
        elif self.enqueue(one, lane):
            return None
        completion = one.completion = Completion(1)
        return completion.event

    def _refused(self, code: int, head: bytes) -> None:
        if code == lib.ERR_DOWN:
            return
        if code == lib.ERR_TOO_LARGE:
            raise LimitExceeded("HEAD_BYTES_MAX", len(head))
        raise lib.error_of(code, "sending a message")

    def enqueue(self, one: Outgoing, lane: Lane) -> bool:
        """Send a message now if nothing waits before it and it fits; else queue it. Return whether all was sent."""
        queue = self._data if lane else self._control
        if not queue and self._advance(one, lane):
            return True
        queue.append(one)
        return False

    def _advance(self, one: Outgoing, lane: Lane) -> bool:
        """Send as much of a message as fits; return True if none of it has to wait."""
        bodies = one.bodies
        number = _LANE_CHUNK if one.is_chunk else lane
        code = self.transport.library.lib.tm_link_send(
            self._bus, self.handle, number, one.head, len(one.head), bodies.spans, bodies.count, one.cursor
        )
        self.transport.dirty = True
        if code == lib.FULL or self.is_unborn(code):
            return False
        if code not in (lib.OK, lib.ERR_DOWN):
            raise lib.error_of(code, "sending a message")
        one.finish()
        return True

    def is_unborn(self, code: int) -> bool:
        """Return whether `code` means that the link ended before it was up: its messages wait for `hand_over`."""
        return code == lib.ERR_DOWN and not self.up.is_set()

    def is_clear(self, flow: int) -> bool:
        """Return whether a DATA message would be sent at once, given room."""
        return not (self._data or self._ended or self._closing or (self._busy and not self._large.may_pass(flow)))

    def resend(self, one: Outgoing | ChunkedMessage, lane: Lane, flow: int) -> None:
        """Send a message that could not be sent at once, in order with waiting ones."""
        if isinstance(one, ChunkedMessage):
            self.launch(one)
        elif lane and self._busy and not self._large.may_pass(flow):
            self._large.hold(one, flow)
        else:
            self.enqueue(one, lane)

    def launch(self, chunked: ChunkedMessage) -> None:
        """Send a large message in chunks, or by a cast to the peer's host."""
        if not self._large.add(chunked):
            return
        if isinstance(chunked, CastLeaf) and chunked.is_apart:
            chunked.begin(self)
        else:
            self.transport.start_moving(self)

    def offer(self, leaf: CastLeaf, where: bytes) -> None:
        """Send the peer the location of the bodies of a leaf."""
        self._number(leaf)
        self._say(leaf.number, Piece.OFFER, leaf.offer(where))

    def send_chunks(self, leaf: CastLeaf) -> None:
        """Send the message of a leaf in chunks instead."""
        leaf.leave()
        self._large.rejoin(leaf)
        self.transport.start_moving(self)

    def _say(self, number: int, piece: Piece, bodies: Sequence[Buffer]) -> None:
        """Send a piece about a message whose bodies are sent by a cast, in order with DATA."""
        library = self.transport.library
        spans = Bodies(library, self._bus, bodies)
        head = CHUNK.pack(number, piece)
        self.enqueue(Outgoing(head, spans, library.ffi.new("tm_cursor *"), is_chunk=True), Lane.DATA)
        self.transport.dirty = True

    def _number(self, chunked: ChunkedMessage) -> None:
        if not chunked.number:
            self._chunked_begun = self._chunked_begun % _CHUNKED_NUMBER_MAX + 1
            chunked.number = self._chunked_begun

    def move(self) -> bool:
        """Send one chunk of a large message. Return whether another one could be sent at once."""
        if self._control or self._data or self._ended or not self.up.is_set():
            return False  # tried again when those were sent
        one = self._chunk or self._next_chunk()
        if one is None or not self._try_chunk(one):
            return False
        chunked = self._large.under_way[0]
        if chunked.is_out:
            self._out(chunked)
        else:
            self._large.under_way.rotate(-1)
        return bool(self._large.under_way) and not self._data

    def _out(self, chunked: ChunkedMessage) -> None:
        """Continue after a large message that was sent completely."""
        self._chunked_sent += 1
        for leaf in self._large.out(chunked, lambda held: self.enqueue(held, Lane.DATA)):
            leaf.begin(self)
        self._say_bye_if_asked()

    def _say_bye_if_asked(self) -> None:
        if self._closing and self._has_sent_all():
            self._say_bye()

    def _next_chunk(self) -> Outgoing | None:
        if not self._large.under_way:
            return None
        chunked = self._large.under_way[0]
        self._number(chunked)
        head, bodies = chunked.next_chunk(limits.CHUNK_BYTES if self.local else limits.STREAM_CHUNK_BYTES)
        library = self.transport.library
        spans = Bodies(library, self._bus, bodies)
        return Outgoing(head, spans, library.ffi.new("tm_cursor *"), chunked, is_chunk=True)

    def _try_chunk(self, one: Outgoing) -> bool:
        """Send a chunk if there is room for it; smaller messages may get room before it."""
        self._chunk = None
        if not self._advance(one, Lane.DATA):
            if not one.cursor.started:
                self._chunk = one
                return False
            self._data.append(one)
        return True

    def _has_sent_all(self) -> bool:
        return not (self._control or self._data or self._large.under_way or self._large.apart)

    def is_open(self) -> bool:
        """True while messages are accepted."""
        return not (self._ended or self._closing)

    def _resume(self) -> None:
        """Send waiting messages, CONTROL first, after room was freed."""
        for queue, lane in ((self._control, Lane.CONTROL), (self._data, Lane.DATA)):
            while queue:
                if not self._advance(queue[0], lane):
                    return
                queue.popleft()
        if self._large.under_way:
            self.transport.start_moving(self)
        self._say_bye_if_asked()

    # ---- ending ----

    def close(self) -> None:
        if self._closing or self._ended:
            return
        self._closing = True
        code = self.transport.library.lib.tm_link_leave(self._bus, self.handle)
        lib.check(code, "closing a link")
        self._say_bye_if_asked()

    def _say_bye(self) -> None:
        if self._bye_said:
            return
        code = self.transport.library.lib.tm_link_close(self._bus, self.handle)
        if code == lib.FULL:
            return  # tried again when there is room, or when the peer has come up
        if code not in (lib.OK, lib.ERR_DOWN):
            raise lib.error_of(code, "closing a link")
        self._bye_said = True
        self.transport.dirty = True

    def abort(self) -> None:
        if not self._ended:
            self.end()

    def end(self) -> None:
        """Free all native resources and drop waiting messages."""
        with contextlib.suppress(trio.ClosedResourceError):  # in a forked child
            self._last = self.statistics()
        self._ended = True
        self._assembly = None
        self._arrivals = Arrivals(self.transport.kept)
        self.transport.forget(self, self.handle)
        self.view = memoryview(b"")
        for one, _ in self._large.take_all():
            one.finish()
        if self._chunk is not None:
            self._chunk.finish()
        for queue in (self._control, self._data):
            while queue:
                queue.popleft().finish()

    def hand_over(self, heir: Link | None) -> bool:
        if self.up.is_set() or self._last.messages_sent:  # a stream takes messages before it is up
            return False
        if isinstance(heir, NativeLink):
            for one, lane, flow in self._unsent:
                heir.resend(one, lane, flow)
            self._unsent.clear()
        return not self._unsent

    def statistics(self) -> LinkStatistics:
        if self._ended:
            return self._last
        info = self.transport.info_of(self.handle)
        waiting = sum(one.waiting_bytes for queue in (self._control, self._data) for one in queue)
        waiting += self._large.waiting_bytes + (0 if self._chunk is None else self._chunk.waiting_bytes)
        return LinkStatistics(
            messages_sent=info.messages_sent + self._chunked_sent,
            messages_received=info.messages_received + self._chunked_received,
            bytes_sent=info.bytes_sent,
            bytes_received=info.bytes_received,
            queued_bytes=waiting,
            dropped_frames=info.frames_dropped,
        )

    # ---- receiving, called by the transport's task ----

    def take_message(self, handler: LinkHandler, record: tuple[int, ...]) -> None:
        """Deliver a message with bodies, or begin to assemble one."""
        _, _, n_bodies, flags, head_at, head_size, sizes_at, body_at, body_size = record
        view = self.view
        if n_bodies == 1 and not flags:  # the common case, which needs no `Assembly`
            body = one_body(view, sizes_at, view[body_at : body_at + body_size], self._take)
            head = view[head_at : head_at + head_size]
            handler.received(self, head, [body])
            head.release()
            return
        sizes, piece = view[sizes_at : sizes_at + 8 * n_bodies], view[body_at : body_at + body_size]
        assembly = Assembly(sizes, piece, self._take)
        assembly.is_chunk = bool(flags & _FLAG_CHUNK)
        if flags & _FLAG_MORE:
            assembly.head = bytes(view[head_at : head_at + head_size])
            self._assembly = assembly
            return
        head = view[head_at : head_at + head_size]
        self._hand_over(handler, head, assembly)
        head.release()

    def _hand_over(self, handler: LinkHandler, head: memoryview, assembly: Assembly) -> None:
        if not assembly.is_chunk:
            handler.received(self, head, assembly.finish())
            return
        number, piece = read_piece(head)
        if piece is Piece.OFFER:
            self._take_offer(handler, number, assembly.finish())
            return
        if piece in (Piece.TAKEN, Piece.REFUSED):
            self._take_answer(number, is_taken=piece is Piece.TAKEN)
            return
        arrival = self._arrivals.take(head, assembly.finish())
        if arrival is not None:
            self._chunked_received += 1
            handler.received(self, memoryview(arrival.head), arrival.bodies())

    def _take_offer(self, handler: LinkHandler, number: int, parts: list[memoryview]) -> None:
        """Receive a message whose bodies are on this host, or request that it be sent in chunks."""
        if self.local or len(parts) != 3:
            raise AssemblyError("an offer of bodies from the same host, or without table, head and location")
        table, head = read_table(parts[0]), read_head(parts[1])
        try:
            bodies = map_bodies(bytes(parts[2]), table)
        except HostMemoryError:
            self._say(number, Piece.REFUSED, [b""])
            return
        self._say(number, Piece.TAKEN, [b""])
        self._chunked_received += 1
        handler.received(self, memoryview(head), bodies)

    def _take_answer(self, number: int, *, is_taken: bool) -> None:
        """Handle the answer of the peer to an offer."""
        leaf = next((one for one in self._large.apart if one.number == number and one.is_offered), None)
        if leaf is None:
            raise AssemblyError(f"an answer to offer {number}, which was not made or has been answered")
        if not is_taken:
            self.send_chunks(leaf)
            return
        self._out(leaf)
        leaf.finish()
        if self._large.under_way:
            self.transport.start_moving(self)

    def _take(self, word: int) -> memoryview:
        """Return a body in shared memory."""
        return self.transport.lending.take(self.handle, word)

    def take_fragment(self, handler: LinkHandler, record: tuple[int, ...]) -> None:
        """Add a fragment; deliver the message if it was the last."""
        _, _, _, flags, _, _, _, body_at, body_size = record
        assembly = self._assembly
        if assembly is None:
            raise AssemblyError("a fragment of a message that has not begun")
        assembly.add(self.view[body_at : body_at + body_size])
        if not flags & _FLAG_MORE:
            self._assembly = None
            self._hand_over(handler, memoryview(assembly.head), assembly)

    def take_up(self) -> None:
        """Handle the peer's hello."""
        info = self.transport.info_of(self.handle)
        self.peer_epoch = ProcId(info.peer_epoch)
        self.peer_pid = info.peer_pid
        self.peer_host = info.peer_host
        self.up.set()
        self._resume()

    def take_space(self) -> None:
        """Resume sending: there is room again."""
        self.transport.dirty = True  # returned bodies may have waited for it, too
        self._resume()

    def take_down(self, handler: LinkHandler, reason: DownReason, detail: str) -> None:
        """Handle the end of the link."""
        if not self.up.is_set():
            for queue, lane in ((self._control, Lane.CONTROL), (self._data, Lane.DATA)):
                self._unsent += [(one, lane, ORDERED) for one in queue]
                queue.clear()
            self._unsent += [(one, Lane.DATA, flow) for one, flow in self._large.take_all()]
        self.end()
        handler.link_down(self, LinkDown(reason, detail))
        for one, _, _ in self._unsent:
            one.finish()
        self._unsent.clear()


# ---- groups of links -------------------------------------------------------------------------------------------------


class NativeGroup(LinkGroup):
    """A set of links of the native transport that get the same message by one call of the library."""

    def __init__(self, transport: NativeTransport, links: Sequence[NativeLink]) -> None:
        self._transport = transport
        self._links = list(dict.fromkeys(links))
        ffi = transport.library.ffi
        n = max(1, len(links))
        self._handles = ffi.new("uint32_t[]", n)
        self._statuses = ffi.new("int32_t[]", n)

    def cast(self, head: bytes, bodies: Sequence[Buffer] = (), *, flow: int = ORDERED) -> trio.Event | None:
        if len(head) > limits.HEAD_BYTES_MAX:
            raise LimitExceeded("HEAD_BYTES_MAX", len(head))
        ffi = self._transport.library.ffi
        spans = Bodies(self._transport.library, self._transport.bus, bodies)
        cast = self._begin_casts(bodies) if bodies else {}
        chunked: list[NativeLink] = []
        clear: list[NativeLink] = []
        behind: list[NativeLink] = []
        for link in self._links:
            if link in cast:
                continue
            if bodies and link.is_open() and goes_in_chunks(bodies, local=link.local, shared=True):
                chunked.append(link)
            elif link.is_clear(flow):
                clear.append(link)
            elif link.is_open():
                behind.append(link)
        rest = self._send(head, spans, clear)
        rest.extend((link, ffi.new("tm_cursor *")) for link in behind)
        spans.links = len(rest)
        if not rest:
            spans.left()
        if not (rest or chunked or cast):
            return None
        completion = Completion(len(rest) + len(chunked) + len(cast))
        for link, cursor in rest:
            link.resend(Outgoing(head, spans, cursor, completion), Lane.DATA, flow)
        for link in chunked:
            link.launch(ChunkedMessage(head, bodies, flow, completion))
        for link, body in cast.items():
            link.launch(CastLeaf(head, bodies, flow, completion, body))
        return completion.event

    def _begin_casts(self, bodies: Sequence[Buffer]) -> dict[NativeLink, CastBody]:
        """Begin a cast to the other hosts; return the links that take part, with the bodies at their hosts."""
        by_host: dict[HostCaster, list[NativeLink]] = {}
        for link in self._links:
            if link.caster is not None and link.is_open():
                by_host.setdefault(link.caster, []).append(link)
        if not by_host:
            return {}
        begun = begin_casts(bodies, {caster: len(links) for caster, links in by_host.items()})
        return {link: body for caster, body in begun.items() for link in by_host[caster]}

    def _send(self, head: bytes, spans: Bodies, clear: Sequence[NativeLink]) -> list[tuple[NativeLink, Any]]:
        """Send to links by one call; return those without room for all of it, each with a cursor on the rest."""
        ffi, lib = self._transport.library.ffi, self._transport.library.lib
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
            code = self._statuses[i]
            if code == status.OK:
                continue
            if code == status.FULL or link.is_unborn(code):
                cursor = ffi.new("tm_cursor *", cursors[i])
                rest.append((link, cursor))
            elif code != status.ERR_DOWN:
                raise status.error_of(code, "sending a message to a group")
        return rest

    def close(self) -> None:
        self._links.clear()
