"""What comes to the door of a mesh and is no host of it: by OpenSSL's own client, by Python's `ssl`, by raw bytes."""

from __future__ import annotations

import ssl
import subprocess
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import attrs
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.native.tls_ends import ForeignPeer
from tests.patience import HANG_SECONDS

from trimesh import jobs, limits
from trimesh._native.tls import TLSContext
from trimesh._transport.relay import HostConnection
from trimesh.ids import ProcId
from trimesh.jobs import door as doors
from trimesh.jobs.agent import HostProgram
from trimesh.jobs.connections import ListenAddress, own_hello
from trimesh.jobs.identity import PLAIN, Authority, Credentials, ForeignAuthority

OWN = ProcId(7)
"""The program whose door it is."""


class Guest(doors.JoinedHost):
    """Who a token was issued for.

    Attributes:
        refusals: Why it came and may not join.
        connections: Incarnations whose connections it was given.
    """

    def __init__(self) -> None:
        super().__init__("")
        self.refusals = list[Exception]()
        self.connections = list[ProcId]()

    def refused(self, error: Exception) -> None:
        """See `JoinedHost`."""
        self.refusals.append(error)

    def connected(self, incarnation: ProcId, connection: HostConnection) -> bool:
        """See `JoinedHost`; closes it."""
        self.connections.append(incarnation)
        connection.sock.close()
        connection.tls.free()
        return True

    def became_ready(self) -> None:
        """See `JoinedHost`."""

    def failed(self, error: Exception) -> None:
        """See `JoinedHost`; `refused` keeps what fails a guest."""
        raise NotImplementedError


@attrs.frozen
class OpenDoor:
    """A door of a test.

    Attributes:
        door: It.
        authority: Of its mesh.
        guest: Of the member.
        member: The incarnation of a host that has joined.
        credentials: Of that host.
        folder: For files.
    """

    door: doors.Door
    authority: Authority
    guest: Guest
    member: ProcId
    credentials: Credentials
    folder: Path

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.door.address.rpartition(":")[2])

    def files(self, credentials: Credentials) -> list[str]:
        """Write credentials into files; return them as options of `openssl s_client`."""
        paths = {name: self.folder / name for name in ("chain", "key", "authority")}
        for name, path in paths.items():
            path.write_bytes(getattr(credentials, name))
        return ["-cert", str(paths["chain"]), "-cert_chain", str(paths["chain"]), "-key", str(paths["key"])]

    def hello(self) -> bytes:
        """Return what the member says first, as it lies inside TLS."""
        theirs = self.credentials
        context = TLSContext(chain=theirs.chain, key=theirs.key, authority=theirs.authority)
        session = context.open(own_hello(self.member, self.authority.mesh), is_server=False)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        own = self.authority.credentials(ProcId(time.monotonic_ns()), time.time())
        both = self.folder / "server"
        both.write_bytes(own.key + own.chain)
        server.load_cert_chain(both)
        peer = ForeignPeer(server, is_server=True)
        peer.meet(session)
        hello = peer.tls.read(limits.TLS_HELLO_BYTES)
        session.free()
        context.close()
        return hello


@asynccontextmanager
async def open_member_door(folder: Path) -> AsyncGenerator[OpenDoor, None]:
    """Open a door at which one host has joined."""
    authority, guest = Authority(time.time()), Guest()
    with trio.fail_after(HANG_SECONDS), doors.door_context(OWN, authority) as context:
        async with doors.open_door_at(ListenAddress("127.0.0.1"), OWN, authority, context) as door:
            host = HostProgram(jobs.AgentOrder(door.expect(guest).text, (door.address,)))
            credentials = await host._join()
            yield OpenDoor(door, authority, guest, host._own, credentials, folder)


@asynccontextmanager
async def open_plain_door() -> AsyncGenerator[doors.Door, None]:
    """Open a door of sessions without TLS."""
    authority = ForeignAuthority(PLAIN)
    with trio.fail_after(HANG_SECONDS), doors.door_context(OWN, authority) as context:
        async with doors.open_door_at(ListenAddress("127.0.0.1"), OWN, authority, context) as door:
            yield door


def certified(authority: Authority, name: str, since: float = 0.0) -> Credentials:
    """Return credentials that an authority does not give: with another name, or valid for an hour of another time."""
    key = ec.generate_private_key(ec.SECP256R1())
    at = datetime.now(UTC) + timedelta(seconds=since)
    builder = x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(authority._name)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(at - timedelta(seconds=1))
    builder = builder.not_valid_after(at + timedelta(hours=1))
    uri: x509.GeneralName = x509.UniformResourceIdentifier(name) if "://" in name else x509.DNSName(name)
    builder = builder.add_extension(x509.SubjectAlternativeName([uri]), critical=True)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    chain = builder.sign(authority._key, hashes.SHA256()).public_bytes(pem) + authority.certificate
    return Credentials(chain, key.private_bytes(pem, form, serialization.NoEncryption()), authority.certificate)


async def s_client(port: int, *options: str, said: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Connect by `openssl s_client`, say something inside TLS, and wait until the door has closed the connection."""
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-quiet", *options]
    return await trio.run_process(command, stdin=said, capture_stdout=True, capture_stderr=True, check=False)


async def raw(port: int, said: bytes) -> bytes:
    """Send bytes without TLS; return what comes until the door has closed the connection."""
    came = b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        try:
            await stream.send_all(said)
            async for data in stream:
                came += data
        except trio.BrokenResourceError:
            pass  # closed with bytes unread: a reset
    return came
