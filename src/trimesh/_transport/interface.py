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

import attrs
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


@attrs.frozen
class LinkStatistics:
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
    """Receiver of link events. Called by the transport's task; must not block and must not raise."""

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        """Take one message.

        Args:
            link: Where it came from.
            head: Borrowed: valid only until this function returns.
            bodies: Owned by the receiver: private, in the order sent, writable except bodies sent as a `bytes`,
                which may arrive as a view of one. Memory of a shared segment is returned when the last view of
                it is gone.
        """

    def link_down(self, link: Link, down: LinkDown) -> None:
        """Learn that the link has ended; nothing comes from it after this."""

    def link_stalled(self, link: Link, seconds: float) -> None:
        """Handle a stall: the peer's Trio loop has not run for `seconds`, as its transport reports; 0: it runs again.

        Called after `limits.STALL_SECONDS` and whenever the time has doubled. The link is up.
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
            flow: Order on DATA: 0 keeps order with all others. Else the message may pass large ones of other flows
                (except 0) that are under way in chunks, and other flows may pass it while it is.

        Returns:
            None if every byte has been copied out of the caller's buffers; else an event, set when that is done
            (or when the link has gone down). The peer is woken by the next `Transport.flush`.

        Raises:
            LimitExceeded: The head, or the number or size of the bodies, is above its limit; nothing was sent.
            ValueError: A CONTROL message has bodies.
        """

    @abstractmethod
    def close(self) -> None:
        """Send queued messages and a goodbye, then end. The handler gets `link_down(CLOSED)` afterwards."""

    @abstractmethod
    def abort(self) -> None:
        """End now; queued messages are lost. The handler gets no `link_down`."""

    def hand_over(self, heir: Link | None) -> bool:
        """Move unsent messages to another link to the same process; for use in `link_down` only.

        A peer that has never said hello, perhaps for lack of a descriptor, has received nothing over this link.

        Args:
            heir: A link of the same transport, or None when there is no other.

        Returns:
            True if nothing is lost: the peer never came up, and its messages go by `heir`, or there are none.
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
        """Forget the group; its links stay."""


class Transport(ABC):
    """All links of one process, and the task that serves them.

    Attributes:
        waits_left: How many waits `wait_here` would do before this turn of Trio's loop is over; mostly none.
    """

    waits_left = 0

    @abstractmethod
    def define_group(self, links: Sequence[Link]) -> LinkGroup:
        """Make a group of `links`, which must be links of this transport."""

    @abstractmethod
    def flush(self) -> None:
        """Wake the peers of everything sent since the last flush.

        `run` arranges for it once a scheduler tick; call it only outside of Trio's loop.
        """

    @property
    @abstractmethod
    def mover(self) -> Mover:
        """Return the mover of this process, created on first use, closed with the transport.

        Raises:
            trio.ClosedResourceError: The transport is closed.
            OSError: The system refuses what it needs.
        """

    @abstractmethod
    async def run(self, handler: LinkHandler) -> None:
        """Serve until cancelled: receive, hand over, wake senders. One task, started once."""

    def pump(self, handler: LinkHandler, seconds: float) -> None:
        """Hand over arrived messages; wait at most `seconds` for one. For functions that are not async.

        Blocks the thread, with the GIL released while it waits; signals are served. Call it in the thread of `run`,
        not from a handler. No task runs meanwhile.

        Raises:
            RuntimeError: The peers are tasks of this very thread, so that waiting for them would never end.
        """
        raise RuntimeError("a simulated process cannot wait without `await`, since the others run in the same thread")

    def wait_here(self) -> bool:
        """Wait for messages in the running task, if they are expected soon and no other task can run meanwhile.

        Blocks the thread, with the GIL released, for at most `limits.WAIT_HERE_SECONDS`. What comes is handed over; it
        may let other tasks run.

        Returns:
            Whether anything was handed over. If not, the task has to wait by Trio's loop.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """End all links at once and give back every resource. Idempotent; called after `run` has ended."""


def checked_size(head: bytes, bodies: Sequence[Buffer]) -> int:
    """Return the bytes of a message.

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

# The mover that the runtime asks for: grants on memory of this process, and attachments to other processes.
#
# A *grant* is one piece of memory that others may reach who know its secret. A *home* says how a process is reached; an
# *attachment* is one process's open view of another's home. A *carrier* is a way in which bytes move. The owner runs
# nothing for a transfer. See docs/design/memory.md.


class Carrier(enum.Flag):
    """Ways in which bytes move, as the native library numbers them."""

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
    """Of a CUDA device: only adapters move it."""


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
    """Why a transfer has failed."""

    GONE = "its process has ended"
    REVOKED = "it was revoked"
    DENIED = "wrong secret, no such right, or out of its range"
    UNREACHABLE = "nothing carries bytes between the two processes"
    SILENT = "its process does not answer"
    LOST = "the connection to its process was lost, or refused"
    """From another host it is unseen whether the process has ended."""
    CANCELLED = "it was given up, or its attachment was ended"
    DEVICE = "it is about memory of a device, and goes by no adapter"


class TransferError(Exception):
    """A transfer has failed; what it was to write is undefined.

    Attributes:
        end: Why.
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
    """The name of one piece of memory, and the secret that opens it.

    Attributes:
        place, generation: The name.
        secret: 16 bytes.
        exported: What readers with an RDMA adapter need besides; empty if the process has none.
    """

    place: int
    generation: int
    secret: bytes
    exported: bytes = b""

    def __repr__(self) -> str:
        return f"Grant(place={self.place}, generation={self.generation})"  # what opens memory is not for logs


class Span(msgspec.Struct, frozen=True, eq=False):
    """Memory of this process.

    Attributes:
        address: Of its first byte.
        keep: What keeps it there.
    """

    address: int
    nbytes: int
    keep: object = None
    kind: MemoryKind = MemoryKind.HOST

    def __repr__(self) -> str:
        return f"Span(address={self.address}, nbytes={self.nbytes})"  # what keeps it may be all the memory itself


class Transfer(msgspec.Struct, frozen=True, eq=False):
    """One transfer to be made.

    Attributes:
        grant: The memory over there.
        offset: Offset of its first byte within the grant.
        local: The memory here; for `TransferKind.ADD` and `TransferKind.SWAP` 8 bytes that are not read.
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
        transfer: What it is; keeps the memory.
        ended: Set when nothing touches the memory any more.
        done: How it has ended then.
        error: Or why it has failed.
    """

    __slots__ = ("done", "ended", "error", "transfer")

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.ended = trio.Event()
        self.done = TransferDone()
        self.error: Exception | None = None

    def end(self, result: TransferDone | Exception) -> None:
        """Note how it has ended."""
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
        """Why other carriers do not work, for people."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """True while transfers are under way."""

    def name_of(self, carrier: Carrier) -> str:
        """Return the readable name of a carrier of it."""
        return str(carrier.name).lower()

    @abstractmethod
    def begin(self, transfer: Transfer) -> TransferDone | UnderWay | None:
        """Begin a transfer; small ones are done at once. None: too many are under way here.

        Raises:
            TransferError, OSError: It has failed.
        """

    @abstractmethod
    def give_up(self, under_way: UnderWay) -> None:
        """Have a transfer end soon."""

    @abstractmethod
    async def wait_for_room(self) -> None:
        """Wait until a transfer of this process has ended."""

    @abstractmethod
    def view(self, grant: Grant, offset: int, nbytes: int, *, writable: bool, is_shared: bool = False) -> memoryview:
        """Return a zero-copy view of granted memory of a block; the grant is in use until its last view is gone.

        Args:
            grant: The memory over there.
            offset: Start of the view within it.
            writable: Whether it may be written.
            is_shared: Use the mapping of transfers, which outlives the view: the next view has no page faults. Code
                that uses raw addresses can write to it even so.

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
        """End the attachment, and its transfers; views stay."""

    async def move(self, transfer: Transfer) -> TransferDone:
        """Make a transfer.

        A cancel ends the wait at once; the memory here may be written for a moment longer, and is kept that long.

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
    """The grants and attachments of one process, and the task that waits for transfers which take longer."""

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
        """Why they move no memory of devices, or did not when that was last tried; "" when they do, or may."""

    @abstractmethod
    def revoke(self, grant: Grant) -> bool:
        """Let nothing new begin; return whether an access is still open. To be called as often as one likes."""

    @abstractmethod
    def drop(self, grant: Grant) -> None:
        """Forget a grant that was revoked. If an access is still open, place and memory are never used again."""

    @abstractmethod
    def take_block(self, nbytes: int) -> memoryview:
        """Allocate memory that others can map, or reuse returned memory, whose contents are undefined.

        It is returned when its last view is gone.

        Raises:
            LimitExceeded: There are too many.
        """

    @abstractmethod
    def block_of(self, span: Span) -> int:
        """Return the number of the block that memory of this process lies in, or 0."""

    @abstractmethod
    def attach(self, home: ProcessAddress) -> Attachment:
        """Attach to a process, living or dead.

        Raises:
            LimitExceeded: There are too many.
        """

    @abstractmethod
    async def run(self) -> None:
        """Serve transfers until cancelled. One task, started once."""

    @abstractmethod
    def close(self) -> None:
        """End everything. Idempotent; called after `run` has ended."""


class _Hold:
    """Stands for memory that is lent; it goes with the last view."""

    __slots__ = ("__weakref__", "keep")

    def __init__(self, keep: object) -> None:
        self.keep = keep


def lent_memory(address: int, nbytes: int, on_gone: Callable[[], object], keep: object = None) -> memoryview:
    """Return a writable view of memory; `on_gone` is called when it and all that was made of it are gone.

    That may be in any thread, and in the middle of any other code.
    """
    hold = _Hold(keep)
    weakref.finalize(hold, on_gone).atexit = False
    return memory_at(address, nbytes, hold)
