"""Fault table: faults that a test plans for links and system calls of real processes.

Only the process of the test creates it, plans and heals. Processes that got a `TableKey` when they were spawned arm
their transport by it. They share its memory, so a fault begins and is healed everywhere at once, even where no message
gets through. A transport that is not armed has no faults.
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
    """A key does not open a table of faults."""


class TableKey(msgspec.Struct, frozen=True):
    """The capability to suffer the faults of a table; it travels in the `setup` of a process.

    Attributes:
        pid: The process of the test.
        fd: The descriptor of the table there.
        secret: What the table must hold: descriptors are used again.
    """

    pid: int
    fd: int
    secret: int

    def __repr__(self) -> str:
        return f"TableKey(pid={self.pid}, fd={self.fd})"  # the secret is for whoever has the key, not for logs

    def arm(self, transport: NativeTransport) -> None:
        """Let the faults of the table happen to a transport, for as long as it lives.

        Raises:
            NotArmedError: There is no such table.
        """
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotArmedError(f"the table of planned faults cannot be opened: {error}") from error
        try:
            _arm(transport, fd, self.secret)
        finally:
            os.close(fd)


def _arm(transport: NativeTransport, fd: int, secret: int) -> None:
    code = transport.library.lib.tm_bus_arm_faults(transport.bus, fd, secret)
    if code == lib.ERR_ARGUMENT:
        raise NotArmedError("what the test handed over is no table of planned faults, or that of another test")
    lib.check(code, "arming a transport")


class FaultTable:
    """A table, and the transport of the test's own process, which is armed by it.

    Attributes:
        key: For the other processes.
    """

    def __init__(self, transport: NativeTransport) -> None:
        self._transport = transport
        self._ffi, self._lib = transport.library.ffi, transport.library.lib
        secret = secrets.randbits(64)
        out = self._ffi.new("int32_t *")
        lib.check(self._lib.tm_faults_create(secret, out), "making a table of planned faults")
        self._fd = int(out[0])
        self.key = TableKey(os.getpid(), self._fd, secret)
        try:
            _arm(transport, self._fd, secret)
        except BaseException:
            self.close()
            raise

    def disturb(self, kind: Kind, source: ProcId, target: ProcId, amount: float = 0.0, seed: int = 0) -> int:
        """Disturb what `source` sends to `target`, which must be armed; return the number of the fault.

        Raises:
            LimitExceeded: There are `FAULT_RULES_MAX` already.
        """
        return self._add(source=source, target=target, kind=_KINDS[kind], amount=amount, seed=seed)

    def refuse(self, error: Refusal, target: ProcId, nth: int, times: int) -> int:
        """Let the nth call of the system that could fail so, and those after it, fail in `target`. As `disturb`."""
        return self._add(target=target, kind=_REFUSE, code=_CODES[error], nth=nth, times=times)

    def _add(self, **fields: Any) -> int:
        fault = self._ffi.new("tm_fault *", fields)
        out = self._ffi.new("uint32_t *")
        code = self._lib.tm_fault_add(self._transport.bus, fault, out)
        lib.check(code, "planning a fault", limit="FAULT_RULES_MAX")
        return int(out[0])

    def heal(self, number: int) -> None:
        """End a fault. Its number may be used again by the next one."""
        lib.check(self._lib.tm_fault_heal(self._transport.bus, number), "healing a fault")

    def ago_of(self, number: int) -> float | None:
        """Return how many seconds ago a fault has happened for the first time, or None."""
        count = self._ffi.new("tm_fault_count *")
        code = self._lib.tm_fault_get_count(self._transport.bus, number, count)
        lib.check(code, "asking for a fault")
        return (time.monotonic_ns() - count.first_ns) / 1e9 if count.hits else None

    def close(self) -> None:
        """Give the descriptor back; who is armed stays so. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
