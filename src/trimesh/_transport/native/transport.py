"""Transport over libtrimesh: shared-memory rings on one host, stream sockets between hosts.

The Trio thread sends and receives inline through the library; a thread of the library watches lifelines, processes
and leases, and moves the bytes of stream links. The Trio loop wakes for one descriptor, the bell; one call takes the
messages of all links before any task runs. Bells of peers are rung once per scheduler tick, after all its sends.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final

import trio

from trimesh import limits
from trimesh._native import lib as status
from trimesh._native.lib import Library, load
from trimesh._transport.interface import DownReason, Link, LinkHandler, Transport
from trimesh._transport.messages.incoming import AssemblyError, KeptBytes, Lending
from trimesh._transport.native.link import NativeGroup, NativeLink
from trimesh._transport.native.loop_waits import AroundWait, Poller, chosen_spin_seconds, poller_of_run
from trimesh._transport.native.mover import NativeMover
from trimesh.config import Settings, current
from trimesh.ids import ProcId

__all__ = ["NativeGroup", "NativeLink", "NativeTransport"]

_RECORDS_MAX: Final = 512
"""Records of one batch, 16 KiB; other tasks run between two batches."""

_WAIT_HERE_US: Final = round(limits.WAIT_HERE_SECONDS * 1e6)

_RECORD: Final = struct.Struct("<IHHIIIIII")
_MESSAGE, _FRAGMENT, _UP, _SPACE, _DOWN, _STALLED = 1, 2, 3, 4, 5, 6
_LINK_LOCAL: Final = 1
_LINK_STREAM: Final = 2

_REASONS: Final = {
    1: DownReason.CLOSED,
    2: DownReason.EOF,
    3: DownReason.EXITED,
    4: DownReason.LEASE,
    5: DownReason.PROTOCOL,
}


class NativeTransport(Transport):
    """All links of one process over one native bus.

    Args:
        epoch: This process incarnation.
        host: Identity of this host, sent to peers; 0 if unknown.
        links_max: Maximum number of open links.
        ring_bytes: Size of the ring of one direction of a link; a power of two.
        beat_seconds, lease_seconds: Interval of heartbeats, and the silence that ends a link with a lease.
        stall_seconds: Peers are notified when the Trio loop has not run for this long. None: never, which saves an idle
            loop one wake-up a beat.
        spin_seconds: Seconds that the loop may spin on its links before it sleeps; 0 never spins, None uses the
            settings.
        settings: Settings of this process; by default those in force.

    Attributes:
        dirty: Whether messages were sent since the last flush.
        look: Returns the number of records that arrived since the loop began to wait, or an error; for `hand_over`.
        spins: Number of times that the loop spun before it slept, by the result of `tm_before_wait`.
        kept: Memory for arriving large `bytes`.

    Raises:
        NativeLibraryError: The native library cannot be loaded.
        OSError: The system refused a descriptor, memory or a thread.
    """

    def __init__(
        self,
        epoch: ProcId,
        *,
        host: int = 0,
        links_max: int = limits.LINKS_MAX,
        ring_bytes: int = limits.RING_BYTES,
        beat_seconds: float = limits.BEAT_SECONDS,
        lease_seconds: float = limits.LEASE_SECONDS,
        stall_seconds: float | None = None,
        spin_seconds: float | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.library: Library = load()
        self.dirty = False
        self.settings: Final = settings or current()
        self.spin_seconds: Final = chosen_spin_seconds(self.settings) if spin_seconds is None else spin_seconds
        self.spins = [0, 0, 0, 0]
        ffi, lib = self.library.ffi, self.library.lib
        options = ffi.new("tm_bus_options *")
        options.epoch = epoch
        options.host = host
        options.links_max = links_max
        options.ring_bytes = ring_bytes
        options.beat_ms = _milliseconds(beat_seconds)
        options.lease_ms = _milliseconds(lease_seconds)
        options.stall_ms = 0 if stall_seconds is None else _milliseconds(stall_seconds)
        options.spin_us = round(self.spin_seconds * 1e6)
        out = ffi.new("tm_bus **")
        status.check(lib.tm_bus_create(options, out), "starting the native transport", limit="BUSES_MAX")
        self.bus: Any = out[0]
        self._bell = int(lib.tm_bus_bell(self.bus))
        self._links: dict[int, NativeLink] = {}
        self._records = ffi.new("tm_record[]", _RECORDS_MAX)
        assert ffi.sizeof("tm_record") == _RECORD.size, "the header and this file differ about records"
        self._records_view = memoryview(ffi.buffer(self._records))
        self._count = ffi.new("uint32_t *")
        self.look: Final[Callable[[], int]] = partial(lib.tm_after_wait, self.bus, self._records, _RECORDS_MAX)
        self._around_wait: AroundWait | None = None  # of `run`
        self.lending = Lending(self.library, self.bus)
        self.kept: Final = KeptBytes(self._begin_keeping, partial(_copy_past_caches, self.library))
        self._kept_until = math.inf
        self._epoch = epoch
        self._mover: NativeMover | None = None
        self._running = False
        self._work = trio.lowlevel.ParkingLot()  # where the task of `run` waits
        self._waits_for_bell = False  # True while it waits for the bell instead
        self._closed = False
        self._moving: deque[NativeLink] = deque()

    @property
    def mover(self) -> NativeMover:
        """The mover of this process; see `Transport.mover`.

        Raises:
            trio.ClosedResourceError: The transport is closed.
            OSError: The system refuses a resource.
        """
        self._check_open()
        if self._mover is None:
            self._mover = NativeMover(self._epoch, self.settings)
        return self._mover

    # ---- links ----

    def open_link(
        self,
        sock: socket.socket,
        *,
        local: bool,
        lease: bool,
        peer: ProcId | None = None,
        hello_seconds: float = limits.SPAWN_SECONDS,
        lease_seconds: float = 0,
    ) -> NativeLink:
        """Begin a link over a connected stream socket.

        Args:
            sock: Owned by the link from now on; on an error it stays the caller's. A unix socket for a local link.
            local: Whether the peer is on this host: then messages go through shared memory, and the socket only
                reports its end.
            lease: Whether the peer's silence for a lease ends the link.
            peer: Expected incarnation of the peer; another one is refused. None accepts any.
            hello_seconds: The link ends with LEASE if no hello of the peer arrives in this time; may be `math.inf`.
            lease_seconds: Lease of this link, also for the peer's goodbye; 0 for that of the transport.

        Raises:
            LimitExceeded: `links_max` links are open.
            OSError: The system refused memory or descriptors.
        """
        self._check_open()
        ffi, lib = self.library.ffi, self.library.lib
        options = ffi.new("tm_link_options *")
        options.peer_epoch = peer or 0
        options.fd = sock.fileno()
        options.kind = _LINK_LOCAL if local else _LINK_STREAM
        options.lease = int(lease)
        options.hello_ms = 0 if hello_seconds == math.inf else _milliseconds(hello_seconds)
        options.lease_ms = _milliseconds(lease_seconds) if lease_seconds else 0
        out = ffi.new("uint32_t *")
        status.check(lib.tm_link_open(self.bus, options, out), "opening a link")
        sock.detach()
        link = NativeLink(self, int(out[0]), local=local)
        self._links[link.handle] = link
        self.dirty = True
        return link

    def watch(self, link: NativeLink, pidfd: int) -> None:
        """End `link` with EXITED as soon as the process behind `pidfd` has ended. The descriptor is duplicated."""
        self._check_open()
        status.check(self.library.lib.tm_link_watch_pid(self.bus, link.handle, pidfd), "watching a process")

    def add_lifeline(self, pidfd: int) -> None:
        """Kill this process's group as soon as the process behind `pidfd` has ended, whatever Python is doing then.

        A process that leads no group ends only itself. The descriptor is duplicated.

        Raises:
            LimitExceeded: There are `LIFELINES_MAX` already.
        """
        self._check_open()
        status.check(self.library.lib.tm_lifeline_add(self.bus, pidfd), "adding a lifeline", limit="LIFELINES_MAX")

    def define_group(self, links: Sequence[Link]) -> NativeGroup:
        own = [link for link in links if isinstance(link, NativeLink) and link.transport is self]
        if len(own) != len(links):
            raise ValueError("a group must have links of its own transport only, got one of another")
        return NativeGroup(self, own)

    def view_of(self, handle: int) -> memoryview:
        """Return the memory of a link that offsets of records refer to."""
        info = self.info_of(handle)
        return memoryview(self.library.ffi.buffer(info.view, info.view_bytes)).toreadonly()

    def info_of(self, handle: int) -> Any:
        """Return the `tm_link_info` of a link."""
        info = self.library.ffi.new("tm_link_info *")
        status.check(self.library.lib.tm_link_get_info(self.bus, handle, info), "querying a link")
        return info

    def forget(self, link: NativeLink, handle: int) -> None:
        if self._links.pop(handle, None) is link and not self._closed:
            code = self.library.lib.tm_link_free(self.bus, handle)
            if code != status.ERR_FORKED:
                status.check(code, "freeing a link")

    # ---- serving ----

    def flush(self) -> None:
        self._check_open()
        self.dirty = False
        if self.lending.returned:
            self.lending.give_back()
        code = self.library.lib.tm_flush(self.bus)
        if code != status.OK:
            status.check(code, "waking peers")

    @trio.lowlevel.enable_ki_protection
    async def run(self, handler: LinkHandler) -> None:
        self._check_open()
        if self._running:
            raise RuntimeError("a transport must be run by one task, got a second run() while one is running")
        self._running = True
        poller = poller_of_run()
        around_wait = AroundWait(self, handler, poller)
        around_wait.begin()
        self._around_wait = around_wait
        try:
            with nullcontext() if poller is None else poller.waking_for(self._bell):
                while around_wait.failure is None:
                    self.hand_over(handler, self.look())
                    if self._moving and self._move():
                        await trio.lowlevel.checkpoint()
                    elif self.kept.is_empty:
                        await self._wait_for_work(poller)
                    else:
                        await self._wait_keeping(poller)
            raise around_wait.failure
        finally:
            around_wait.end()
            self._running = False
            self._around_wait = None
            self.kept.clear()

    @contextmanager
    def moving_run(self) -> Generator[None]:
        """Remove the hooks around waits of the running run while the body moves it to another loop."""
        around_wait = self._around_wait
        if around_wait is not None:
            around_wait.end()
        try:
            yield
        finally:
            if around_wait is not None:
                around_wait.begin()

    def wait_for(self, poller: int) -> int:
        """Wait briefly; return the number of arrived records, or an error; 0 if `poller` has another event."""
        return int(self.library.lib.tm_wait_here(self.bus, poller, _WAIT_HERE_US, self._records, _RECORDS_MAX))

    def wait_here(self) -> bool:
        return self._around_wait is not None and self._around_wait.wait_here()

    def skip_turn(self) -> bool:
        return self._around_wait is not None and self._around_wait.skip_turn()

    def wake(self) -> None:
        """Wake the task of `run` to check for work."""
        self._work.unpark_all()
        if self._waits_for_bell:
            os.eventfd_write(self._bell, 1)

    async def _wait_for_work(self, poller: Poller | None) -> None:
        """Wait for `wake`, or for the bell if the loop cannot wake for it."""
        if poller is None:
            await self._wait_for_bell()
        else:
            await self._work.park()

    async def _wait_keeping(self, poller: Poller | None) -> None:
        """Do the same; release memory kept for large messages after `limits.KEPT_BYTES_SECONDS` without one."""
        if self._kept_until == math.inf:
            self._kept_until = trio.current_time() + limits.KEPT_BYTES_SECONDS
        with trio.CancelScope(deadline=self._kept_until) as scope:
            await self._wait_for_work(poller)
        if scope.cancelled_caught:
            self.kept.expire()
            self._kept_until = math.inf

    def _begin_keeping(self) -> None:
        """Wake `run`, so that it waits no longer than until kept memory expires."""
        self._kept_until = math.inf
        self.wake()

    async def _wait_for_bell(self) -> None:
        """Wait for the bell in a task, in a loop that cannot wake for it otherwise."""
        self._waits_for_bell = True
        try:
            await trio.lowlevel.wait_readable(self._bell)
        finally:
            self._waits_for_bell = False
        with suppress(BlockingIOError):  # read meanwhile
            os.eventfd_read(self._bell)

    def pump(self, handler: LinkHandler, seconds: float) -> None:
        self._check_open()
        self.flush()
        if self._take_all(handler) or seconds <= 0:
            return
        waiting = select.poll()
        waiting.register(self._bell, select.POLLIN)
        waiting.poll(seconds * 1000)  # not protected: here Ctrl-C interrupts, between two batches and not within one
        self._take_all(handler)

    @trio.lowlevel.enable_ki_protection
    def _take_all(self, handler: LinkHandler) -> bool:
        """Deliver all messages present, then arm the bell, as `run` may sleep. Return whether there were any."""
        found = False
        while True:
            self._drain(handler)
            found = found or self._count[0] > 0
            if self._moving and self._move():
                self.flush()
                continue
            if not self.library.lib.tm_arm(self.bus):
                return found

    def start_moving(self, link: NativeLink) -> None:
        """Send chunks of a link's large messages, one each turn of the loop, while there are any and there is room."""
        if link not in self._moving:
            self._moving.append(link)
            self.wake()

    def _move(self) -> bool:
        """Send one chunk, of the next link in turn. Return whether another one might be sent at once."""
        while self._moving:
            link = self._moving.popleft()
            if link.move():
                self._moving.append(link)
                return True
        return False

    def _drain(self, handler: LinkHandler) -> None:
        """Deliver one batch, if there is one."""
        code = self.library.lib.tm_poll(self.bus, self._records, _RECORDS_MAX, self._count)
        self.hand_over(handler, self._count[0] if code == status.OK else code)

    def hand_over(self, handler: LinkHandler, n: int) -> None:
        """Deliver a batch of `n` records; a negative `n` is an error, which is raised."""
        if n < 0:
            raise status.error_of(n, "polling")
        if not n:
            return
        links = self._links
        received = handler.received
        try:
            for record in _RECORD.iter_unpack(self._records_view[: n * _RECORD.size]):
                link = links.get(record[0])
                if link is None:
                    continue  # a handler ended it in this batch
                if record[1] == _MESSAGE and not record[2]:
                    at = record[4]
                    head = link.view[at : at + record[5]]
                    received(link, head, [])
                    head.release()  # a handler that kept the borrowed memory fails at once
                else:
                    self._hand_over_rare(handler, link, record)
        finally:
            self.library.lib.tm_poll_done(self.bus)

    def _hand_over_rare(self, handler: LinkHandler, link: NativeLink, record: tuple[int, ...]) -> None:
        kind = record[1]
        try:
            if kind == _MESSAGE:
                link.take_message(handler, record)
            elif kind == _FRAGMENT:
                link.take_fragment(handler, record)
            elif kind == _UP:
                link.take_up()
            elif kind == _SPACE:
                link.take_space()
            elif kind == _STALLED:
                handler.link_stalled(link, record[3] / 1000)
            else:
                assert kind == _DOWN, f"the native library made a record of unknown kind {kind}"
                detail = self.library.ffi.string(self.info_of(link.handle).detail).decode()
                link.take_down(handler, _REASONS[record[3]], detail)
        except AssemblyError as error:
            link.take_down(handler, DownReason.PROTOCOL, f"the peer sent {error}")

    def close(self) -> None:
        if self._closed:
            return
        if self._running:
            raise RuntimeError("a transport must be closed after run() has ended, got one that is running")
        for link in list(self._links.values()):
            link.abort()
        self._closed = True
        if self._mover is not None:
            self._mover.close()
        code = self.library.lib.tm_bus_destroy(self.bus)
        self.bus = self.library.ffi.NULL
        self.lending.close()
        if code != status.ERR_FORKED:
            status.check(code, "stopping the native transport")

    def leave_to_exit(self) -> None:
        """Stop serving; the coming exit of the process closes links, frees memory and ends the thread.

        Until then the thread continues: it watches lifelines and sends heartbeats to peers.

        Raises:
            RuntimeError: `run` has not ended.
        """
        if self._closed:
            return
        if self._running:
            raise RuntimeError("a transport must be left after run() has ended, got one that is running")
        self.flush()
        self._closed = True
        if self._mover is not None:
            self._mover.close()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this transport is closed")


def _milliseconds(seconds: float) -> int:
    """Return whole milliseconds, at least one."""
    return max(1, round(seconds * 1000))


def _copy_past_caches(library: Library, into: memoryview, data: memoryview) -> None:
    """Copy into memory that is larger than the caches; releases the GIL."""
    ffi, size = library.ffi, data.nbytes
    code = library.lib.tm_copy_rows(
        ffi.from_buffer("uint8_t[]", into), size, ffi.from_buffer("uint8_t[]", data), size, size, 1, 1
    )
    status.check(code, "copying a large message")
