"""TLS sessions of the native library, from bytes to bytes: encrypted on one side, plain on the other.

Nothing here opens a socket or reads a clock. The contract is the last part of `native/include/trimesh.h`.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import Any, Final, NamedTuple

from trimesh import limits
from trimesh._native import lib
from trimesh._native.lib import Library, load
from trimesh.config import current
from trimesh.errors import LimitExceeded, TrimeshError

_STEP_BYTES: Final = 1 << 17
"""Room that a step is given in each direction: eight records."""


class TLSError(TrimeshError):
    """A TLS session cannot begin, or has ended otherwise than by a word.

    Attributes:
        status: TM_ERR_* of the native library, as in `trimesh._native.lib`.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class State(IntEnum):
    """State of a session."""

    HANDSHAKE = 1
    PROOF = 2
    GREETING = 3
    ASKING = 4
    OPEN = 5
    CLOSING = 6
    CLOSED = 7
    FAILED = 8


class TLSVerdict(IntEnum):
    """Reply of a server to a hello."""

    ADMITTED = 1
    TOKEN = 2
    VERSIONS = 3
    NAME = 4
    FULL = 5
    INCARNATION = 6


class TLSHello(NamedTuple):
    """First message of a side.

    Attributes:
        incarnation: The sender id of its frames, 1 .. 2**63 - 1.
        host: Its host, as in frames; 0 = unknown.
        mesh: Id of the certificate authority, 16 bytes.
        versions: Versions of trimesh, Python and torch; "" = not loaded. ASCII, at most 31 characters each.
        is_join: True if it has a token, and no certificate yet.
        token: Id of the token, 16 bytes.
        proof: Proof that it knows the token, 32 bytes.
        protocol: Version of its frames.
    """

    incarnation: int
    mesh: bytes = bytes(16)
    host: int = 0
    versions: tuple[str, str, str] = ("", "", "")
    is_join: bool = False
    token: bytes = bytes(16)
    proof: bytes = bytes(32)
    protocol: int = 0


def library() -> tuple[bool, str]:
    """Look for OpenSSL, once a process: whether there is one, and which, or why there is none."""
    native = _load()
    about = native.ffi.new("const char **")
    is_found = native.lib.tm_tls_library(about) == lib.OK
    return is_found, native.ffi.string(about[0]).decode(errors="replace")


def _load() -> Library:
    """Return the native library, which looks for OpenSSL itself, told by a variable where it is."""
    if asked := current().libssl:
        os.environ["TRIMESH_LIBSSL"] = asked
    return load()


class TLSContext:
    """Certificate, key and trust of one side, for many sessions. To be closed after them."""

    def __init__(
        self,
        *,
        chain: bytes = b"",
        key: bytes = b"",
        authority: bytes = b"",
        pin: bytes = b"",
        takes_joins: bool = False,
        is_plain: bool = False,
    ) -> None:
        """Read them.

        Args:
            chain: The own certificate in PEM, then those up to the authority; b"" for a client that joins.
            key: Its key in PEM, without a password.
            authority: Who certifies peers, in PEM; b"" = whoever's key has the digest `pin`.
            pin: SHA-256 of the authority's SubjectPublicKeyInfo, 32 bytes.
            takes_joins: Whether a server lets clients without a certificate come to their hello.
            is_plain: There is no TLS, and none of the rest: who insists on that. Sessions then have no names.

        Raises:
            TLSError: There is no OpenSSL, or a text is not what it should be.
        """
        if not is_plain and (bool(authority) == bool(pin) or len(pin) not in (0, 32)):
            raise ValueError(
                f"a session needs an authority or a pin of 32 bytes, got {len(authority)} and {len(pin)} bytes"
            )
        native = _load()
        ffi = native.ffi
        held = [ffi.from_buffer("uint8_t[]", text) if text else ffi.NULL for text in (chain, key, authority)]
        options = ffi.new("tm_tls_options *")
        options.chain, options.key, options.authority = held
        options.chain_size, options.key_size, options.authority_size = len(chain), len(key), len(authority)
        options.takes_joins, options.is_plain = takes_joins, is_plain
        ffi.memmove(options.pin, pin or bytes(32), 32)
        out, why = ffi.new("tm_tls **"), ffi.new("const char **")
        rc = native.lib.tm_tls_create(options, out, why)
        if rc < 0:
            words = ffi.string(why[0]).decode()
            raise TLSError(rc, f"TLS cannot be set up: {words or lib.error_of(rc, 'making credentials')}")
        self._native = native
        self._handle: Any = out[0]

    def open(self, hello: TLSHello, *, is_server: bool, expected: int = 0, has_names: bool = True) -> TLSSession:
        """Begin a session.

        Args:
            hello: What this side says.
            is_server: Whether it was dialled.
            expected: The incarnation that the peer's certificate must be of; 0 = any.
            has_names: Whether certificates carry names of a mesh. False: the owner looks at `Peer.name` itself.

        Raises:
            LimitExceeded: `limits.TLS_HALF_OPEN_MAX` peers are not admitted yet.
            ValueError: The hello has a value out of its range.
        """
        native, ffi = self._native, self._native.ffi
        options = ffi.new("tm_tls_session_options *")
        options.role = native.lib.TM_TLS_SERVER if is_server else native.lib.TM_TLS_CLIENT
        options.expected, options.has_names = expected, has_names
        said = options.hello
        said.incarnation, said.host = hello.incarnation, hello.host
        said.protocol = hello.protocol or native.limit("PROTOCOL_VERSION")
        said.kind = native.lib.TM_TLS_JOIN if hello.is_join else native.lib.TM_TLS_MEMBER
        ffi.memmove(said.mesh, hello.mesh, 16)
        for field, text in zip(("trimesh", "python", "torch"), hello.versions, strict=True):
            setattr(said, field, text.encode("ascii")[:31])
        out = ffi.new("tm_tls_session **")
        rc = native.lib.tm_tls_open(self._handle, options, out)
        if rc == lib.ERR_LIMIT:
            raise LimitExceeded("TLS_HALF_OPEN_MAX", limits.TLS_HALF_OPEN_MAX, "too many peers are not admitted yet")
        if rc == lib.ERR_ARGUMENT:
            raise ValueError(f"a hello needs an incarnation from 1 to 2**63 - 1 and printable versions, got {hello}")
        if rc < 0:
            raise TLSError(rc, f"a session cannot begin: {lib.error_of(rc, 'opening a session')}")
        return TLSSession(native, out[0])

    def close(self) -> None:
        """Forget them. All sessions have been freed before."""
        if self._handle is not None:
            rc = self._native.lib.tm_tls_destroy(self._handle)
            assert rc in (lib.OK, lib.ERR_FORKED), f"{rc}: a session is left"
            self._handle = None


class TLSSession:
    """TLS session as a state machine: takes and returns bytes of the connection and of the plain side."""

    def __init__(self, native: Any, handle: Any) -> None:
        self._native, self._handle = native, handle
        self._io = native.ffi.new("tm_tls_io *")
        self._wire = bytearray(_STEP_BYTES)
        self._plain = bytearray(_STEP_BYTES)
        self._wire_view = native.ffi.from_buffer("uint8_t[]", self._wire)
        self._plain_view = native.ffi.from_buffer("uint8_t[]", self._plain)

    def step(self, wire: bytes | bytearray | memoryview, plain: bytes | bytearray | memoryview = b"") -> TLSStep:
        """Consume as many bytes from both sides as there is room for.

        Args:
            wire: Bytes received from the connection.
            plain: Bytes for the peer. None are consumed before the session is open.

        Returns:
            Bytes produced, and the number consumed of each side. Offer the rest again. On failure `state` is FAILED;
            send the bytes produced to the connection even then.
        """
        ffi, io = self._native.ffi, self._io
        wire_in = ffi.from_buffer("uint8_t[]", wire) if len(wire) else ffi.NULL
        plain_in = ffi.from_buffer("uint8_t[]", plain) if len(plain) else ffi.NULL
        io.wire_in, io.wire_in_size, io.plain_in, io.plain_in_size = wire_in, len(wire), plain_in, len(plain)
        io.wire_out, io.wire_out_size = self._wire_view, _STEP_BYTES
        io.plain_out, io.plain_out_size = self._plain_view, _STEP_BYTES
        rc = self._native.lib.tm_tls_step(self._live(), io)
        if rc in (lib.ERR_ARGUMENT, lib.ERR_FORKED):
            raise lib.error_of(rc, "a step of a TLS session")
        return TLSStep(
            bytes(memoryview(self._wire)[: io.wire_made]),
            bytes(memoryview(self._plain)[: io.plain_made]),
            io.wire_taken,
            io.plain_taken,
        )

    def tick(self, seconds: float) -> None:
        """Let time pass. Ends a session that is not open after `limits.TLS_HALF_OPEN_MS`."""
        self._native.lib.tm_tls_tick(self._live(), round(seconds * 1000))

    def prove(self, token: bytes, proof: bytes) -> None:
        """Client of a join, in PROOF: set the token's id and the proof of knowing it."""
        lib.check(self._native.lib.tm_tls_prove(self._live(), token, proof), "proving a token")

    def answer(self, verdict: TLSVerdict) -> None:
        """Server, in ASKING: admit the peer, or say why not."""
        lib.check(self._native.lib.tm_tls_answer(self._live(), int(verdict)), "answering a hello")

    def close(self) -> None:
        """Say that nothing follows; the peer's word comes as CLOSED."""
        self._native.lib.tm_tls_close(self._live())

    def end(self) -> None:
        """Tell it that the connection has ended."""
        self._native.lib.tm_tls_end(self._live())

    def free(self) -> None:
        """Forget the session and its keys."""
        if self._handle is not None:
            self._native.lib.tm_tls_free(self._handle)
            self._handle = None

    @property
    def handle(self) -> Any:
        """The library's handle, for a relay to take over; see `forget`."""
        return self._live()

    def forget(self) -> None:
        """Mark it as owned by the native library: it cannot be used here any more."""
        self._live()
        self._handle = None

    def _live(self) -> Any:
        assert self._handle is not None, "the session was freed"
        return self._handle

    def _info(self) -> Any:
        info = self._native.ffi.new("tm_tls_info *")
        lib.check(self._native.lib.tm_tls_get_info(self._live(), info), "looking at a session")
        return info

    @property
    def state(self) -> State:
        return State(self._info().state)

    @property
    def half_open(self) -> int:
        """Sessions of servers of the same context that are not open yet."""
        return int(self._info().half_open)

    @property
    def exporter(self) -> bytes:
        """32 bytes that only the two ends of this session know; zeros before the handshake is done."""
        return bytes(self._info().exporter)

    @property
    def peer_name(self) -> str | None:
        """The name in the peer's certificate, which was checked; None = it has shown none."""
        info = self._info()
        return self._native.ffi.string(info.name, info.name_size).decode() if info.is_certified else None

    @property
    def peer(self) -> TLSHello | None:
        """Return the hello of the peer; None before it has arrived."""
        said, ffi = self._info().peer, self._native.ffi
        if said.incarnation == 0:
            return None
        trimesh, python, torch = (ffi.string(text).decode() for text in (said.trimesh, said.python, said.torch))
        return TLSHello(
            incarnation=said.incarnation,
            mesh=bytes(said.mesh),
            host=said.host,
            versions=(trimesh, python, torch),
            is_join=said.kind == self._native.lib.TM_TLS_JOIN,
            token=bytes(said.token),
            proof=bytes(said.proof),
            protocol=said.protocol,
        )

    @property
    def failure(self) -> TLSError | None:
        """Why it has failed; None = it has not."""
        info = self._info()
        if info.status == lib.OK:
            return None
        return TLSError(info.status, self._native.ffi.string(info.detail).decode(errors="replace"))


class TLSStep(NamedTuple):
    """Bytes produced and consumed by one step."""

    wire: bytes
    plain: bytes
    wire_taken: int
    plain_taken: int
