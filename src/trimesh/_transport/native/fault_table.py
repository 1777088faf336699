"""Fault table: faults that a test plans for links and system calls of real processes.

Only the process of the test creates the table, plans and heals faults. Processes that got a `TableKey` when they were
spawned arm their transport with it. They share the table's memory, so a fault begins and is healed everywhere at once,
even where no message gets through. A transport that is not armed has no faults.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from typing import Any, Final, Literal

import msgspec

from trimesh._native import lib
from trimesh._transport.native.transport import NativeTransport
from trimesh.ids import ProcId

Kind = Literal["delay", "reorder", "bandwidth", "drop", "duplicate", "corrupt", "reset", "hold"]
Refusal = Literal["ENOSPC", "EMFILE"]

_KINDS: Final[dict[Kind, int]] = {
    "delay": 1,
    "reorder": 2,
    "bandwidth": 3,
    "drop": 4,
    "duplicate": 5,
    "corrupt": 6,
    "reset": 7,
    "hold": 8,
}
_REFUSE: Final = 9
_CODES: Final[dict[Refusal, int]] = {"ENOSPC": errno.ENOSPC, "EMFILE": errno.EMFILE}


class NotArmedError(Exception):
    """A key does not open a fault table."""


class TableKey(msgspec.Struct, frozen=True):
    """Key of a fault table, for processes that suffer its faults; sent in the `setup` of a process.

    Attributes:
        pid: The process of the test.
        fd: The descriptor of the table there.
        secret: Number that the table must contain, because descriptors are reused.
    """

    pid: int
    fd: int
    secret: int

    def __repr__(self) -> str:
        return f"TableKey(pid={self.pid}, fd={self.fd})"  # logs must not show the secret

    def arm(self, transport: NativeTransport) -> None:
        """Apply the faults of the table to a transport, for as long as it lives.

        Raises:
            NotArmedError: The table does not exist, or is that of another test.
        """
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotArmedError(f"cannot open the fault table of process {self.pid}: {error}") from error
        try:
            _arm(transport, fd, self.secret)
        finally:
            os.close(fd)


def _arm(transport: NativeTransport, fd: int, secret: int) -> None:
    code = transport.library.lib.tm_bus_arm_faults(transport.bus, fd, secret)
    if code == lib.ERR_ARGUMENT:
        raise NotArmedError("a key must name the fault table of its own test, got another file or another test's table")
    lib.check(code, "arming a transport")


class FaultTable:
    """A fault table, and the transport of the test's own process, which is armed with it.

    Attributes:
        key: Key for the other processes.
    """

    def __init__(self, transport: NativeTransport) -> None:
        self._transport = transport
        self._ffi, self._lib = transport.library.ffi, transport.library.lib
        secret = secrets.randbits(64)
        out = self._ffi.new("int32_t *")
        lib.check(self._lib.tm_faults_create(secret, out), "creating a fault table")
        self._fd = int(out[0])
        self.key = TableKey(os.getpid(), self._fd, secret)
        try:
            _arm(transport, self._fd, secret)
        except BaseException:
            self.close()
            raise

    def disturb(self, kind: Kind, source: ProcId, target: ProcId, amount: float = 0.0, seed: int = 0) -> int:
        """Disturb messages from `source` to `target`, which must be armed; return the number of the fault.

        Raises:
            LimitExceeded: `FAULT_RULES_MAX` faults exist.
        """
        return self._add(source=source, target=target, kind=_KINDS[kind], amount=amount, seed=seed)

    def refuse(self, error: Refusal, target: ProcId, nth: int, times: int) -> int:
        """Let `times` system calls of `target` fail with `error`, from the nth that may fail so on; as `disturb`."""
        return self._add(target=target, kind=_REFUSE, code=_CODES[error], nth=nth, times=times)

    def _add(self, **fields: Any) -> int:
        fault = self._ffi.new("tm_fault *", fields)
        out = self._ffi.new("uint32_t *")
        code = self._lib.tm_fault_add(self._transport.bus, fault, out)
        lib.check(code, "planning a fault", limit="FAULT_RULES_MAX")
        return int(out[0])

    def heal(self, number: int) -> None:
        """End a fault. Its number may be reused."""
        lib.check(self._lib.tm_fault_heal(self._transport.bus, number), "healing a fault")

    def ago_of(self, number: int) -> float | None:
        """Return the seconds since a fault first happened, or None if it has not."""
        count = self._ffi.new("tm_fault_count *")
        code = self._lib.tm_fault_get_count(self._transport.bus, number, count)
        lib.check(code, "querying a fault")
        return (time.monotonic_ns() - count.first_ns) / 1e9 if count.hits else None

    def close(self) -> None:
        """Close the descriptor; armed transports stay armed. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
