"""TLS between hosts with real certificates: what is admitted, what is refused, in which words."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.native.tls_ends import Ends, ForeignPeer

from trimesh import limits
from trimesh._native import lib, tls
from trimesh._native.tls import State, TLSContext, TLSError, TLSHello, TLSSession, TLSVerdict
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId

pytest.importorskip("cryptography")

from trimesh.jobs.identity import Authority, Credentials, JoinToken, KeyRequest, TokenLedger, proof_of

pytestmark = pytest.mark.skipif(not tls.library()[0], reason=f"no OpenSSL: {tls.library()[1]}")

NOW = time.time()
CLIENT, SERVER = ProcId(2), ProcId(1)
VERSIONS = ("0.1.0", "3.11.7", "")


class Stage:
    """One authority, the contexts of both sides, and the sessions over them, all freed at the end."""

    def __init__(self) -> None:
        self.authority = Authority(NOW)
        self.own = self.authority.credentials(SERVER, NOW)
        self.server = self.context(self.own, takes_joins=True)
        self.contexts: list[TLSContext] = [self.server]
        self.sessions: list[TLSSession] = []

    def context(self, credentials: Credentials, *, takes_joins: bool = False) -> TLSContext:
        return TLSContext(
            chain=credentials.chain, key=credentials.key, authority=credentials.authority, takes_joins=takes_joins
        )

    def member(self, authority: Authority | None = None, *, issued: float = NOW) -> TLSContext:
        credentials = (authority or self.authority).credentials(CLIENT, issued)
        trusted = Credentials(credentials.chain, credentials.key, self.authority.certificate)
        self.contexts.append(self.context(trusted))
        return self.contexts[-1]

    def joining(self, pin: bytes) -> TLSContext:
        self.contexts.append(TLSContext(pin=pin))
        return self.contexts[-1]

    def hello(self, incarnation: ProcId, *, is_join: bool = False) -> TLSHello:
        return TLSHello(incarnation, self.authority.mesh, versions=VERSIONS, is_join=is_join)

    def dialled(self, server: TLSContext | None = None) -> TLSSession:
        self.sessions.append((server or self.server).open(self.hello(SERVER), is_server=True))
        return self.sessions[-1]

    def dial(self, client: TLSContext, hello: TLSHello | None = None, *, expected: int = 0) -> TLSSession:
        self.sessions.append(client.open(hello or self.hello(CLIENT), is_server=False, expected=expected))
        return self.sessions[-1]

    def close(self) -> None:
        for session in self.sessions:
            session.free()
        for context in self.contexts:
            context.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def failure_of(session: TLSSession) -> tuple[int, str]:
    assert session.failure is not None
    return session.failure.status, str(session.failure)


def test_tls_members_meet_and_know_each_other(stage: Stage) -> None:
    ends = Ends(stage.dial(stage.member(), expected=SERVER), stage.dialled())
    ends.settle()

    assert ends.server.state is State.ASKING
    assert ends.server.half_open == 1
    assert ends.server.peer == stage.hello(CLIENT)._replace(protocol=8)
    assert ends.server.peer_name == f"trimesh://{stage.authority.mesh.hex()}/{CLIENT:016x}"
    ends.server.answer(TLSVerdict.ADMITTED)
    ends.settle()
    assert (ends.client.state, ends.server.state, ends.server.half_open) == (State.OPEN, State.OPEN, 0)
    assert ends.client.exporter == ends.server.exporter != bytes(32)
    sent = bytes(range(256)) * 5_000
    assert ends.send(sent) == sent
    ends.client.close()
    ends.settle()
    assert (ends.client.state, ends.server.state) == (State.CLOSED, State.CLOSED)
    assert ends.client.failure is None


def test_tls_refuses_certificates_of_another_authority(stage: Stage) -> None:
    ends = Ends(stage.dial(stage.member(Authority(NOW))), stage.dialled())
    ends.settle()

    assert failure_of(ends.server)[0] == lib.ERR_TLS_CERTIFICATE
    assert failure_of(ends.client)[0] == lib.ERR_TLS_REFUSED
    assert ends.server.peer is None


@pytest.mark.parametrize(
    "since",
    [-limits.CERTIFICATE_VALID_SECONDS - 10, 2 * limits.CLOCK_SKEW_SECONDS],
    ids=["over", "to come"],
)
def test_tls_refuses_certificates_that_are_not_valid_now(stage: Stage, since: float) -> None:
    ends = Ends(stage.dial(stage.member(issued=NOW + since)), stage.dialled())
    ends.settle()

    found, words = failure_of(ends.server)
    assert found == lib.ERR_TLS_CERTIFICATE
    assert "certificate has expired" in words or "not yet valid" in words


def test_tls_refuses_a_hello_of_another_incarnation_than_the_certificate(stage: Stage) -> None:
    ends = Ends(stage.dial(stage.member(), stage.hello(ProcId(3))), stage.dialled())
    ends.settle()

    assert failure_of(ends.server) == (
        lib.ERR_TLS_NAME,
        "the certificate is of incarnation 0000000000000002, the hello says 0000000000000003",
    )


def test_tls_refuses_a_server_of_another_incarnation_than_was_wanted(stage: Stage) -> None:
    """A recycled address: what answers there has a right certificate, of another process."""
    ends = Ends(stage.dial(stage.member(), expected=9), stage.dialled())
    ends.settle()

    assert failure_of(ends.client)[0] == lib.ERR_TLS_NAME
    assert ends.server.peer is None  # it was not told who had dialled


@pytest.mark.parametrize("plain", [b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95.", bytes(300)])
def test_tls_calls_plain_bytes_that(stage: Stage, plain: bytes) -> None:
    server = stage.dialled()
    server.step(plain)

    assert failure_of(server)[0] == lib.ERR_TLS_PLAINTEXT
    assert server.half_open == 0


def test_tls_ends_a_connection_that_breaks_off(stage: Stage) -> None:
    ends = Ends(stage.dial(stage.member()), stage.dialled())
    ends.settle()
    ends.server.answer(TLSVerdict.ADMITTED)
    ends.settle()
    ends.server.end()

    assert failure_of(ends.server)[0] == lib.ERR_TLS_CUT


def test_tls_does_not_take_a_recorded_session_again(stage: Stage) -> None:
    client, server = stage.dial(stage.member()), stage.dialled()
    recorded: list[bytes] = []
    wire = b""
    for _ in range(6):
        step = client.step(wire)
        recorded.append(step.wire)
        wire = server.step(step.wire).wire
    assert server.state is State.ASKING

    again = stage.dialled()
    for piece in recorded:
        again.step(piece)

    assert again.state in (State.HANDSHAKE, State.FAILED)
    assert again.peer is None


# ---- joining ---------------------------------------------------------------------------------------------------------


class Joined:
    """What a door and a joining host do: proof, certificate; all that is not the sessions' own work."""

    def __init__(self, stage: Stage, token: JoinToken, tokens: TokenLedger, now: float = 0.0) -> None:
        hello = stage.hello(CLIENT, is_join=True)
        self.ends = Ends(stage.dial(stage.joining(token.pin), hello), stage.dialled())
        self.ends.settle()
        self.is_admitted = False
        if self.ends.client.state is not State.PROOF:
            return
        client, server = self.ends
        client.prove(token.number, proof_of(token.secret, client.exporter, stage.authority.mesh, CLIENT))
        self.ends.settle()
        asked = server.peer
        assert asked is not None
        assert asked.is_join
        assert server.peer_name is None
        self.is_admitted = tokens.redeem(
            asked.token, asked.proof, exporter=server.exporter, incarnation=ProcId(asked.incarnation), now=now
        )
        server.answer(TLSVerdict.ADMITTED if self.is_admitted else TLSVerdict.TOKEN)
        self.ends.settle()


def test_tls_join_by_a_token_gives_a_certificate_and_works_once(stage: Stage) -> None:
    tokens = TokenLedger(stage.authority.pin)
    token = tokens.issue(0.0)
    joined = Joined(stage, JoinToken.parse(token.text), tokens)
    assert joined.is_admitted
    assert joined.ends.client.state is State.OPEN
    request = KeyRequest()
    asked = joined.ends.send(request.text)
    chain = stage.authority.certify(asked, CLIENT, NOW)
    joined.ends.server.step(b"")
    credentials = request.credentials(chain, token.pin)
    context = stage.context(credentials)
    stage.contexts.append(context)
    member = Ends(stage.dial(context, expected=SERVER), stage.dialled())
    member.settle()
    assert member.server.peer_name == f"trimesh://{stage.authority.mesh.hex()}/{CLIENT:016x}"

    again = Joined(stage, token, tokens)

    assert not again.is_admitted
    assert failure_of(again.ends.client)[0] == lib.ERR_TLS_REFUSED
    assert "used before" in failure_of(again.ends.client)[1]
    assert failure_of(again.ends.server)[0] == lib.ERR_DENIED
    told = again.ends.client.peer
    assert told is not None
    assert told.versions == ("", "", "")


def test_tls_proof_of_a_token_is_of_one_session(stage: Stage) -> None:
    """What both ends of a session know is no other session's, so a proof that was heard opens nothing."""
    tokens = TokenLedger(stage.authority.pin)
    first, second = (Joined(stage, tokens.issue(0.0), tokens).ends for _ in range(2))

    assert first.client.exporter == first.server.exporter
    assert first.client.exporter != second.client.exporter


def test_tls_join_with_an_old_token_is_refused(stage: Stage) -> None:
    tokens = TokenLedger(stage.authority.pin)
    joined = Joined(stage, tokens.issue(0.0), tokens, now=limits.JOIN_TOKEN_SECONDS)

    assert not joined.is_admitted


def test_tls_join_is_not_with_another_authority_than_the_token_says(stage: Stage) -> None:
    other = Authority(NOW)
    tokens = TokenLedger(other.pin)
    joined = Joined(stage, tokens.issue(0.0), tokens)

    assert failure_of(joined.ends.client)[0] == lib.ERR_TLS_CERTIFICATE
    assert joined.ends.server.peer is None


def test_tls_without_certificate_and_token_is_refused(stage: Stage) -> None:
    ends = Ends(stage.dial(stage.joining(stage.authority.pin)), stage.dialled())
    ends.settle()

    assert failure_of(ends.server) == (lib.ERR_TLS_CERTIFICATE, "a peer has neither a certificate nor a token")


def test_tls_of_a_server_without_joins_ends_at_the_missing_certificate(stage: Stage) -> None:
    closed = stage.context(stage.own)
    stage.contexts.append(closed)
    server = stage.dialled(closed)
    Ends(stage.dial(stage.joining(stage.authority.pin), stage.hello(CLIENT, is_join=True)), server).settle()

    assert failure_of(server)[0] == lib.ERR_TLS_CERTIFICATE


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_tls_half_open_sessions_are_bounded(stage: Stage) -> None:
    held = [stage.dialled() for _ in range(limits.TLS_HALF_OPEN_MAX)]
    with pytest.raises(LimitExceeded, match="not admitted yet"):
        stage.dialled()
    held[0].end()

    assert stage.dialled().half_open == limits.TLS_HALF_OPEN_MAX


@pytest.mark.parametrize("state", [State.HANDSHAKE, State.ASKING])
def test_tls_half_open_sessions_end_after_five_seconds(stage: Stage, state: State) -> None:
    server = stage.dialled()
    if state is State.ASKING:
        Ends(stage.dial(stage.member()), server).settle()
    assert server.state is state
    server.tick(4.999)
    assert server.state is state
    server.tick(0.001)

    assert failure_of(server)[0] == lib.ERR_TLS_LATE


def test_tls_half_open_sessions_are_sent_no_more_than_64_kib(stage: Stage) -> None:
    server = stage.dialled()
    taken, record = 0, b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + bytes(0x4000 - 4)  # a handshake message of 64 KiB
    while server.state is State.HANDSHAKE and taken < 2 * limits.TLS_HALF_OPEN_BYTES:
        taken += server.step(record).wire_taken
        record = b"\x16\x03\x01\x40\x00" + bytes(0x4000)

    assert server.state is State.FAILED
    assert taken <= limits.TLS_HALF_OPEN_BYTES


# ---- peers of other make ---------------------------------------------------------------------------------------------


@pytest.fixture
def files(stage: Stage, tmp_path: Path) -> Callable[[int], tuple[Path, Path]]:
    def write(incarnation: int) -> tuple[Path, Path]:
        credentials = stage.authority.credentials(ProcId(incarnation), NOW)
        chain, key = tmp_path / f"{incarnation}.pem", tmp_path / f"{incarnation}.key"
        chain.write_bytes(credentials.chain)
        key.write_bytes(credentials.key)
        return chain, key

    return write


def foreign(stage: Stage, files: Callable[[int], tuple[Path, Path]] | None, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=stage.authority.certificate.decode())
    if files is not None:
        context.load_cert_chain(*files(CLIENT))
    return context


def test_tls_of_pythons_ssl_comes_as_far_as_its_hello(stage: Stage, files: Callable[[int], tuple[Path, Path]]) -> None:
    server = stage.dialled()
    peer = ForeignPeer(foreign(stage, files, is_server=False), is_server=False)
    peer.meet(server)
    assert peer.tls.version() == "TLSv1.3"
    assert server.state is State.GREETING
    peer.tls.write(b"x" * limits.TLS_HELLO_BYTES)
    assert peer.exchange(server) == b""

    assert failure_of(server) == (lib.ERR_PEER, "the peer sent bytes that are no hello of trimesh")


def test_tls_as_a_client_of_pythons_ssl(stage: Stage, files: Callable[[int], tuple[Path, Path]]) -> None:
    """The other direction; its tickets are taken and not kept."""
    client = stage.dial(stage.member(), expected=5)
    context = foreign(stage, None, is_server=True)
    context.load_cert_chain(*files(5))
    peer = ForeignPeer(context, is_server=True)
    peer.meet(client)

    assert client.state is State.GREETING
    assert peer.tls.read(limits.TLS_HELLO_BYTES)[:8] == b"tmhello1"
    assert not peer.tls.session_reused


def test_tls_1_2_is_refused(stage: Stage, files: Callable[[int], tuple[Path, Path]]) -> None:
    server = stage.dialled()
    context = foreign(stage, files, is_server=False)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    peer = ForeignPeer(context, is_server=False)
    peer.meet(server)

    assert failure_of(server)[0] == lib.ERR_TLS_VERSION
    assert peer.problem is not None
    assert "alert" in str(peer.problem).lower()


def test_tls_1_2_servers_are_refused(stage: Stage, files: Callable[[int], tuple[Path, Path]]) -> None:
    client = stage.dial(stage.member(), expected=5)
    context = foreign(stage, None, is_server=True)
    context.load_cert_chain(*files(5))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    ForeignPeer(context, is_server=True).meet(client)

    assert failure_of(client)[0] == lib.ERR_TLS_VERSION


def test_tls_of_pythons_ssl_without_a_certificate_is_refused(stage: Stage) -> None:
    closed = stage.context(stage.own)
    stage.contexts.append(closed)
    server = stage.dialled(closed)
    ForeignPeer(foreign(stage, None, is_server=False), is_server=False).meet(server)

    assert failure_of(server)[0] == lib.ERR_TLS_CERTIFICATE


# ---- credentials -----------------------------------------------------------------------------------------------------


def test_tls_says_what_is_wrong_with_credentials(stage: Stage) -> None:
    own, other = stage.own, stage.authority.credentials(CLIENT, NOW)
    with pytest.raises(TLSError, match="the authority's certificates cannot be read"):
        TLSContext(authority=b"no certificate")
    with pytest.raises(TLSError, match="is not of the certificate"):
        TLSContext(chain=own.chain, key=other.key, authority=own.authority)
    with pytest.raises(ValueError, match="an authority or a pin"):
        TLSContext(chain=own.chain, key=own.key)


def test_tls_says_which_library_it_uses() -> None:
    assert "OpenSSL" in tls.library()[1]
