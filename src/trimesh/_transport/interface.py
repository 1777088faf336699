"""Interface of transports: links that carry whole messages in order, one task that drains them, and movers of memory.

A *link* joins two processes. A *message* is a head (a small control struct, opaque here) and bodies (buffers of any
size). Two lanes: CONTROL overtakes DATA, each lane is first in, first out, except as `flow` allows. Sending never
blocks: messages that do not fit are queued in order; the floors above bound the queue by credits. Whatever a peer does,
a handler sees complete messages, then exactly one `link_down`.

Every transport passes `tests/conformance/test_transport.py`.

    MV-1 A waiting transfer ends by itself, or at once by a cancel; its memory is kept until nothing accesses it.
    MV-2 Memory that was revoked, or whose process has ended, gives no bytes from then on.
"""

from __future__ import annotations

import enum
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
import trio

from trimesh import limits
from trimesh._wire.memory import memory_at
from trimesh.errors import LimitExceeded

Buffer = bytes | bytearray | memoryview
"""A C-contiguous buffer of bytes that the caller lends until the message is sent."""


class Lane(enum.IntEnum):
    """Order of urgency on a link."""

    CONTROL = 0
    DATA = 1


class DownReason(enum.StrEnum):
    """Why a link ended."""

    CLOSED = "closed"
    """The peer, or this side, said goodbye."""
    EOF = "eof"
    """The peer's end vanished; usually its process ended."""
    EXITED = "exited"
    """The watched process ended."""
    LEASE = "lease"
    """The peer was silent for longer than its lease."""
    PROTOCOL = "protocol"
    """The peer sent bytes that break the protocol."""


class LinkDown(msgspec.Struct, frozen=True):
    """The end of a link.

    Attributes:
        reason: Reason code.
        detail: Readable text: for PROTOCOL, the offending message; else may be empty.
    """

    reason: DownReason
    detail: str = ""


class LinkStatistics(msgspec.Struct, frozen=True):
    """Counters of one link since it was opened.

    Attributes:
        messages_sent, messages_received: Whole messages.
        bytes_sent, bytes_received: Heads and bodies.
        queued_bytes: Waiting on this side because the peer is slow.
        dropped_frames: Frames of another epoch, and duplicates, dropped.
    """

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    queued_bytes: int
    dropped_frames: int


class LinkHandler(Protocol):
    """Receiver of link events. The transport's task calls it; it must not block and must not raise."""

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        """Handle one message.

        Args:
            link: The link that it arrived on.
            head: Borrowed: valid only until this function returns.
            bodies: Owned by the receiver: private, in the order sent, writable except bodies sent as a `bytes`,
                which may arrive as a view of one. Memory of a shared segment is returned when the last view of
                it is gone.
        """

    def link_down(self, link: Link, down: LinkDown) -> None:
        """Handle the end of a link; nothing arrives on it after this."""

    def link_stalled(self, link: Link, seconds: float) -> None:
        """Handle a stall: the peer's Trio loop has not run for `seconds`, by report of its transport; 0: it runs again.

        Called after `limits.STALL_SECONDS` and each time that the stall has doubled. The link is up.
        """


class Link(ABC):
    """One end of a connection to one peer."""

    @abstractmethod
    def send(
        self, head: bytes, bodies: Sequence[Buffer] = (), *, lane: Lane = Lane.DATA, flow: int = 0
    ) -> trio.Event | None:
        """Send a message; never blocks. On a link that is down it is dropped.

        Args:
            head: At most `limits.HEAD_BYTES_MAX` bytes.
            bodies: At most `limits.BODIES_MAX` buffers, lent until they have left. CONTROL carries none.
            lane: CONTROL overtakes messages that wait on DATA.
            flow: Order on DATA. Messages of one flow keep their order; those of flow 0 keep it with all others. A
                message of another flow may pass large ones of other flows, except 0, that are sent in chunks.

        Returns:
            None if every byte was copied out of the caller's buffers; else an event, set when that is done or when the
            link is down. The next `Transport.flush` wakes the peer.

        Raises:
            LimitExceeded: The head, or the number or size of the bodies, is above its limit; nothing was sent.
            ValueError: A CONTROL message has bodies.
        """

    @abstractmethod
    def close(self) -> None:
        """Send queued messages and a goodbye, then end. The handler gets `link_down(CLOSED)` afterwards."""

    @abstractmethod
    def abort(self) -> None:
        """End at once: drop queued messages. The handler gets no `link_down`."""

    def hand_over(self, heir: Link | None) -> bool:
        """Move unsent messages to another link to the same process; for use in `link_down` only.

        A peer that never sent its hello, perhaps for lack of a descriptor, has received nothing over this link.

        Args:
            heir: Another link of the same transport, or None without one.

        Returns:
            True if nothing is lost: the peer never came up, and `heir` takes the messages, or there are none.
        """
        del heir
        return False

    @abstractmethod
    def statistics(self) -> LinkStatistics: ...


class LinkGroup(ABC):
    """A fixed set of links of one transport that often receive the same message."""

    @abstractmethod
    def cast(self, head: bytes, bodies: Sequence[Buffer] = (), *, flow: int = 0) -> trio.Event | None:
        """Send one message on the DATA lane of every link that is up, in order with earlier messages of its `flow`.

        `flow` is as for `Link.send`. The bytes are copied once, if the transport can. Returns and
        raises as `Link.send` does.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop the group; its links stay open."""


class Transport(ABC):
    """All links of one process, and the task that serves them.

    Attributes:
        waits_left: Number of waits that `wait_here` may still do in this turn of Trio's loop; mostly 0.
        skips_left: Number of checkpoints for which `skip_turn` may still return True in this turn; mostly 0.
    """

    waits_left = 0
    skips_left = 0

    @abstractmethod
    def define_group(self, links: Sequence[Link]) -> LinkGroup:
        """Return a group of `links`, which must be links of this transport."""

    @abstractmethod
    def flush(self) -> None:
        """Wake the peers of everything sent since the last flush.

        `run` does it once each scheduler tick; call it only outside of Trio's loop.
        """

    @property
    @abstractmethod
    def mover(self) -> Mover:
        """Return the mover of this process, created on first use, closed with the transport.

        Raises:
            trio.ClosedResourceError: The transport is closed.
            OSError: The system refuses a resource.
        """

    @abstractmethod
    async def run(self, handler: LinkHandler) -> None:
        """Serve until cancelled: receive, deliver, wake senders. One task, started once."""

    def pump(self, handler: LinkHandler, seconds: float) -> None:
        """Deliver arrived messages; wait at most `seconds` for one. For functions that are not async.

        Blocks the thread, with the GIL released while it waits; signals are handled. Call it in the thread of `run`,
        not from a handler. No task runs meanwhile.

        Raises:
            RuntimeError: The peers are tasks of this thread, so the wait would never end.
        """
        raise RuntimeError(
            "a simulated process must wait by `await`, got a wait that blocks the thread, in which its peers run"
        )

    def wait_here(self) -> bool:
        """Wait for messages in the running task, if they are expected soon and no other task can run meanwhile.

        Blocks the thread, with the GIL released, for at most `limits.WAIT_HERE_SECONDS`. Arrived messages are
        delivered, which may make other tasks runnable.

        Returns:
            Whether any message was delivered. If not, the task has to wait by Trio's loop.
        """
        return False

    def skip_turn(self) -> bool:
        """Return whether the running task passes a checkpoint now without a turn of Trio's loop, and count it.

        It does while no other task can run, for a bounded time. Call it only where `skips_left` is not 0. Peers of
        everything sent so far are woken.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """End all links at once and release every resource. Idempotent; called after `run` has ended."""


def checked_size(head: bytes, bodies: Sequence[Buffer]) -> int:
    """Return the size of a message in bytes.

    Raises:
        LimitExceeded: The head, or the number or size of the bodies, is above its limit.
    """
    if len(head) > limits.HEAD_BYTES_MAX:
        raise LimitExceeded("HEAD_BYTES_MAX", len(head))
    if len(bodies) > limits.BODIES_MAX:
        raise LimitExceeded("BODIES_MAX", len(bodies))
    size = sum(memoryview(body).nbytes for body in bodies)
    if size > limits.MESSAGE_BYTES_MAX:
        raise LimitExceeded("MESSAGE_BYTES_MAX", size)
    return len(head) + size


# ---- mover -----------------------------------------------------------------------------------------------------------

# Mover: grants on memory of this process, and attachments to other processes.
#
# A *grant* lets processes that know its secret access one piece of memory. A *home* is the address of a process for
# transfers; an *attachment* is one process's open view of another's home. A *carrier* is a mechanism that moves bytes.
# The owner's process executes no code for a transfer. See docs/design/memory.md.


class Carrier(enum.Flag):
    """Mechanisms that move bytes, as the native library numbers them."""

    NONE = 0
    LOCAL = 1
    SHM = 2
    CMA = 4
    TCP = 8
    UCX = 16


BEST_FIRST: Final = (Carrier.LOCAL, Carrier.SHM, Carrier.CMA, Carrier.UCX, Carrier.TCP)


class MemoryKind(enum.IntEnum):
    """Kind of memory, as the native library numbers it."""

    HOST = 0
    CUDA = 1
    """Memory of a CUDA device: only RDMA adapters move it."""


class Right(enum.Flag):
    """Accesses that a grant allows."""

    READ = 1
    WRITE = 2


class TransferKind(enum.IntEnum):
    """Kind of transfer, as seen by its initiator."""

    READ = 1
    WRITE = 2
    ADD = 3
    """Add to 8 bytes; the old value is the result."""
    SWAP = 4
    """Compare and swap of 8 bytes; the old value is the result."""


class End(enum.Enum):
    """Cause of a failed transfer."""

    GONE = "its process has ended"
    REVOKED = "it was revoked"
    DENIED = "wrong secret, no such right, or out of its range"
    UNREACHABLE = "no carrier connects the two processes"
    SILENT = "its process does not answer"
    LOST = "the connection to its process was lost or refused"
    """It is not visible from another host whether the process has ended."""
    CANCELLED = "it was abandoned, or its attachment was closed"
    DEVICE = "it is about device memory, and no adapter moves that"


class TransferError(Exception):
    """A transfer has failed; the contents of its destination are undefined.

    Attributes:
        end: Cause.
    """

    def __init__(self, end: End) -> None:
        super().__init__(end.value)
        self.end = end


class ProcessAddress(msgspec.Struct, frozen=True):
    """Address of a process for transfers.

    Attributes:
        epoch: Its incarnation.
        host: Identity of its host.
        started: Its start time, in ticks since boot.
        pid: Its process id on that host.
        ledger: Descriptor number, in that process, of the table of its grants.
        port, address: Listening address; 0 and empty if it does not listen.
    """

    epoch: int
    host: int
    started: int = 0
    pid: int = 0
    ledger: int = 0
    port: int = 0
    address: bytes = b""


class Grant(msgspec.Struct, frozen=True):
    """The name of one piece of memory, and the secret that permits access.

    Attributes:
        place, generation: The name.
        secret: 16 bytes.
        exported: Registration that readers with an RDMA adapter also need; empty if the process has no adapter.
    """

    place: int
    generation: int
    secret: bytes
    exported: bytes = b""

    def __repr__(self) -> str:
        return f"Grant(place={self.place}, generation={self.generation})"  # logs must not show the secret


class Span(msgspec.Struct, frozen=True, eq=False):
    """Memory of this process.

    Attributes:
        address: Address of its first byte.
        keep: Object that keeps the memory allocated.
    """

    address: int
    nbytes: int
    keep: object = None
    kind: MemoryKind = MemoryKind.HOST

    def __repr__(self) -> str:
        return f"Span(address={self.address}, nbytes={self.nbytes})"  # the repr of `keep` may show all the memory


class Transfer(msgspec.Struct, frozen=True, eq=False):
    """One transfer to be made.

    Attributes:
        grant: The remote memory.
        offset: Offset of its first byte within the grant.
        local: The local memory; for `TransferKind.ADD` and `TransferKind.SWAP` 8 bytes that are not read.
        operand, expected: Operands of ADD and SWAP.
    """

    kind: TransferKind
    grant: Grant
    offset: int
    local: Span
    operand: int = 0
    expected: int = 0


class TransferDone(msgspec.Struct, frozen=True):
    """Result of a successful transfer.

    Attributes:
        value: The old value, for `TransferKind.ADD` and `TransferKind.SWAP`.
    """

    carrier: Carrier = Carrier.NONE
    value: int = 0


class UnderWay:
    """A transfer that has begun and not ended.

    Attributes:
        transfer: The transfer; keeps the local memory allocated.
        ended: Set when nothing accesses the memory any more.
        done: Its result, once it has ended.
        error: Cause of its failure; None if it succeeded.
    """

    __slots__ = ("done", "ended", "error", "transfer")

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.ended = trio.Event()
        self.done = TransferDone()
        self.error: Exception | None = None

    def end(self, result: TransferDone | Exception) -> None:
        """Record its result or error."""
        if isinstance(result, TransferDone):
            self.done = result
        else:
            self.error = result
        self.ended.set()


class Attachment(ABC):
    """An open view of another process's home, or of this one's own."""

    @property
    @abstractmethod
    def carriers(self) -> Carrier:
        """Return the carriers that work between both processes."""

    @property
    @abstractmethod
    def is_gone(self) -> bool:
        """True if the process has ended."""

    @property
    @abstractmethod
    def why_not(self) -> str:
        """Why other carriers do not work, as text for error messages."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """True while transfers are under way."""

    def name_of(self, carrier: Carrier) -> str:
        """Return the readable name of one of its carriers."""
        return str(carrier.name).lower()

    @abstractmethod
    def begin(self, transfer: Transfer) -> TransferDone | UnderWay | None:
        """Begin a transfer; small ones are done at once. Return None if too many are in flight here.

        Raises:
            TransferError, OSError: It has failed.
        """

    @abstractmethod
    def give_up(self, under_way: UnderWay) -> None:
        """Request that a transfer end soon."""

    @abstractmethod
    async def wait_for_room(self) -> None:
        """Wait until a transfer of this process has ended."""

    @abstractmethod
    def view(self, grant: Grant, offset: int, nbytes: int, *, writable: bool, is_shared: bool = False) -> memoryview:
        """Return a zero-copy view of granted memory of a block; the grant is in use until its last view is gone.

        Args:
            grant: The remote memory.
            offset: Start of the view within it.
            writable: Whether the view may be written to.
            is_shared: Use the mapping of transfers, which outlives the view, so that the next view has no page faults.
                The mapping itself is writable: code that uses raw addresses can write to it.

        Raises:
            TransferError, OSError: The memory cannot be mapped.
        """

    @abstractmethod
    def keep(self, grant: Grant, nbytes: int) -> memoryview:
        """Return granted memory of a block, from its beginning, readable even after its process has ended.

        This does not keep the grant in use: the contents change if its process revokes it and reuses the memory.

        Raises:
            TransferError, OSError, LimitExceeded: The memory cannot be mapped.
        """

    @abstractmethod
    def close(self) -> None:
        """End the attachment and its transfers; views stay valid."""

    async def move(self, transfer: Transfer) -> TransferDone:
        """Make a transfer.

        A cancel ends the wait at once. The transfer may still write to local memory until it ends, and keeps it.

        Raises:
            TransferError, OSError: It has failed.

        Blocking: a checkpoint, cancellable.
        """
        await trio.lowlevel.checkpoint()
        while (begun := self.begin(transfer)) is None:
            await self.wait_for_room()
        if isinstance(begun, TransferDone):
            return begun
        try:
            await begun.ended.wait()
        except BaseException:
            self.give_up(begun)
            raise
        if begun.error is not None:
            raise begun.error
        return begun.done


class Mover(ABC):
    """The grants and attachments of one process, and the task that waits for large transfers."""

    @property
    @abstractmethod
    def home(self) -> ProcessAddress:
        """Return the address of this process."""

    @abstractmethod
    def grant(self, span: Span, rights: Right, *, block: int = 0) -> Grant:
        """Grant others access to memory of this process, which is kept until the grant is dropped.

        Args:
            span: The memory. Device memory is accessed through the `exported` of the grant, or not at all.
            rights: Allowed accesses.
            block: Number of the block that contains it, 0 for any other memory.

        Raises:
            LimitExceeded: There are too many grants.
        """

    @property
    @abstractmethod
    def has_adapters(self) -> bool:
        """True if this process has usable RDMA adapters."""

    @property
    @abstractmethod
    def why_no_device(self) -> str:
        """Why they move no device memory, or failed when last tried; "" if they do, or may."""

    @abstractmethod
    def revoke(self, grant: Grant) -> bool:
        """Refuse new accesses; return whether an access is still open. Idempotent."""

    @abstractmethod
    def drop(self, grant: Grant) -> None:
        """Remove a revoked grant. If an access is still open, its place and memory are never used again."""

    @abstractmethod
    def take_block(self, nbytes: int) -> memoryview:
        """Allocate memory that others can map, or reuse returned memory, whose contents are undefined.

        It is returned when its last view is gone.

        Raises:
            LimitExceeded: `limits.BLOCKS_MAX` blocks are in use, or it is too large.
        """

    @abstractmethod
    def block_of(self, span: Span) -> int:
        """Return the number of the block that contains memory of this process, or 0."""

    @abstractmethod
    def attach(self, home: ProcessAddress) -> Attachment:
        """Attach to a process, living or dead.

        Raises:
            LimitExceeded: `limits.ATTACHMENTS_MAX` attachments are open.
        """

    @abstractmethod
    async def run(self) -> None:
        """Serve transfers until cancelled. One task, started once."""

    @abstractmethod
    def close(self) -> None:
        """End all grants, attachments and transfers. Idempotent; called after `run` has ended."""


class _Hold:
    """Placeholder for lent memory; it is collected with the last view."""

    __slots__ = ("__weakref__", "keep")

    def __init__(self, keep: object) -> None:
        self.keep = keep


def lent_memory(address: int, nbytes: int, on_gone: Callable[[], object], keep: object = None) -> memoryview:
    """Return a writable view of memory; `on_gone` is called when it and all views derived from it are gone.

    That call may happen in any thread, in the middle of any other code.
    """
    hold = _Hold(keep)
    weakref.finalize(hold, on_gone).atexit = False
    return memory_at(address, nbytes, hold)
