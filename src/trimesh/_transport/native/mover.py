"""Mover over libtrimesh.

Small transfers are done in the call. A thread of the library does larger ones: each is one event here, and one task
(`run`) waits for the thread's bell only while a transfer is in flight.

Lent memory (blocks, views) may be released anywhere: in another thread, inside the garbage collector. So its finalizer
only appends to a queue, which the thread of the Trio loop empties. Memory that outlives the mover is only unmapped.
"""

from __future__ import annotations

import enum
import errno
import importlib.util
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from trimesh import limits
from trimesh._native import lib
from trimesh._native import lib as status
from trimesh._native.lib import Library, load
from trimesh._transport.interface import (
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
    UnderWay,
    lent_memory,
)
from trimesh._transport.native.carriers import chosen_carriers, host_identity
from trimesh.config import Settings, current
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId

_RECORDS_MAX: Final = 64
"""Records of one poll; there are seldom more, and the bell stays rung while there are."""

_ENDS: Final = {
    status.ERR_GONE: End.GONE,
    status.ERR_REVOKED: End.REVOKED,
    status.ERR_DENIED: End.DENIED,
    status.ERR_UNREACHABLE: End.UNREACHABLE,
    status.ERR_SILENT: End.SILENT,
    status.ERR_PEER: End.LOST,
    status.ERR_CANCELLED: End.CANCELLED,
    status.ERR_DEVICE: End.DEVICE,
}


_LOST: Final = frozenset(
    {
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)
"""Errors of a connection; all other system errors are errors of this process."""


def _error_of(code: int, doing: str, limit: str = "TRANSFERS_MAX") -> Exception:
    end = End.LOST if status.ERR_ERRNO - code in _LOST else _ENDS.get(code)
    return TransferError(end) if end is not None else status.error_of(code, doing, limit=limit)


def _tell_library(settings: Settings) -> None:
    """Set or clear the environment variable by which the library finds UCX."""
    if settings.ucx != os.environ.get("TRIMESH_UCX", ""):
        os.environ["TRIMESH_UCX"] = settings.ucx
        if not settings.ucx:
            del os.environ["TRIMESH_UCX"]


class NativeMover(Mover):
    """Grants and attachments of one process.

    Args:
        epoch: This process incarnation.
        settings: Allowed carriers and host id; by default the settings in force.

    Raises:
        NativeLibraryError: The native library cannot be loaded.
        OSError: The system refused a descriptor or memory.
        ConfigError: A setting is wrong.
    """

    def __init__(self, epoch: ProcId, settings: Settings | None = None) -> None:
        self.library: Library = load()
        ffi, lib = self.library.ffi, self.library.lib
        settings = settings or current()
        chosen = chosen_carriers(settings)
        _tell_library(settings)
        options = ffi.new("tm_mover_options *")
        options.epoch, options.host = epoch, host_identity(settings.host_id)
        options.carriers = chosen.carriers.value
        options.address_size = len(chosen.address)
        ffi.memmove(options.address, chosen.address, len(chosen.address))
        wheel = wheel_library() if Carrier.UCX in chosen.carriers else None
        path = ffi.NULL if wheel is None else ffi.new("char[]", bytes(wheel))
        options.ucx = path
        out = ffi.new("tm_mover **")
        status.check(lib.tm_mover_create(options, out), "creating a mover", limit="BUSES_MAX")
        self.handle: Any = out[0]
        self.done: Any = ffi.new("tm_done *")
        self._bell = int(lib.tm_mover_bell(self.handle))
        self._records = ffi.new("tm_done[]", _RECORDS_MAX)
        self._count = ffi.new("uint32_t *")
        self._keep: dict[tuple[int, int], object] = {}
        self._blocks: dict[int, range] = {}
        self._under_way: dict[int, tuple[NativeAttachment, UnderWay]] = {}
        self._news = trio.Event()
        self._room = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._let_go: deque[Callable[[], object]] = deque()
        self._is_closed = False

    # ---- granting --------------------------------------------------------------------------------------------

    @property
    def home(self) -> ProcessAddress:
        out = self.library.ffi.new("tm_home *")
        status.check(self.library.lib.tm_mover_home(self.handle, out), "querying a mover")
        address = bytes(out.address)[: out.address_size]
        return ProcessAddress(out.epoch, out.host, out.started, out.pid, out.ledger, out.port, address)

    def grant(self, span: Span, rights: Right, *, block: int = 0) -> Grant:
        """Let others access memory of this process; see `Mover.grant`.

        Raises:
            LimitExceeded: `limits.GRANTS_MAX` grants exist.
            OSError: The system refused to register the memory with an adapter.
        """
        self.tidy()
        ffi = self.library.ffi
        out = ffi.new("tm_grant *")
        out.secret.bytes = _random_secret()
        start = ffi.cast("uint8_t *", span.address)
        code = self.library.lib.tm_grant_add(self.handle, start, span.nbytes, rights.value, block, span.kind, out)
        status.check(code, "granting memory", limit="GRANTS_MAX")
        made = Grant(int(out.place), int(out.generation), bytes(out.secret.bytes), self._export(out))
        self._keep[made.place, made.generation] = span.keep
        return made

    def _export(self, granted: Any) -> bytes:
        room = self.library.ffi.new("uint8_t[]", limits.EXPORT_BYTES_MAX)
        size = self.library.ffi.new("uint32_t *")
        code = self.library.lib.tm_grant_export(self.handle, granted, room, limits.EXPORT_BYTES_MAX, size)
        status.check(code, "registering memory with an RDMA adapter")
        return bytes(self.library.ffi.buffer(room, int(size[0])))

    def revoke(self, grant: Grant) -> bool:
        """Refuse new accesses; see `Mover.revoke`."""
        self.tidy()
        code = self.library.lib.tm_grant_revoke(self.handle, self.grant_of(grant))
        return status.check(code, "revoking a grant") == status.FULL

    def drop(self, grant: Grant) -> None:
        is_in_use = self.revoke(grant)
        status.check(self.library.lib.tm_grant_drop(self.handle, self.grant_of(grant)), "dropping a grant")
        if not is_in_use:
            del self._keep[grant.place, grant.generation]

    def grant_of(self, grant: Grant) -> Any:
        """Return a grant in the form of the library."""
        made = self.library.ffi.new("tm_grant *")
        made.place, made.generation = grant.place, grant.generation
        made.secret.bytes = grant.secret
        return made

    @property
    def adapters(self) -> Adapters:
        """Return the RDMA adapters of this process."""
        return adapters_of(self.library, self.handle)

    @property
    def has_adapters(self) -> bool:
        return self.adapters.are_usable

    @property
    def why_no_device(self) -> str:
        return self.adapters.why_no_device

    # ---- blocks ----------------------------------------------------------------------------------------------

    def take_block(self, nbytes: int) -> memoryview:
        """Allocate memory that others can map; see `Mover.take_block`.

        Raises:
            LimitExceeded: `limits.BLOCKS_MAX` blocks are in use, or it is larger than `limits.BLOCK_BYTES_MAX`.
            OSError: The system refused the memory.
        """
        self.tidy()
        if nbytes > limits.BLOCK_BYTES_MAX:
            raise LimitExceeded("BLOCK_BYTES_MAX", nbytes)
        out = self.library.ffi.new("tm_block *")
        code = self.library.lib.tm_block_take(self.handle, nbytes, out)
        status.check(code, "allocating a block", limit="BLOCKS_MAX")
        address, number = int(self.library.ffi.cast("uintptr_t", out.bytes)), int(out.number)
        self._blocks[number] = range(address, address + nbytes)
        return self.lend(Span(address, nbytes), partial(self._give_back, number), int(out.size))

    def _give_back(self, number: int) -> None:
        del self._blocks[number]
        status.check(self.library.lib.tm_block_give_back(self.handle, number), "returning a block")

    def block_of(self, span: Span) -> int:
        for number, block in self._blocks.items():
            if block.start <= span.address and span.address + span.nbytes <= block.stop:
                return number
        return 0

    def lend(self, span: Span, give_back: Callable[[], object], mapped: int) -> memoryview:
        """Return a view of memory that is returned soon after the last view of it is gone.

        Args:
            give_back: Returns the memory; called while the mover is open.
            mapped: Number of bytes to unmap once the mover is closed; 0 for memory that stays mapped.
        """
        return lent_memory(span.address, span.nbytes, partial(self._note, give_back, span.address, mapped))

    def _note(self, give_back: Callable[[], object], address: int, mapped: int) -> None:
        if self._is_closed:
            if mapped:
                self.library.lib.tm_unmap(self.library.ffi.cast("uint8_t *", address), mapped)
            return
        self._let_go.append(give_back)
        try:
            self._token.run_sync_soon(self.tidy, idempotent=True)
        except trio.RunFinishedError:  # no task is left that could use the memory
            return

    def tidy(self) -> None:
        """Return memory that is no longer viewed."""
        while self._let_go:
            self._let_go.popleft()()

    # ---- attachments -----------------------------------------------------------------------------------------

    def attach(self, home: ProcessAddress) -> NativeAttachment:
        """Attach to a process; see `Mover.attach`.

        Raises:
            LimitExceeded: `limits.ATTACHMENTS_MAX` attachments are open.
        """
        self.tidy()
        ffi = self.library.ffi
        there = ffi.new("tm_home *")
        there.epoch, there.host, there.started = home.epoch, home.host, home.started
        there.pid, there.ledger, there.port = home.pid, home.ledger, home.port
        there.address_size = len(home.address)
        ffi.memmove(there.address, home.address, len(home.address))
        out = ffi.new("uint32_t *")
        status.check(
            self.library.lib.tm_attachment_open(self.handle, there, out),
            "attaching to a process",
            limit="ATTACHMENTS_MAX",
        )
        return NativeAttachment(self, int(out[0]))

    def started(self, number: int, attachment: NativeAttachment, under_way: UnderWay) -> None:
        """Let `run` wait for the end of a transfer."""
        self._under_way[number] = attachment, under_way
        self._news.set()

    def number_of(self, under_way: UnderWay) -> int | None:
        """Return the number of a transfer that has not ended."""
        return next((number for number, (_, one) in self._under_way.items() if one is under_way), None)

    def is_under_way(self, attachment: NativeAttachment) -> bool:
        """Return whether a transfer of an attachment has not ended."""
        return any(its is attachment for its, _ in self._under_way.values())

    async def wait_for_room(self) -> None:
        """Wait until a transfer of this process has ended."""
        await self._room.wait()

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Process records of ended transfers until cancelled; see `Mover.run`."""
        while True:
            await self._news.wait()
            await trio.lowlevel.wait_readable(self._bell)
            self._take()
            if not self._under_way:
                self._news = trio.Event()

    def _take(self) -> None:
        records = self._records
        code = self.library.lib.tm_mover_poll(self.handle, records, _RECORDS_MAX, self._count)
        status.check(code, "polling for ended transfers")
        for index in range(int(self._count[0])):
            record = records[index]
            _, found = self._under_way.pop(int(record.id))
            found.end(result_of(record))
        self._room.set()
        self._room = trio.Event()

    def close(self) -> None:
        if self._is_closed:
            return
        self.tidy()
        self._is_closed = True
        code = self.library.lib.tm_mover_destroy(self.handle)
        self.handle = self.library.ffi.NULL
        if code != status.ERR_FORKED:
            status.check(code, "stopping the mover")
        ended, self._under_way = self._under_way, {}
        for _, one in ended.values():
            one.end(TransferError(End.CANCELLED))
        self._keep.clear()


class NativeAttachment(Attachment):
    """An open view of another process's home."""

    def __init__(self, mover: NativeMover, number: int) -> None:
        self.mover = mover
        self.number = number
        self._is_closed = False

    def _info(self) -> Any:
        out = self.mover.library.ffi.new("tm_attachment_info *")
        code = self.mover.library.lib.tm_attachment_get_info(self.mover.handle, self.number, out)
        status.check(code, "querying an attachment")
        return out

    @property
    def carriers(self) -> Carrier:
        return Carrier(int(self._info().carriers))

    @property
    def is_gone(self) -> bool:
        return bool(self._info().gone)

    @property
    def why_not(self) -> str:
        return "" if self._is_closed else str(self.mover.library.ffi.string(self._info().why_not).decode())

    def name_of(self, carrier: Carrier) -> str:
        """Return the readable name of one of its carriers; adapters by their driver."""
        return adapter_name(self.mover.adapters.about) if carrier is Carrier.UCX else super().name_of(carrier)

    @property
    def is_busy(self) -> bool:
        return self.mover.is_under_way(self)

    def begin(self, transfer: Transfer) -> TransferDone | UnderWay | None:
        """Begin a transfer; see `Attachment.begin`.

        Raises:
            TransferError, OSError: It has failed.
        """
        mover = self.mover
        mover.tidy()
        if self._is_closed or mover.handle == mover.library.ffi.NULL:
            raise TransferError(End.CANCELLED)
        ffi = mover.library.ffi
        made = ffi.new("tm_transfer *")
        made.attachment, made.kind = self.number, transfer.kind
        made.grant = mover.grant_of(transfer.grant)[0]
        made.offset, made.size = transfer.offset, transfer.local.nbytes
        made.local, made.memory = ffi.cast("uint8_t *", transfer.local.address), transfer.local.kind
        made.operand, made.expected = transfer.operand, transfer.expected
        exported = transfer.grant.exported  # the transfer references it until it has ended
        if exported:
            made.exported, made.exported_size = ffi.from_buffer("uint8_t[]", exported), len(exported)
        made.carriers = _ALL
        code = int(mover.library.lib.tm_transfer_begin(mover.handle, made, mover.done))
        if code == status.FULL:
            return None
        if code == status.UNDER_WAY:
            under_way = UnderWay(transfer)
            mover.started(int(mover.done.id), self, under_way)
            return under_way
        if code < 0:
            raise _error_of(code, "beginning a transfer")
        result = result_of(mover.done)
        if isinstance(result, Exception):
            raise result
        return result

    def give_up(self, under_way: UnderWay) -> None:
        number = self.mover.number_of(under_way)
        if number is not None and self.mover.handle != self.mover.library.ffi.NULL:
            code = self.mover.library.lib.tm_transfer_give_up(self.mover.handle, number)
            status.check(code, "abandoning a transfer")

    async def wait_for_room(self) -> None:
        await self.mover.wait_for_room()

    def view(self, grant: Grant, offset: int, nbytes: int, *, writable: bool, is_shared: bool = False) -> memoryview:
        """Return a zero-copy view of granted memory of a block; see `Attachment.view`.

        Raises:
            TransferError, OSError, LimitExceeded: The memory cannot be mapped.
        """
        mode = _ViewMode.WRITE if writable else _ViewMode.SHARED if is_shared else _ViewMode.READ
        view = self._open_view(grant, offset, nbytes, mode)
        return view if writable else view.toreadonly()

    def keep(self, grant: Grant, nbytes: int) -> memoryview:
        """Return granted memory of a block that outlives its process; see `Attachment.keep`.

        Raises:
            TransferError, OSError, LimitExceeded: The memory cannot be mapped.
        """
        return self._open_view(grant, 0, nbytes, _ViewMode.KEPT).toreadonly()

    def _open_view(self, grant: Grant, offset: int, nbytes: int, mode: _ViewMode) -> memoryview:
        mover = self.mover
        mover.tidy()
        if self._is_closed:
            raise TransferError(End.CANCELLED)
        lib = mover.library.lib
        out = mover.library.ffi.new("tm_view *")
        code = lib.tm_view_open(mover.handle, self.number, mover.grant_of(grant), offset, nbytes, mode, out)
        if code < 0:
            raise _error_of(code, "mapping granted memory", "VIEWS_MAX")
        address, handle = int(mover.library.ffi.cast("uintptr_t", out.bytes)), int(out.handle)
        own = nbytes if mode in (_ViewMode.READ, _ViewMode.WRITE) else 0
        return mover.lend(Span(address, nbytes), partial(self._close_view, handle), own)

    def _close_view(self, handle: int) -> None:
        status.check(self.mover.library.lib.tm_view_close(self.mover.handle, handle), "closing a view")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self.mover.handle != self.mover.library.ffi.NULL:
                code = self.mover.library.lib.tm_attachment_close(self.mover.handle, self.number)
                status.check(code, "closing an attachment")


class _ViewMode(enum.IntEnum):
    """Mode of a view, as `tm_view_open` numbers it."""

    READ = 0
    WRITE = 1
    SHARED = 2
    KEPT = 3


_ALL: Final = sum(one.value for one in Carrier)


def result_of(record: Any) -> TransferDone | Exception:
    if record.status == status.OK:
        return TransferDone(Carrier(int(record.carrier)), int(record.value))
    return _error_of(int(record.status), "moving bytes")


def _random_secret() -> bytes:
    import secrets  # noqa: PLC0415 - few programs need it

    return secrets.token_bytes(16)


# ---- RDMA adapters, as the native library reports them ---------------------------------------------------------------

# Their names follow from the transports that UCX has for them: "ibverbs", "efa", or "ucx" for others.

_TRANSPORT: Final = re.compile(r"(\w+)/(\w+)")

_EFA_DEVICE: Final = re.compile(r"efa_|rdmap\d+s")
"""Names of EFA devices by the two naming schemes of Linux; older versions of UCX drive them by "ud_verbs"."""

_IBVERBS: Final = re.compile(r"(rc|ud|dc|gga)_(verbs|mlx5)")


class Adapters(msgspec.Struct, frozen=True):
    """RDMA adapters of this process, as the native library reports them.

    Attributes:
        are_usable: True if there are adapters and a library that drives them.
        knows_devices: True if that library supports memory of CUDA devices.
        about: Name of the library and its adapters; or why there are none.
        why_no_device: Why they move no device memory, or failed when last tried; "" if they do, or may.
    """

    are_usable: bool
    knows_devices: bool
    about: str
    why_no_device: str


def adapters_of(library: Library, mover: Any) -> Adapters:
    """Return the adapters of a mover; the first query takes as long as starting an interpreter."""
    out = library.ffi.new("tm_adapters *")
    lib.check(library.lib.tm_mover_get_adapters(mover, out), "querying RDMA adapters")
    about, why = (library.ffi.string(text).decode(errors="replace") for text in (out.about, out.why_no_device))
    return Adapters(bool(out.usable), bool(out.memory >> MemoryKind.CUDA & 1), about, why)


def adapter_name(about: str) -> str:
    """Return the driver under UCX, from the description by the native library: "efa", "ibverbs" or "ucx".

    Args:
        about: "UCX 1.19.0 (/usr/lib/libucp.so.0): rc_mlx5/mlx5_0:1, ud_mlx5/mlx5_0:1".
    """
    found = _TRANSPORT.findall(about.rpartition("): ")[2])
    if any(transport == "srd" or _EFA_DEVICE.match(device) for transport, device in found):
        return "efa"
    return "ibverbs" if any(_IBVERBS.fullmatch(transport) for transport, _ in found) else "ucx"


# ---- ucx wheel -------------------------------------------------------------------------------------------------------

# The UCX of the Python package `libucx` (libucx-cu12, libucx-cu13 on the package index), if that is installed.
#
# The package is found without being imported. The native library checks whether it drives the adapters of this machine,
# and tries it last: libraries of a site or distribution are built for its machines.

_PACKAGE: Final = "libucx"
_LIBRARY: Final = Path("lib", "libucp.so.0")


def wheel_library() -> Path | None:
    """Return the path of the package's library; None if there is none."""
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except (ImportError, ValueError):  # a module of that name without a spec, made by hand
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / _LIBRARY).is_file():
            return path
    return None
