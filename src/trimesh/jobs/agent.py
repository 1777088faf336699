"""Agent: the program that runs on each host of a job, `python -m trimesh.jobs.agent`, with its order on standard input.

    read the order --> join (token -> certificate) --> dial as a member --> spawner --> serve, until
        the controller stops it | standard input is closed | its lease ends | the spawner is lost

However it ends, its processes end before it, or, if it was killed, a moment later: its spawner watches it. It dials
again when a connection breaks. `trimesh host join`, started by a user, a script or a scheduler, is the same program
(`join`).
"""

from __future__ import annotations

import gc
import math
import os
import secrets
import signal
import stat
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn, TypeVar

import msgspec
import trio

from trimesh import limits
from trimesh._native import lib
from trimesh._native.tls import TLSContext, TLSError, TLSSession
from trimesh._runtime.hosts import (
    AgentEnd,
    HostAgent,
    HostSessions,
    Neighbours,
    SessionPipe,
    SpawnerProcess,
    can_fork_spawners,
    fork_spawner,
    open_agent,
)
from trimesh._runtime.system import host_name
from trimesh._runtime.tasks import open_heard_signals
from trimesh._transport.relay import SessionDown, SessionInterrupted, open_relay
from trimesh.config import current
from trimesh.errors import HostRefused, LinkLost, TrimeshError, leaves
from trimesh.ids import ID_MAX, ProcId
from trimesh.jobs.addresses import checked_address
from trimesh.jobs.connections import (
    CANNOT_JOIN,
    LENGTH,
    DirectWays,
    ListenAddress,
    SecureSocket,
    context_of,
    direct_place,
    own_hello,
    own_versions,
)
from trimesh.jobs.identity import PLAIN, Credentials, IdentityError, JoinToken, KeyRequest, proof_of
from trimesh.jobs.launcher import AgentOrder
from trimesh.jobs.pki import OwnPKI, plain_warning

T = TypeVar("T")

_ORDER_BYTES_MAX: Final = 1 << 16
_EXIT_REFUSED: Final = 77
"""Exit code of an agent that was refused, or found no controller (EX_NOPERM)."""

RANK_VARIABLES: Final = (
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "RANK",
    "SKYPILOT_NODE_RANK",
)
"""Rank variables of Open MPI, PMIx, MPICH and Intel MPI, srun, torchrun, SkyPilot."""

_LINE_BYTES_MAX: Final = 4096
_LOOK_SECONDS: Final = 0.1
"""Polling interval for a token: a kubelet updates the folder by a symbolic link, without an event for the file."""

_DROPPED: Final = frozenset({lib.ERR_TLS_CUT, lib.ERR_TLS_LATE})
"""Failures of a connection that the door dropped, not refused: many hosts came at once, or this one was slow."""


class _NotAdmitted(LinkLost):
    """The connection ended before the door decided."""


class _Unreachable(LinkLost):
    """No process listens at the addresses of the program."""


class AgentState:
    """State file for probes: it holds one word, the state; its modification time shows that the agent runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tell(self, word: str) -> None:
        """Write the state. A file that cannot be written does not end the agent: its probe fails."""
        with suppress(OSError):
            self._path.write_text(f"{word}\n", encoding="ascii")


class PreparedAgent(msgspec.Struct, frozen=True, eq=False):
    """Prepared parts of an agent without an order: its incarnation, and a spawner that has imported its modules."""

    own: ProcId
    spawner: SpawnerProcess


class HostProgram:
    """One agent.

    Args:
        order: Its order.
        has_lifeline: True if it ends with its standard input. An agent that a user or a scheduler started has no
            lifeline: it ends by SIGTERM, by Ctrl-C, or when its lease does.
        state: State file; None for none.
        prepared: Parts that were started before the order arrived.
    """

    def __init__(
        self,
        order: AgentOrder,
        *,
        has_lifeline: bool = True,
        state: AgentState | None = None,
        prepared: PreparedAgent | None = None,
    ) -> None:
        self._order = order
        self._has_lifeline = has_lifeline
        self._state = state
        self._token = JoinToken.parse(order.token)
        self._spawner = None if prepared is None else prepared.spawner
        self._own = _new_incarnation() if prepared is None else prepared.own
        self._own_pki: Credentials | None = None
        self._controller = ProcId(0)
        self._route = ""
        self._interrupted = trio.Event()
        self._down = trio.Event()

    async def run(self) -> AgentEnd:
        """Join, serve, and return why it ended.

        Raises:
            TrimeshError: It could not join.
        """
        try:
            credentials = await self._unless_told(self._join)
        except (TLSError, IdentityError) as error:  # a cause on this machine, which the controller cannot know
            await self._tell_why_not(str(error))
            raise
        if credentials is None:
            return self._told
        context = context_of(credentials)
        try:
            return await self._serve(context, credentials)
        finally:
            context.close()

    # ---- joining ---------------------------------------------------------------------------------------------

    async def _join(self) -> Credentials:
        if self._token.is_plain:
            self._own_pki = PLAIN
            sys.stderr.write(f"trimesh agent: {plain_warning('the program at ' + ', '.join(self._order.addresses))}\n")
        elif self._order.pki is not None:
            self._own_pki = await trio.to_thread.run_sync(self._order.pki.read)
        context = TLSContext(pin=self._token.pin) if self._own_pki is None else context_of(self._own_pki)
        try:
            return await self._until_decided(lambda: self._join_once(context))
        finally:
            context.close()

    async def _tell_why_not(self, text: str) -> None:
        """Send the door the reason why this host cannot join, in plain text, as there is no session."""
        with trio.move_on_after(limits.HOST_DIAL_SECONDS), suppress(OSError, LinkLost, trio.BrokenResourceError):
            async with await _dial(self._order.addresses, limits.HOST_DIAL_SECONDS) as stream:
                await stream.send_all(CANNOT_JOIN + f"{host_name()}: {text}".encode()[:400] + b"\n")
                await stream.send_eof()
                await stream.receive_some(1)  # returns when the door has read it and closed

    async def _until_decided(self, once: Callable[[], Awaitable[T]]) -> T:
        """Dial the door until it decides: if many hosts come at once, it drops the slowest (JD-1)."""
        until = trio.current_time() + (limits.HOST_REACH_SECONDS if self._order.is_patient else 0)
        with trio.move_on_after(limits.HOST_JOIN_SECONDS):
            while True:
                try:
                    return await once()
                except _NotAdmitted:
                    await trio.sleep(limits.DOOR_PATIENCE_SECONDS)
                except _Unreachable:
                    if trio.current_time() >= until:
                        raise
                    await trio.sleep(limits.HOST_REDIAL_SECONDS)
        seconds = f"limits.HOST_JOIN_SECONDS ({limits.HOST_JOIN_SECONDS:g} s)"
        raise LinkLost(f"the program at {', '.join(self._order.addresses)} did not let this host join within {seconds}")

    async def _join_once(self, context: TLSContext) -> Credentials:
        async with self._dialled(context, is_join=True) as secure:
            return await self._get_credentials(secure)

    async def _get_credentials(self, secure: SecureSocket) -> Credentials:
        if self._own_pki is not None:
            await secure.receive_exactly(LENGTH.size)  # confirms that it has joined
            assert secure.tls.peer is not None
            self._controller = ProcId(secure.tls.peer.incarnation)
            return self._own_pki
        request = KeyRequest()
        await secure.send(LENGTH.pack(len(request.text)) + request.text)
        size = LENGTH.unpack(await secure.receive_exactly(LENGTH.size))[0]
        if size > limits.PKI_FILE_BYTES_MAX:
            most = f"limits.PKI_FILE_BYTES_MAX ({limits.PKI_FILE_BYTES_MAX})"
            raise LinkLost(f"a certificate must have at most {most} bytes, got {size}")
        chain = await secure.receive_exactly(size)
        assert secure.tls.peer is not None
        self._controller = ProcId(secure.tls.peer.incarnation)
        return request.credentials(chain, self._token.pin, time.time())

    @asynccontextmanager
    async def _dialled(
        self, context: TLSContext, *, is_join: bool = False, connect_seconds: float = math.inf
    ) -> AsyncGenerator[SecureSocket, None]:
        """Dial the addresses, each for `connect_seconds`, and shake hands at the first that answers."""
        stream = await _dial(self._order.addresses, connect_seconds)
        self._route = stream.socket.getsockname()[0]
        is_foreign = self._own_pki is not None  # then each connection proves the token: TK-4
        hello = own_hello(self._own, self._token.mesh, is_join=is_join or is_foreign)
        session = context.open(hello, is_server=False, expected=self._controller, has_names=not is_foreign)
        secure = SecureSocket(stream.socket, session)
        try:
            try:
                await secure.shake_hands(prove=self._prove, seconds=limits.HOST_JOIN_SECONDS)
            except LinkLost as error:
                failure = secure.tls.failure
                if failure is not None and failure.status == lib.ERR_TLS_PLAINTEXT:
                    own, other = ("without", "uses") if self._token.is_plain else ("with", "does not use")
                    raise HostRefused(
                        f"the program at {', '.join(self._order.addresses)} {other} TLS, and the token of this host is "
                        f"for sessions {own}: use a token of the door at this address"
                    ) from error
                if failure is None or failure.status in _DROPPED:
                    raise _NotAdmitted(str(error)) from error
                if failure.status != lib.ERR_TLS_REFUSED:
                    raise
                trimesh, python, _ = own_versions()
                raise HostRefused(
                    f"the program at {', '.join(self._order.addresses)} does not let this host (trimesh {trimesh}, "
                    f"Python {python}) join: {failure}"
                ) from error
            yield secure
        finally:
            secure.close()

    def _prove(self, tls: TLSSession) -> None:
        token, own = self._token, self._own_pki
        if own is not None and not own.accepts(tls.peer_name):
            raise HostRefused(
                f"the program at {', '.join(self._order.addresses)} must be one of the peers of this host, "
                f"{', '.join(own.peers)}, and its certificate names {tls.peer_name!r}"
            )
        tls.prove(token.number, proof_of(token.secret, tls.exporter, token.mesh, self._own))

    # ---- serving ---------------------------------------------------------------------------------------------

    async def _serve(self, context: TLSContext, credentials: Credentials) -> AgentEnd:
        sessions = HostSessions()
        async with open_relay(sessions.take) as relay:

            async def begin() -> SessionPipe:
                async with self._dialled(context) as secure:
                    pipe = sessions.begin(
                        relay,
                        self._controller,
                        is_dialler=True,
                        lease_seconds=limits.AGENT_LEASE_SECONDS,  # begins now, however long the door took
                        session_id=secrets.randbelow(ID_MAX) + 1,
                    )
                    pipe.session.attach(secure.hand_over())
                return pipe

            pipe = await self._unless_told(lambda: self._until_decided(begin))
            if pipe is None:
                return self._told
            async with trio.open_nursery() as nursery:
                ways = DirectWays(context, credentials, self._own, self._token.mesh, self._direct_place(), nursery)
                neighbours = Neighbours(sessions, relay, self._own, ways)
                self._listen_to(sessions, pipe, neighbours)
                nursery.start_soon(self._dial_again, context, pipe)
                async with open_agent(
                    pipe,
                    controller=self._controller,
                    own=self._own,
                    host_id=self._order.host_id,
                    spawner=self._spawner,
                    neighbours=neighbours,
                ) as agent:
                    end = await self._serve_until_told(agent)
                    pipe.session.close()  # first: so the controller gets one end of the host, not one of each process
                nursery.cancel_scope.cancel()
            with trio.move_on_after(limits.HOST_BYE_SECONDS):
                await self._down.wait()
            return end

    def _listen_to(self, sessions: HostSessions, pipe: SessionPipe, neighbours: Neighbours) -> None:
        def interrupted(event: SessionInterrupted) -> None:
            if event.session is pipe.session:
                self._interrupted.set()
            else:
                neighbours.interrupted(event.session)

        def down(event: SessionDown) -> None:
            if event.session is pipe.session:
                self._down.set()

        sessions.on_interrupted, sessions.on_down = interrupted, down
        if not pipe.session.is_connected:
            self._interrupted.set()

    def _direct_place(self) -> ListenAddress:
        settings = current()
        return direct_place(
            settings.direct,
            settings.direct_advertise,
            self._route,
            is_one_machine=self._order.is_one_machine,
        )

    async def _serve_until_told(self, agent: HostAgent) -> AgentEnd:
        return await self._unless_told(agent.serve, self._tell_state) or self._told

    # ---- ends and reconnection -------------------------------------------------------------------------------

    @property
    def _told(self) -> AgentEnd:
        return AgentEnd("its standard input was closed" if self._has_lifeline else "it was stopped by a signal")

    async def _unless_told(
        self, work: Callable[[], Awaitable[T]], beside: Callable[[], Awaitable[None]] | None = None
    ) -> T | None:
        """Return the result of `work`; None if the agent has to end first, which cancels `work` and `beside`."""
        result: T | None = None
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_input if self._has_lifeline else self._watch_signals, nursery.cancel_scope)
            if beside is not None:
                nursery.start_soon(beside)
            try:
                result = await work()
            except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return result

    async def _tell_state(self) -> None:
        while self._state is not None:
            self._state.tell("joined")
            await trio.sleep(limits.AGENT_STATE_SECONDS)

    async def _watch_signals(self, scope: trio.CancelScope) -> None:
        """End the agent at a signal."""
        with open_heard_signals(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                scope.cancel()

    async def _watch_input(self, scope: trio.CancelScope) -> None:
        """End the agent when its lifeline ends."""
        async with trio.lowlevel.FdStream(os.dup(0)) as stream:
            while await stream.receive_some():
                pass
        scope.cancel()

    async def _dial_again(self, context: TLSContext, pipe: SessionPipe) -> None:
        """Dial again whenever the connection is lost; the lease of the session bounds the time."""
        while True:
            await self._interrupted.wait()
            self._interrupted = trio.Event()
            while not pipe.session.is_connected:
                try:
                    with trio.move_on_after(limits.HOST_UNHEARD_SECONDS):
                        async with self._dialled(context, connect_seconds=limits.HOST_DIAL_SECONDS) as secure:
                            pipe.session.attach(secure.hand_over())
                except (HostRefused, LinkLost, OSError):
                    await trio.sleep(limits.HOST_REDIAL_SECONDS)


async def _dial(addresses: tuple[str, ...], connect_seconds: float) -> trio.SocketStream:
    problems = list[str]()
    for address in addresses:
        host, port = checked_address(address)
        try:
            with trio.move_on_after(connect_seconds):
                return await trio.open_tcp_stream(host, port)
            problems.append(f"{address}: no answer within {connect_seconds:g} s")
        except OSError as error:
            problems.append(f"{address}: {error}")
    raise _Unreachable(f"the controller cannot be reached: {'; '.join(problems)}")


def main() -> NoReturn:
    """Run an agent by the order on standard input."""
    be_agent(lambda: AgentOrder.parse(_read_line()), prepared=_forked())


def main_prepared() -> NoReturn:
    """Prepare the slow parts of an agent, then run it by the order on standard input."""
    prepared = _forked()
    if prepared is None:
        own = _new_incarnation()
        prepared = PreparedAgent(own, SpawnerProcess.start(own))
    be_agent(lambda: AgentOrder.parse(_read_line()), prepared=prepared)


def main_alone() -> NoReturn:
    """Run an agent by the order on standard input, whose end does not end it; see `HostProgram`."""
    be_agent(lambda: AgentOrder.parse(_read_line()), has_lifeline=False)


def _forked() -> PreparedAgent | None:
    """Return a prepared agent with a spawner forked from this process, if possible; no order or token was read yet."""
    if not can_fork_spawners():
        return None
    own = _new_incarnation()
    return PreparedAgent(own, fork_spawner(own))


def _new_incarnation() -> ProcId:
    return ProcId(secrets.randbelow(ID_MAX) + 1)


def be_agent(
    read_order: Callable[[], AgentOrder],
    *,
    has_lifeline: bool = True,
    state: AgentState | None = None,
    prepared: PreparedAgent | None = None,
) -> NoReturn:
    """Run an agent to its end, see `HostProgram`; write a failure in one line.

    Ends by `os._exit`: its threads and the interpreter need no clean-up.

    `read_order` may raise `ValueError`, `TrimeshError` or `OSError`.
    """
    code, text = 0, ""
    gc.enable()  # `_BOOT` (jobs/local.py) disables it during imports, which make no garbage
    try:
        order = read_order()
        os.environ.update(order.env)
        program = HostProgram(order, has_lifeline=has_lifeline, state=state, prepared=prepared)
        end = trio.run(program.run)
        code, text = int(end.is_failure), f"trimesh agent: {end.reason}\n"
    except (TrimeshError, ValueError, OSError) as error:
        code = _EXIT_REFUSED if isinstance(error, (HostRefused, LinkLost, TLSError)) else 1
        text = f"trimesh agent: {error}\n"
    except KeyboardInterrupt:  # a signal before the order
        text = "trimesh agent: it was stopped by a signal\n"
    except BaseExceptionGroup as error:  # from the nurseries around its tasks
        code, text = 1, f"trimesh agent: {next(iter(leaves(error)))}\n"
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(code)


def _read_line() -> bytes:
    """Read the order and nothing after it: the agent then watches for the end of the input."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _ORDER_BYTES_MAX:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


# ---- trimesh host join -----------------------------------------------------------------------------------------------


def join(
    addresses: Sequence[str],
    token_file: str,
    line: int | None = None,
    *,
    wait: float | None = None,
    state_file: str | None = None,
    pki: OwnPKI | None = None,
) -> NoReturn:
    """Run an agent of this host until the controller or a signal ends it; ends this process.

    Exit codes: 0 if the controller or a signal ended it; 77 if it was refused or found no controller; 1 otherwise.

    For the arguments, see the command (`cli/jobs.py`).
    """
    state = None if state_file is None else AgentState(Path(state_file))

    def read_order() -> AgentOrder:
        if wait is not None:
            wait_for_token(Path(token_file), wait, state)
        token, *said = read_token(token_file, rank_of(os.environ) if line is None else line).split() or [""]
        for address in said:
            checked_address(address)
        if not addresses and not said:
            raise IdentityError(
                "a host needs an address of the program, host:port, as an argument or behind the token in its file, "
                "got none"
            )
        return AgentOrder(token, tuple(addresses) or tuple(said), pki=pki, is_patient=wait is not None)

    be_agent(read_order, has_lifeline=False, state=state)


def wait_for_token(path: Path, seconds: float, state: AgentState | None) -> None:
    """Wait for a token file, or a signal.

    Raises:
        IdentityError: Its folder has not changed for `seconds`: the program that writes the file is gone.
        KeyboardInterrupt: SIGTERM or SIGINT came.
    """

    def end(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    before = signal.signal(signal.SIGTERM, end)  # the first process of a container ignores it by default
    try:
        until, changed = time.monotonic() + seconds, _changed(path.parent)
        told = -limits.AGENT_STATE_SECONDS
        while not _has_text(path):
            now = time.monotonic()
            if changed != (changed := _changed(path.parent)):
                until = now + seconds
            if now > until:
                raise IdentityError(
                    f"the program must write a token to {path}, and its folder has not changed for {seconds:g} s: "
                    "if the program lives, wait longer by --wait"
                )
            if state is not None and now - told >= limits.AGENT_STATE_SECONDS:
                state.tell("waiting")
                told = now
            time.sleep(_LOOK_SECONDS)
    finally:
        signal.signal(signal.SIGTERM, before)


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _has_text(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def rank_of(environ: Mapping[str, str]) -> int:
    """Return the rank of this process by the variables of its starter; 0 without any."""
    for name in RANK_VARIABLES:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return 0


def read_token(path: str, line: int) -> str:
    """Return a line of a file of tokens.

    Raises:
        IdentityError: It cannot be read, others can read it, or it has no such line.
    """
    if path == "-":
        return sys.stdin.readline(_LINE_BYTES_MAX)
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and not _is_private(found):
                raise IdentityError(
                    f"a file of join tokens needs to be readable by its owner, this user, only; got {path} of user "
                    f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; write: chmod 600 {path}"
                )
            lines = file.read().splitlines()
    except OSError as error:
        raise IdentityError(f"the tokens need to be in a readable file, got {path}: {error.strerror}") from error
    if not 0 <= line < len(lines):
        raise IdentityError(
            f"{path} must have a line for each host: it has {len(lines)}, and this host needs line {line}, from 0 on; "
            "write more by door.write_tokens(path, hosts), or pass another --line"
        )
    return lines[line]


def _is_private(found: os.stat_result) -> bool:
    """Return whether a file is private to this user, or belongs to root and is readable by a group of this process.

    The files of a Kubernetes Secret belong to root, and to the group of the pod, if it has one.
    """
    if found.st_mode & 0o037 or found.st_uid not in (os.geteuid(), 0):
        return False
    return not found.st_mode & 0o040 or (found.st_uid == 0 and found.st_gid in (os.getegid(), *os.getgroups()))


if __name__ == "__main__":
    main()
