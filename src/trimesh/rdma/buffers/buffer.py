"""`RDMABuffer`: memory of one process that other processes read and write without its Python."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimesh._runtime.life import current_proc, find_proc_anywhere, proc_for
from trimesh._runtime.services import Granted, Registration
from trimesh._runtime.tasks import in_trio, in_trio_block, in_trio_now
from trimesh._transport.interface import Right, Span, Transfer, TransferDone, TransferKind
from trimesh._wire.memory import memory_at
from trimesh.errors import Origin, place_name
from trimesh.plain_numbers import plain_whole
from trimesh.rdma.memory import device_transfer
from trimesh.rdma.memory.device import find_device, queued_before, share
from trimesh.rdma.memory.handle import Handle, handle_of
from trimesh.rdma.memory.local import Memory, memory_of

if TYPE_CHECKING:
    from typing import Self


_WORD: Final = 1 << 64
_BOTH: Final = Right.READ | Right.WRITE


class RDMABuffer:
    """Memory of this process that other processes can read and write, and the handle that they use.

    Sent to other processes, it arrives as a handle on the same memory: nothing is copied until a process reads or
    writes. The owner's Python takes no part in that. The memory is kept and stays accessible until `aclose`, or until
    the actor or process that made the buffer has ended. Dropping the object revokes nothing, as other processes may
    hold handles. Reads and writes of several processes are ordered only by messages between them, and large ones are
    not atomic: a read during a write may return bytes from before and after it.

    Args:
        data: A contiguous torch tensor, numpy array, memoryview or bytearray, of at least one byte. `data` is kept. A
            tensor on a CUDA device is accessible to processes of this host that see the device, and to others if the
            RDMA adapters at both sides reach device memory.
        writable: Whether others may write; then `data` must be writable.

    Raises:
        TypeError: `data` is something else.
        ValueError: `data` is not contiguous, is empty, is read-only although `writable` is set, or is CUDA memory that
            cannot be shared between processes.
        RuntimeError: No mesh is open here.
        LimitExceeded: This process has `limits.GRANTS_MAX` buffers.

    Example:
        self.buffer = trimesh.RDMABuffer(self.weights)      # in the trainer; an endpoint returns it
        await buffer.read_into(local)                       # in a generator, as often as it likes
    """

    __slots__ = ("_handle", "_registration")

    _handle: Handle
    _registration: Registration | None

    def __init__(self, data: Any, *, writable: bool = True) -> None:
        memory = memory_of(data, "the memory of a buffer")
        if writable and not memory.is_writable:
            raise ValueError(
                f"a writable buffer needs writable memory, got {memory.text}, which is read-only: "
                "write RDMABuffer(data, writable=False)"
            )
        rights = _BOTH if writable else Right.READ
        self._registration, granted = in_trio_now(_register)(memory, rights)
        self._handle = Handle(granted, memory.span.address, 0, memory.nbytes, rights, memory.space)

    # ---- properties ------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._handle.nbytes

    @property
    def is_writable(self) -> bool:
        """True if this handle permits writes."""
        return self._handle.is_writable

    @property
    def owner(self) -> Origin:
        """Origin of the buffer: point, mesh and actor, host and pid; there is no point outside of actors."""
        return self._handle.granted.origin

    @property
    def backend(self) -> str:
        """Name of the carrier between this process and the buffer; "none" if there is none.

        "local", "shm", "cma", "tcp" or "cuda_ipc"; by an RDMA adapter "ibverbs", "efa" or, of other kinds, "ucx". For a
        CUDA device that this process does not see, the name of the adapter, if those at both sides reach devices.

        Raises:
            RuntimeError: No mesh is open here.
        """
        return in_trio_now(_backend)(self._handle)

    @property
    def handle(self) -> Handle:
        """The serializable handle."""
        return self._handle

    # ---- parts -----------------------------------------------------------------------------------------------

    def __getitem__(self, part: slice) -> RDMABuffer:
        """Return a handle on a range of bytes, `buffer[start:stop]`; both count bytes, whatever the element type.

        Raises:
            TypeError: `part` is not a slice of whole numbers.
            ValueError: It has a step, or is empty.
            IndexError: It exceeds the buffer.
        """
        start, stop = _bounds(part, self.nbytes)
        return buffer_by(self._handle.part(start, stop))

    def readonly(self) -> RDMABuffer:
        """Return a read-only handle.

        Made from the buffer itself, in the process that made it, the handle contains no write permission. Made from
        another handle, it still contains it, and only refuses to write.
        """
        if not self.is_writable:
            return buffer_by(self._handle)
        return in_trio_now(self._readonly)()

    def _readonly(self) -> RDMABuffer:
        whole = self._handle
        granted = whole.granted if self._registration is None else self._registration.granted(Right.READ)
        return buffer_by(Handle(granted, whole.address, whole.offset, whole.nbytes, Right.READ, whole.space))

    # ---- transfers -------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def read_into(self, destination: Any) -> None:
        """Copy the whole buffer into memory of this process.

        Args:
            destination: As `data` of a buffer: writable, of exactly `nbytes` bytes. On a CUDA device, work already
                queued on the current stream runs first.

        Raises:
            TypeError, ValueError: `destination` is not such memory; nothing was moved.
            ProcDied, MeshStopped: The owner's process has ended, before or during the read. After this and each error
                below, the contents of `destination` are undefined.
            trio.ClosedResourceError: The buffer was revoked, before or during the read.
            PermissionError: The owner has no such buffer.
            LinkLost: No carrier works between the two processes; the message gives the reason.
            Unresponsive: The owner's process lives but does not answer (over the network only).

        Blocking: a checkpoint, cancellable. A cancel ends the wait at once; `destination` is undefined then, and may be
        written for a moment longer. With device memory at either end, a cancel waits for the pieces that are being
        copied: milliseconds.
        """
        await in_trio(self._read_into)(destination)

    async def _read_into(self, destination: Any) -> None:
        await self.move(TransferKind.READ, self.check_read(destination))

    @trio.lowlevel.enable_ki_protection
    async def write_from(self, source: Any) -> None:
        """Overwrite the whole buffer with memory of this process.

        Args:
            source: As `data` of a buffer, of exactly `nbytes` bytes. It must not change meanwhile. On a CUDA device,
                work already queued on the current stream runs first.

        Raises:
            PermissionError: This handle is read-only, or the owner has no such buffer.
            TypeError, ValueError, ProcDied, MeshStopped, trio.ClosedResourceError, LinkLost, Unresponsive: As
                `read_into`, but the contents of the buffer are undefined, not those of `source`.

        Blocking: a checkpoint, cancellable, as `read_into`; part of it may have been written.
        """
        await in_trio(self._write_from)(source)

    async def _write_from(self, source: Any) -> None:
        await self.move(TransferKind.WRITE, self.check_write(source))

    @trio.lowlevel.enable_ki_protection
    async def fetch_add(self, value: int, offset: int = 0) -> int:
        """Add to the unsigned 64-bit number at `offset`, wrapping, and return the previous value.

        Atomic operations on one buffer, from any process and any handle, are atomic with respect to each other, but
        not to reads, writes, or direct access by the owner.

        Args:
            value: From -2**63 to 2**64 - 1.
            offset: In bytes; the number must be aligned to 8 bytes, in the owner's memory and in the buffer it made.

        Raises:
            TypeError, ValueError: An argument is invalid; nothing was changed.
            PermissionError, ProcDied, MeshStopped, trio.ClosedResourceError, LinkLost, Unresponsive: As `write_from`.

        Blocking: a checkpoint, cancellable; after a cancel the operation may have been done.
        """
        return await in_trio(self._fetch_add)(value, offset)

    async def _fetch_add(self, value: int, offset: int) -> int:
        return await self._change(TransferKind.ADD, offset, _word("value", value, -(1 << 63)))

    @trio.lowlevel.enable_ki_protection
    async def compare_and_swap(self, expected: int, new: int, offset: int = 0) -> int:
        """Set the unsigned 64-bit number at `offset` to `new` if it equals `expected`; return the previous value.

        Raises and blocks as `fetch_add`.
        """
        return await in_trio(self._compare_and_swap)(expected, new, offset)

    async def _compare_and_swap(self, expected: int, new: int, offset: int) -> int:
        return await self._change(TransferKind.SWAP, offset, _word("new", new), _word("expected", expected))

    async def _change(self, kind: TransferKind, offset: int, operand: int, expected: int = 0) -> int:
        offset = plain_whole(offset)
        if not isinstance(offset, int):
            raise TypeError(f"offset must be a number of bytes, got {offset!r}")
        if self._handle.is_on_device:
            raise ValueError("atomic operations need host memory, got a buffer on a CUDA device")
        if not 0 <= offset <= self.nbytes - 8:
            raise ValueError(f"the 8 bytes at offset must lie within the buffer of {self.nbytes} bytes, got {offset}")
        if (self._handle.address + offset) % 8 or (self._handle.offset + offset) % 8:
            raise ValueError(
                "the 8 bytes at offset must be aligned to 8 bytes, both in the owner's memory and from the start of "
                f"its buffer, got {offset}"
            )
        self._check_writable()
        grant, where = self._handle.granted.grant, self._handle.offset + offset
        done = await self._transfer(Transfer(kind, grant, where, Span(0, 8), operand, expected))
        return done.value

    def map(self, *, writable: bool = False) -> AbstractAsyncContextManager[memoryview]:
        """Map the memory as a zero-copy view: `async with handle.map() as view:`.

        Only for memory from `trimesh.rdma.allocate`, in processes of the same host. The view is released when the block
        is left: later use of it raises. Arrays and slices made from it keep the memory alive, and in use for the owner,
        until they are gone. After the owner has died or revoked the buffer, the memory stays for them, and is not
        reused.

        Args:
            writable: Whether the view can be written to; then the handle must be writable.

        Raises:
            ValueError: The memory is not from `allocate`; copy it with `read_into`.
            PermissionError, ProcDied, MeshStopped, trio.ClosedResourceError, LinkLost: As `write_from`.
        """
        if writable:
            self._check_writable()
        return in_trio_block(mapped(self._handle, writable=writable))

    def own_memory(self) -> memoryview | None:
        """Return the memory itself, in the object that made the buffer.

        None for a handle, when revoked, and for memory of a device.
        """
        made = self._registration
        if made is None or made.is_revoked or self._handle.is_on_device:
            return None
        return memory_at(made.span.address, made.span.nbytes, made.span.keep)

    def check_read(self, destination: Any) -> Memory:
        """Return the memory of a destination of this buffer, or raise what `read_into` would."""
        return destination_of(destination, self.nbytes)

    def check_write(self, source: Any) -> Memory:
        """Return the memory of a source for this buffer, or raise what `write_from` would."""
        self._check_writable()
        return _fitting(memory_of(source, "the source of a write"), self.nbytes, "source")

    def _check_writable(self) -> None:
        if not self.is_writable:
            raise PermissionError("this handle is read-only, got a write: ask the owner for a writable one")

    async def move(self, kind: TransferKind, memory: Memory) -> None:
        """Transfer the whole buffer from or to the memory that `check_read` or `check_write` returned."""
        handle = self._handle
        if handle.is_on_device or memory.tensor is not None:
            await self._check_open()
            await device_transfer.move(current_proc().bulk, handle, kind, memory)
        else:
            await self._transfer(Transfer(kind, handle.granted.grant, handle.offset, memory.span))

    async def _transfer(self, transfer: Transfer) -> TransferDone:
        await self._check_open()
        return await current_proc().bulk.move(self._handle.granted, transfer)

    async def _check_open(self) -> None:
        if self._registration is not None and self._registration.is_revoked:
            await trio.lowlevel.checkpoint()
            raise trio.ClosedResourceError("this buffer was revoked, by aclose() or because its actor has ended")

    # ---- the end ---------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def aclose(self) -> None:
        """Revoke the buffer and all its handles; wait for running transfers, at most `limits.REVOKE_SECONDS`.

        From then on reads and writes, and interrupted transfers, raise `trio.ClosedResourceError`. If an access is
        still open then, the memory is kept until this process ends. Idempotent.

        Raises:
            RuntimeError: This is a handle, or a part: only the object that `RDMABuffer(data)` made can revoke.

        Blocking: a checkpoint, cancellable; the buffer is revoked even after a cancel.
        """
        await in_trio(self._aclose)()

    async def _aclose(self) -> None:
        if self._registration is None:
            raise RuntimeError(
                "only the object that RDMABuffer(data) made can revoke a buffer, got a handle on it: "
                "call aclose() in the owner, or just drop the handle"
            )
        self._registration.revoke()
        await trio.lowlevel.checkpoint()
        await self._registration.is_over.wait()

    async def __aenter__(self) -> Self:
        """Close it when the block is left."""
        if self._registration is None:
            raise RuntimeError(
                "`async with` needs the object that RDMABuffer(data) made, got a handle: use it as it is"
            )
        await in_trio(trio.lowlevel.checkpoint)()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        await self.aclose()

    # ---- serialization ---------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, self._handle.fields()

    def __repr__(self) -> str:
        origin = self.owner
        rights = "" if self.is_writable else "read-only "
        where = f"{place_name(origin.mesh, origin.point)} " if origin.point is not None else ""
        proc = find_proc_anywhere()
        is_here = proc is not None and proc.proc_id == self._handle.granted.home.epoch
        is_revoked = self._registration is not None and self._registration.is_revoked
        state = "revoked " if is_revoked else ""
        return (
            f"<{state}{rights}buffer of {self.nbytes} bytes of {where}pid {origin.pid}{' (here)' if is_here else ''}>"
        )


def rebuild(*fields: Any) -> RDMABuffer:
    """Return a handle on the buffer that `fields` name.

    Raises:
        ProtocolError: They name none.
    """
    return buffer_by(handle_of(*fields))


def buffer_by(handle: Handle) -> RDMABuffer:
    made = RDMABuffer.__new__(RDMABuffer)
    made._handle, made._registration = handle, None  # noqa: SLF001 - its own class
    return made


def destination_of(data: Any, nbytes: int) -> Memory:
    """Return memory that so many bytes are read into, or raise what `RDMABuffer.read_into` would."""
    memory = memory_of(data, "the destination of a read")
    if not memory.is_writable:
        raise ValueError(f"the destination of a read must be writable, got {memory.text}, which is read-only")
    return _fitting(memory, nbytes, "destination")


def _fitting(memory: Memory, nbytes: int, what: str) -> Memory:
    if memory.nbytes != nbytes:
        raise ValueError(
            f"the {what} of a transfer must have the size of the buffer, {nbytes} bytes, got {memory.text} "
            f"({memory.nbytes} bytes): slice either to fit, buffer[start:stop] counts bytes"
        )
    return memory if memory.tensor is None else attrs.evolve(memory, is_idle=queued_before(memory.tensor.device))


def _register(memory: Memory, rights: Right) -> tuple[Registration, Granted]:
    bulk = proc_for("an RDMABuffer is made").bulk
    if memory.tensor is None:
        made = bulk.register(memory.span, rights)
        return made, made.granted(rights)
    return device_transfer.register(bulk, share(memory.tensor, memory.span, memory.text), memory.span, rights)


def _backend(handle: Handle) -> str:
    bulk = proc_for("the backend of an RDMABuffer is known").bulk
    found = bulk.backend(handle.granted)
    if not handle.is_on_device or found == "local":
        return found
    if found == "shm" and find_device(handle.space)[0] is not None:
        return "cuda_ipc"
    return bulk.adapter(handle.granted)


def _word(name: str, value: int, low: int = 0) -> int:
    """Return a number as an unsigned one of 64 bits."""
    value = plain_whole(value)
    if not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if not low <= value < _WORD:
        raise ValueError(f"{name} must fit into 64 bits, got {value}")
    return value % _WORD


def _bounds(part: Any, nbytes: int) -> tuple[int, int]:
    """Return start and stop of a slice of a buffer."""
    if type(part) is not slice:
        raise TypeError(f"a buffer can be sliced, buffer[start:stop], but not indexed, got {part!r}")
    given: tuple[Any, Any, Any] = (part.start, part.stop, part.step)
    if given[2] not in (None, 1):
        raise ValueError(f"a slice of a buffer must be in one piece, got step {given[2]!r}")
    start, stop = (_bound(end, default, nbytes) for end, default in zip(given, (0, nbytes), strict=False))
    if start >= stop:
        raise ValueError(f"a part must have at least one byte, got {given[0]}:{given[1]} of {nbytes} bytes")
    return start, stop


def _bound(end: Any, default: int, nbytes: int) -> int:
    if end is None:
        return default
    if not hasattr(end, "__index__"):
        raise TypeError(f"start and stop of a part must be numbers of bytes, got {end!r}")
    found = int(end.__index__())
    if not -nbytes <= found <= nbytes:
        raise IndexError(f"a part must lie within the buffer of {nbytes} bytes, got {found}")
    return found + nbytes if found < 0 else found


# ---- mapping: zero-copy views of remote memory, valid inside a block -------------------------------------------------


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def mapped(handle: Handle, *, writable: bool, is_shared: bool = False) -> AsyncGenerator[memoryview, None]:
    """Map the memory of a handle for a block; see `RDMABuffer.map`, and `Attachment.view` for `is_shared`."""
    if not handle.granted.block or handle.is_on_device:
        raise ValueError(
            "only memory from trimesh.rdma.allocate can be mapped, got a buffer over other memory: "
            "copy it with read_into, or let the owner allocate it so"
        )
    bulk = current_proc().bulk
    view = await bulk.view(handle.granted, handle.offset, handle.nbytes, writable=writable, is_shared=is_shared)
    try:
        yield view
    finally:
        with suppress(BufferError):  # an array over the view is alive, and keeps the memory
            view.release()
        del view
    await trio.lowlevel.checkpoint()
