"""A TCP connection with TLS in it, from the first byte until the relay takes it over."""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import trio

from trimesh import limits
from trimesh._native.tls import State, TLSContext, TLSHello, TLSSession, TLSVerdict
from trimesh._transport.native.host_identity import host_identity
from trimesh._transport.relay.base import HostConnection
from trimesh.config import current
from trimesh.errors import LinkLost
from trimesh.ids import ProcId
from trimesh.jobs.identity import Credentials

_READ_BYTES: Final = 1 << 16

_FIRST_BYTES: Final = 512

CANNOT_JOIN: Final = b"trimesh cannot join: "
"""Begins what a host sends that cannot even begin a session, followed by why, so that its program can tell."""

BEGINS_TLS: Final = b"\x16\x03"
"""A record of TLS with a hello."""

BEGINS_PLAIN: Final = b"tmplain1"
"""A session without TLS (`native/src/tls/plain.zig`)."""

SPEAKS_TLS: Final = bytes((21, 3, 3, 0, 2, 2, 70))
"""An alert of TLS, protocol_version: what a peer without TLS gets, to know what it has reached."""

Decide = Callable[[TLSHello], TLSVerdict]
Prove = Callable[[TLSSession], None]


def own_versions() -> tuple[str, str, str]:
    """Return the versions of trimesh, Python and torch here; "" for a torch that is not loaded."""
    try:
        own = version("trimesh-actors")
    except PackageNotFoundError:  # run from its sources
        own = "unknown"
    torch = sys.modules.get("torch")
    return own, platform.python_version(), "" if torch is None else str(torch.__version__).partition("+")[0]


def own_hello(own: ProcId, mesh: bytes, *, is_join: bool = False) -> TLSHello:
    """Return what this process says of itself."""
    identity = host_identity(current().host_id)
    return TLSHello(own, mesh, host=identity, versions=own_versions(), is_join=is_join)


def context_of(credentials: Credentials, *, takes_joins: bool = False) -> TLSContext:
    """Return what sessions are opened by; see `TLSContext`."""
    if credentials.is_plain:
        return TLSContext(is_plain=True)
    chain, key, authority = credentials.chain, credentials.key, credentials.authority
    return TLSContext(chain=chain, key=key, authority=authority, takes_joins=takes_joins)


class SecureSocket:
    """One connection.

    Attributes:
        tls: Its session.
        first: The first bytes that have come, for words about a peer that speaks something else.
    """

    def __init__(self, sock: trio.socket.SocketType, tls: TLSSession) -> None:
        self.tls = tls
        self._sock = sock
        self._wire = bytearray()
        self._plain = bytearray()
        self._is_handed_over = False
        self.first = b""

    async def shake_hands(
        self,
        *,
        decide: Decide | None = None,
        prove: Prove | None = None,
        seconds: float = limits.TLS_HALF_OPEN_MS / 1000,
    ) -> None:
        """Go on until both sides have said hello and the one that was dialled has admitted the other.

        Args:
            decide: On that side: what to answer to a hello.
            prove: On the other one, of a join: shows that it knows the token.
            seconds: For how long, at most.

        Raises:
            LinkLost: It did not come to that; the text says why.

        Blocking: at most `seconds`.
        """
        with trio.move_on_after(seconds):
            while True:
                await self._step(b"")
                state = self.tls.state
                if state is State.OPEN:
                    return
                if state is State.PROOF and prove is not None:
                    prove(self.tls)
                elif state is State.ASKING and decide is not None and self.tls.peer is not None:
                    self.tls.answer(decide(self.tls.peer))
                else:
                    await self._receive()
        raise LinkLost(f"the peer was not admitted within {seconds:g} s")

    async def send(self, plain: bytes) -> None:
        """Send bytes to the peer.

        Raises:
            LinkLost: The connection broke.
        """
        while plain:
            plain = plain[await self._step(plain) :]

    async def receive_exactly(self, size: int) -> bytes:
        """Receive so many bytes from the peer.

        Raises:
            LinkLost: The connection broke first.
        """
        while len(self._plain) < size:
            await self._receive()
            await self._step(b"")
        data = bytes(self._plain[:size])
        del self._plain[:size]
        return data

    async def _receive(self) -> None:
        try:
            data = await self._sock.recv(_READ_BYTES)
        except OSError as error:
            raise LinkLost(f"the connection broke: {error}") from None
        if not data:
            self.tls.end()
            raise LinkLost(f"the peer has closed the connection{_why(self.tls)}")
        self._wire += data
        self.first += data[: _FIRST_BYTES - len(self.first)]

    async def _step(self, plain: bytes) -> int:
        """Let TLS take what there is; return how much it took of `plain`."""
        taken = 0
        while True:
            step = self.tls.step(bytes(self._wire), plain[taken:])
            del self._wire[: step.wire_taken]
            taken += step.plain_taken
            self._plain += step.plain
            if step.wire:
                try:
                    await trio.SocketStream(self._sock).send_all(step.wire)
                except (OSError, trio.BrokenResourceError) as error:
                    raise LinkLost(f"the connection broke: {error}") from None
            if self.tls.state is State.FAILED:
                raise LinkLost(f"the peer cannot be trusted, or does not trust us: {_words(self.tls)}")
            if not (step.wire or step.wire_taken or step.plain_taken):
                return taken

    def hand_over(self) -> HostConnection:
        """Return what the relay takes over; nothing else is done with this object."""
        self._is_handed_over = True
        sock = socket.socket(fileno=self._sock.detach())
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limits.HOST_UNHEARD_SECONDS))
        return HostConnection(sock, self.tls, bytes(self._wire), bytes(self._plain))

    def close(self) -> None:
        """Close it, unless it was handed over."""
        if not self._is_handed_over:
            self._is_handed_over = True
            self._sock.close()
            self.tls.free()


def words_of_host(first: bytes) -> str | None:
    """Return why a host cannot join, as it (or a stranger) has sent it in place of a hello; None where it has not."""
    if not first.startswith(CANNOT_JOIN):
        return None
    text = first[len(CANNOT_JOIN) :].partition(b"\n")[0].decode("utf-8", "replace")
    return "".join(char if char.isprintable() else " " for char in text)


def _why(tls: TLSSession) -> str:
    return "" if tls.failure is None else f": {_words(tls)}"


def _words(tls: TLSSession) -> str:
    """Return why a session has failed; where a certificate does not count now, by which clock."""
    text = str(tls.failure)
    if "not yet valid" in text or "expired" in text:
        text += f"; the clock of this machine says {time.strftime('%Y-%m-%d %H:%M:%S %Z')}: set it, or that of the peer"
    return text
