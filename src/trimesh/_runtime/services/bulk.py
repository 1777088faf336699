"""Granted memory: grants of this process, and transfers on memory that other processes granted.

    granted --revoke--> revoked --no access is open, or limits.REVOKE_SECONDS--> dropped

BK-1 An actor's grants are revoked when it has ended, the others when their process ends; nothing else revokes.
BK-2 A transfer from an ended process reports that process's death, as a call to it does. A process that counts as
     gone here is not accessed, even if it lives.
BK-3 Memory is kept until its grant is dropped; if an access is still open then, until the process ends.
BK-4 Kept memory is read by ordinary transfers while its owner lives, and through its mapping once the owner has ended.

KP-1 Kept memory is mapped without a claim: its owner may revoke and reuse it at any time. So memory is kept only if
it is known by other means to be unchanged, as a pinned version of a publication is.
KP-2 Kept memory is only read, and only once its owner has ended. The kernel frees it with the last mapping, however
the processes that map it end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors.cell import find_cell
from trimesh._runtime.peers.deaths import ProcDeath
from trimesh._transport.interface import (
    BEST_FIRST,
    Attachment,
    Carrier,
    End,
    Grant,
    MemoryKind,
    Mover,
    ProcessAddress,
    Right,
    Span,
    Transfer,
    TransferDone,
    TransferError,
    TransferKind,
    UnderWay,
)
from trimesh._wire.memory import memory_at
from trimesh.errors import (
    LimitExceeded,
    LinkLost,
    MeshStopped,
    Origin,
    ProcDied,
    TrimeshInternalError,
    Unresponsive,
    place_name,
    set_origin,
)
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer
    from trimesh._wire.observed import PublicationRow


_POLL_SECONDS_MAX: Final = 0.05


class NotByAdapter(LinkLost):
    """No adapter moves this device memory; the transfer may still go through host memory."""


class Granted(msgspec.Struct, frozen=True, eq=False):
    """Granted memory of some process, as the processes that may access it describe it.

    Attributes:
        block: Number of its block in that process; 0 for none.
        device: Grant on device memory, if `grant` covers a description of such memory and an adapter there reaches it.
        why_no_device: Why no adapter reaches it.
    """

    home: ProcessAddress
    grant: Grant
    block: int
    origin: Origin
    device: Grant | None = None
    why_no_device: str = ""

    @property
    def on_device(self) -> Granted:
        """The device memory itself, as readers with an adapter reach it.

        Raises:
            ValueError: There is no device memory.
        """
        if self.device is None:
            raise ValueError("on_device needs memory that is granted to adapters, got none that is")
        return Granted(self.home, self.device, 0, self.origin)


class Registration:
    """A piece of memory of this process that others may access.

    Attributes:
        block: Number of its block; 0 for none.
        rights: Rights that others may be granted at most.
        device: Device memory that it describes; None for other memory.
        why_no_device: Why adapters do not reach the device memory.
        cell: Actor that created it; None outside of actors.
        origin: The same actor, as text for errors.
        grants: Grants on it and on the device memory, by their rights.
        is_revoked: Whether new accesses are refused.
        is_over: Set when it is dropped.
    """

    __slots__ = (
        *("block", "bulk", "cell", "device", "grants", "is_over", "is_revoked", "origin", "rights", "span"),
        "why_no_device",
    )

    def __init__(
        self, bulk: Bulk, span: Span, block: int, rights: Right, cell: Cell | None, origin: Origin, device: Span | None
    ) -> None:
        self.bulk = bulk
        self.span = span
        self.block = block
        self.rights = rights
        self.cell = cell
        self.origin = origin
        self.grants: dict[tuple[Right, MemoryKind], Grant] = {}
        self.device = device
        self.why_no_device = ""
        self.is_revoked = False
        self.is_over = trio.Event()

    def granted(self, rights: Right) -> Granted:
        """Return the grant that others need to access it with some of its rights.

        Raises:
            trio.ClosedResourceError: It is revoked.
            LimitExceeded: `limits.GRANTS_MAX` grants exist.
        """
        if self.is_revoked:
            raise trio.ClosedResourceError("this buffer is revoked")
        grant = self._grant(self.span, rights)
        device = None if self.device is None or self.why_no_device else self._grant_device(self.device, rights)
        return Granted(self.bulk.mover.home, grant, self.block, self.origin, device, self.why_no_device)

    def _grant(self, span: Span, rights: Right) -> Grant:
        key = rights, span.kind
        if key not in self.grants:
            block = self.block if span is self.span else 0
            self.grants[key] = self.bulk.mover.grant(span, rights, block=block)
        return self.grants[key]

    def _grant_device(self, device: Span, rights: Right) -> Grant | None:
        made, mover = self._grant(device, rights), self.bulk.mover
        if made.exported:
            return made
        self.why_no_device = mover.why_no_device or "no adapter has registered it"
        del self.grants[rights, device.kind]
        mover.revoke(made)
        mover.drop(made)
        return None

    def revoke(self) -> None:
        """Refuse new accesses; wait in the background for running ones. Idempotent."""
        if self.is_revoked:
            return
        self.is_revoked = True
        if self.cell is not None:
            self.cell.on_end.pop(self.revoke, None)
        self.bulk.retire(self)


class Bulk:
    """The grants of one process, and its attachments to others.

    Attributes:
        kept: Memory of other processes that outlives them here.
        publications: Returns the publications that use these grants, for snapshots; also called in other threads.
    """

    def __init__(self, proc: Proc) -> None:
        self.proc = proc
        self.publications: list[Callable[[], Iterable[PublicationRow]]] = []
        self._thread: int = threading.get_ident()
        self._is_served = False
        self._host: int | None = None
        self._attachments: dict[ProcessAddress, Attachment] = {}
        self._registrations: dict[Registration, None] = {}
        from trimesh._runtime.services.linked_moves import LinkedMoves  # noqa: PLC0415 - loaded with the first block

        self.kept: Final = KeptMemory()
        self._linked = LinkedMoves(proc, self._begin_within)
        proc.on_gone.append(self._gone)

    @property
    def mover(self) -> Mover:
        """The mover of this process; the first access starts serving it.

        Raises:
            RuntimeError: The caller runs in another thread than the Trio loop.
            trio.ClosedResourceError: This process is ending.
        """
        self._check_thread()
        mover = self.proc.transport.mover
        if not self._is_served:
            self._is_served = True
            self.proc.serve(mover.run)
        return mover

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "buffers must be made and used in the thread of the Trio loop, got another thread: "
                "write trio.from_thread.run_sync(trimesh.RDMABuffer, data)"
            )

    @property
    def host(self) -> int:
        """Identity of this host, as stored in handles."""
        if self._host is None:
            self._host = self.mover.home.host
        return self._host

    # ---- granting --------------------------------------------------------------------------------------------

    def register(self, span: Span, rights: Right, device: Span | None = None) -> Registration:
        """Let others access memory of this process until the calling actor, or this process, has ended.

        Args:
            rights: Rights that they get.
            device: Device memory that it describes; adapters of this process, if any, reach it.

        Raises:
            LimitExceeded: `limits.GRANTS_MAX` grants exist.
        """
        cell = find_cell()
        if cell is not None and cell.proc.proc_id != self.proc.proc_id:
            cell = None
        if cell is not None and cell.ended.is_set():
            raise trio.ClosedResourceError(f"a buffer ends with the actor that makes it: {cell.spec.name} has ended")
        origin = Origin(None, "", host=self.proc.host_name, pid=self.proc.pid) if cell is None else cell.origin(None)
        made = Registration(self, span, self.mover.block_of(span), rights, cell, origin, device)
        made.granted(rights)
        self._registrations[made] = None
        if cell is not None:
            cell.on_end[made.revoke] = None
        return made

    def registrations(self) -> list[Registration]:
        """Return granted memory, including revoked grants that are not yet dropped."""
        return list(self._registrations)

    def retire(self, registration: Registration) -> None:
        """Revoke the grants of a registration; drop them when no access is open or the time limit is reached."""
        try:
            is_in_use = self._revoke(registration)
        except trio.ClosedResourceError:  # already ended with its process
            registration.grants.clear()
            is_in_use = False
        if not (is_in_use and self.proc.serve(self._wait_and_drop, registration)):
            self._drop(registration)

    def _revoke(self, registration: Registration) -> bool:
        mover = self.proc.transport.mover
        in_use = [mover.revoke(grant) for grant in registration.grants.values()]
        return any(in_use)

    @trio.lowlevel.enable_ki_protection
    async def _wait_and_drop(self, registration: Registration) -> None:
        pause = limits.REVOKE_POLL_SECONDS
        deadline = trio.current_time() + limits.REVOKE_SECONDS
        try:
            while self._revoke(registration) and trio.current_time() < deadline:
                await trio.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS_MAX)
        finally:
            self._drop(registration)

    def _drop(self, registration: Registration) -> None:
        for grant in registration.grants.values():
            self.proc.transport.mover.drop(grant)
        registration.grants.clear()
        registration.span, registration.device = Span(0, 0), None
        del self._registrations[registration]
        registration.is_over.set()

    # ---- blocks ----------------------------------------------------------------------------------------------

    def take_block(self, nbytes: int) -> memoryview:
        """Return memory that others can map.

        Raises:
            LimitExceeded: `limits.BLOCKS_MAX` blocks are in use, or it is too large.
            OSError: The system refuses the memory.
        """
        return self.mover.take_block(nbytes)

    # ---- access ----------------------------------------------------------------------------------------------

    def backend(self, granted: Granted) -> str:
        """Return the name of the carrier between this process and the memory, or "none"."""
        if self.proc.death_of(ProcId(granted.home.epoch)) is not None:
            return "none"
        attachment = self._attachment(granted.home)
        carrier = _best(attachment, granted)
        if carrier is not Carrier.NONE:
            return attachment.name_of(carrier)
        return "link" if self.is_elsewhere(granted) else "none"

    def why_no_adapter(self, granted: Granted) -> str:
        """Return why no adapter moves this device memory to or from this host's memory; "" if one does."""
        if granted.device is None:
            return f"at its owner: {granted.why_no_device or 'no adapter has registered it'}"
        if Carrier.UCX in self._attachment(granted.home).carriers:
            return ""
        return f"here: {self.mover.why_no_device or 'ucx is not used'}"

    def adapter(self, granted: Granted) -> str:
        """Return the name of the adapters that move this device memory to or from here, or "none"."""
        if self.proc.death_of(ProcId(granted.home.epoch)) is not None or self.why_no_adapter(granted):
            return "none"
        return self._attachment(granted.home).name_of(Carrier.UCX)

    def goes_by_adapter(self, granted: Granted) -> bool:
        """Return whether an adapter is the best carrier for this memory."""
        return _best(self._attachment(granted.home), granted) is Carrier.UCX

    def is_elsewhere(self, granted: Granted) -> bool:
        """Return whether the memory is on another host, which messages always reach."""
        return granted.home.host != (self._host or self.host)

    async def move(self, granted: Granted, transfer: Transfer) -> TransferDone:
        """Make a transfer.

        Raises:
            ProcDied, MeshStopped: The process has ended, before or meanwhile.
            trio.ClosedResourceError: It was revoked, before or meanwhile, or this process is ending.
            PermissionError: The process has no such grant.
            LinkLost: No carrier connects the two processes.
            Unresponsive: The process lives but does not reply.
            OSError: A system call failed.
            LimitExceeded: Too many processes are attached at the same time.

        Blocking: a checkpoint, cancellable.
        """
        if self.proc.sites is not None and (before := self.proc.sites.moving(self.proc.proc_id)) is not None:
            await before()
        try:
            attachment = await self._enter(granted)
            try:
                if self.is_elsewhere(granted) and _best(attachment, granted) is Carrier.NONE:
                    return await self._move_by_link(granted, transfer)
                return await attachment.move(transfer)
            except TransferError as error:
                await self._raise(granted, attachment, error.end)
        except (ProcDied, MeshStopped):
            done = await self.kept.move(granted, transfer)  # BK-4
            if done is None:
                raise
            return done

    async def _move_by_link(self, granted: Granted, transfer: Transfer) -> TransferDone:
        family, owner = self.proc.family, self.proc.peer(ProcId(granted.home.epoch))
        assert family is not None, "a process that reaches others has a family"
        await trio.lowlevel.checkpoint()
        await family.connect([owner])
        return await self._linked.move(owner, transfer)

    def _begin_within(self, transfer: Transfer) -> TransferDone | UnderWay | None:
        """Begin a transfer on memory of this process for another process; see `Attachment.begin`."""
        try:
            return self._attachment(self.mover.home).begin(transfer)
        except TrimeshInternalError:  # an address that no handle of ours contains
            raise TransferError(End.DENIED) from None

    async def view(
        self, granted: Granted, offset: int, nbytes: int, *, writable: bool, is_shared: bool = False
    ) -> memoryview:
        """Return a zero-copy view of granted memory, see `Attachment.view`; raises as `move` does."""
        try:
            attachment = await self._enter(granted)
            await trio.lowlevel.checkpoint()
            try:
                return attachment.view(granted.grant, offset, nbytes, writable=writable, is_shared=is_shared)
            except TransferError as error:
                await self._raise(granted, attachment, error.end)
        except (ProcDied, MeshStopped):
            kept = self.kept.find(granted)
            if kept is None or writable or offset + nbytes > kept.nbytes:
                raise
            return kept[offset : offset + nbytes]  # BK-4

    def keep(self, granted: Granted, nbytes: int) -> memoryview | None:
        """Map granted memory so that it stays readable after its process ends; see `Attachment.keep`.

        Returns:
            None if it cannot be mapped: another host's, this process's own, not a block, or too much is mapped.
        """
        if self.is_elsewhere(granted) or granted.home.epoch == self.proc.proc_id or not granted.block:
            return None
        try:
            return self._attachment(granted.home).keep(granted.grant, nbytes)
        except (TransferError, LimitExceeded, OSError):
            return None

    async def _enter(self, granted: Granted) -> Attachment:
        death = self.proc.death_of(ProcId(granted.home.epoch))
        if death is not None:
            await trio.lowlevel.checkpoint()  # a task inside the block that the death cancelled leaves by that cancel
            raise _located(death(maybe_executed=False), granted)
        return self._attachment(granted.home)

    def _attachment(self, home: ProcessAddress) -> Attachment:
        self._check_thread()
        found = self._attachments.get(home)
        if found is None:
            if len(self._attachments) >= limits.ATTACHMENTS_MAX:
                self._leave_one()
            found = self._attachments[home] = self.mover.attach(home)
        return found

    def _leave_one(self) -> None:
        """End the oldest attachment that is not in use."""
        for home, attachment in self._attachments.items():
            if not attachment.is_busy:
                del self._attachments[home]
                attachment.close()
                return
        raise LimitExceeded("ATTACHMENTS_MAX", limits.ATTACHMENTS_MAX + 1)

    def _gone(self, peer: Peer) -> None:
        for home in [home for home in self._attachments if home.epoch == peer.proc_id]:
            self._attachments.pop(home).close()

    async def _raise(self, granted: Granted, attachment: Attachment, end: End) -> NoReturn:
        """Raise the error for the end status of a transfer."""
        death = await self._death(ProcId(granted.home.epoch), end)
        # A death is reported to the owning block first; tasks inside the block leave by its cancel (X3).
        await trio.lowlevel.checkpoint()
        if death is not None:
            raise _located(death(maybe_executed=True), granted) from None
        if end is End.CANCELLED:
            raise trio.ClosedResourceError("this process is ending: its transfers end with it") from None
        if end is End.REVOKED:
            raise trio.ClosedResourceError(
                f"the buffer of {describe(granted)} was revoked, by its aclose() or because its actor has ended"
            ) from None
        if end is End.DENIED:
            raise PermissionError(
                f"{describe(granted)} has no such buffer: the secret, rights or range of this handle are wrong"
            ) from None
        if end is End.DEVICE:
            why = self.mover.why_no_device or "no adapter carries it"
            text = f"memory of a device cannot be moved between here and {describe(granted)}: {why}"
            raise _located(NotByAdapter(text), granted) from None
        if end is End.SILENT:
            text = f"a transfer was not answered: {describe(granted)}, or a process in an atomic operation there, hangs"
            raise _located(Unresponsive(text), granted) from None
        if end is End.LOST:
            raise _located(LinkLost(f"the connection to {describe(granted)} was lost"), granted) from None
        why = attachment.why_not or "no carrier is allowed"
        text = f"the memory of {describe(granted)} cannot be reached from here: {why}"
        raise _located(LinkLost(text), granted) from None

    async def _death(self, proc_id: ProcId, end: End) -> ProcDeath | None:
        """Return the owner's death, if the end status of a transfer shows or suggests one."""
        family = self.proc.family
        assert family is not None, "a process that reaches others has a family"
        if end is End.GONE:
            return await family.learn_end(self.proc.peer(proc_id))
        if end in (End.LOST, End.SILENT):
            return await family.learn_loss(self.proc.peer(proc_id))
        return self.proc.death_of(proc_id) if end is End.CANCELLED else None


def _best(attachment: Attachment, granted: Granted) -> Carrier:
    """Return the best carrier for some memory; NONE if there is none."""
    needs = {Carrier.SHM: granted.block, Carrier.UCX: granted.grant.exported}
    carriers = attachment.carriers  # a call of the native library
    usable = (one for one in BEST_FIRST if one in carriers and needs.get(one, True))
    return next(usable, Carrier.NONE)


def describe(granted: Granted) -> str:
    """Describe the owner of the memory."""
    origin = granted.origin
    where = f"{place_name(origin.mesh, origin.point)}, " if origin.point is not None else ""
    return f"{where}pid {origin.pid} on {origin.host}"


def _located(error: Exception, granted: Granted) -> Exception:
    set_origin(error, granted.origin)
    return error


# ---- kept memory: mapped from other processes, and read after they have ended ----------------------------------------


class KeptMemory:
    """Memory of other processes that this process keeps mapped after they end."""

    def __init__(self) -> None:
        self._views: dict[tuple[int, int, int, bytes], list[memoryview]] = {}

    @contextmanager
    def holding(self, granted: Granted, view: memoryview) -> Generator[None]:
        """Make some memory available to transfers for the duration of a block."""
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
        """Make a transfer from memory whose owner has ended; return None if it is not kept.

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
