"""Groups of links of the native transport, which are sent the same message by one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import trio

from trimesh import limits
from trimesh._native import status
from trimesh._transport.interface.base import Buffer, Lane, LinkGroup
from trimesh._transport.messages.cast_tree import begin_casts
from trimesh._transport.messages.casting import CastBody, CastLeaf, HostCaster
from trimesh._transport.messages.chunked import ChunkedMessage, goes_in_chunks
from trimesh._transport.messages.outgoing import Bodies, Completion, Outgoing
from trimesh._transport.messages.precedence import ORDERED
from trimesh.errors import LimitExceeded

if TYPE_CHECKING:
    from trimesh._transport.native.link import NativeLink
    from trimesh._transport.native.transport import NativeTransport


class NativeGroup(LinkGroup):
    """A set of links that are sent the same message by one call."""

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
        """Begin a cast to the other hosts; return which links take part."""
        by_host: dict[HostCaster, list[NativeLink]] = {}
        for link in self._links:
            if link.caster is not None and link.is_open():
                by_host.setdefault(link.caster, []).append(link)
        if not by_host:
            return {}
        begun = begin_casts(bodies, {caster: len(links) for caster, links in by_host.items()})
        return {link: body for caster, body in begun.items() for link in by_host[caster]}

    def _send(self, head: bytes, spans: Bodies, clear: Sequence[NativeLink]) -> list[tuple[NativeLink, Any]]:
        """Send to links by one call; return those that have no room for all of it, with how far they are."""
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
