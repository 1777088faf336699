"""Two ends of TLS in one process: sessions of the native library, and Python's own `ssl` as a peer of other make."""

from __future__ import annotations

import ssl
from typing import NamedTuple

from trimesh._native.tls import State, TLSSession


class Ends(NamedTuple):
    """A client and a server that are joined by their bytes."""

    client: TLSSession
    server: TLSSession

    def settle(self) -> tuple[bytes, bytes]:
        """Pass bytes until none move; return what came out at the client and at the server."""
        up, down, at_client, at_server = b"", b"", b"", b""
        while True:
            one = self.client.step(down)
            other = self.server.step(up + one.wire)
            up, down = (up + one.wire)[other.wire_taken :], down[one.wire_taken :] + other.wire
            at_client, at_server = at_client + one.plain, at_server + other.plain
            if not (one.wire or other.wire or one.wire_taken or other.wire_taken):
                return at_client, at_server

    def send(self, plain: bytes) -> bytes:
        """Send bytes from the client; return what came out at the server."""
        at_server = bytearray()
        while plain:
            step = self.client.step(b"", plain)
            plain, wire = plain[step.plain_taken :], step.wire
            while wire:
                got = self.server.step(wire)
                at_server += got.plain
                wire = wire[got.wire_taken :]
        return bytes(at_server)

    def free(self) -> None:
        """Forget both."""
        self.client.free()
        self.server.free()


class ForeignPeer:
    """Python's ssl with memory BIOs, against a session of ours."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=is_server)
        self.problem: ssl.SSLError | None = None

    def meet(self, ours: TLSSession) -> None:
        """Shake hands with a session as far as both go."""
        for _ in range(20):
            self._shake()
            self.exchange(ours)
            if ours.state is State.FAILED:
                self._shake()  # it reads why
                return

    def _shake(self) -> None:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.problem = error

    def exchange(self, ours: TLSSession) -> bytes:
        """Pass what each side has made to the other; return what came out of ours."""
        plain, wire = b"", self.outgoing.read()
        while True:
            step = ours.step(wire)
            plain, wire = plain + step.plain, wire[step.wire_taken :]
            self.incoming.write(step.wire)
            if not (step.wire or step.wire_taken):
                return plain
