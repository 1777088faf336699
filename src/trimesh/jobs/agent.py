"""The program that runs on each host of a job: `python -m trimesh.jobs.agent`, its order on standard input.

    read the order --> join (token -> certificate) --> dial as a member --> spawner --> serve, until
        the controller says stop | standard input is closed | its lease ends | the spawner is lost

Whatever ends it, what it has started is gone before it is, or, if it was killed, a moment later: its spawner watches
it. A connection that breaks is dialled again.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final, NoReturn

import trio

from trimesh import limits
from trimesh._native import status
from trimesh._native.tls import TLSContext, TLSError, TLSSession
from trimesh._runtime.hosts import HostAgent, HostSessions, SessionPipe, open_agent
from trimesh._transport.relay.base import SessionInterrupted
from trimesh._transport.relay.native import open_relay
from trimesh.errors import HostRefused, LinkLost, TrimeshError, leaves
from trimesh.ids import ID_MAX, ProcId
from trimesh.jobs.door import LENGTH
from trimesh.jobs.handshake import SecureSocket, own_hello, own_versions
from trimesh.jobs.identity import Credentials, JoinToken, KeyRequest, proof_of
from trimesh.jobs.launcher import AgentOrder

_ORDER_BYTES_MAX: Final = 1 << 16
_REDIAL_SECONDS: Final = 0.05
_EXIT_REFUSED: Final = 77
"""Exit code of an agent that may not join (EX_NOPERM)."""


class HostProgram:
    """One agent.

    Args:
        order: What it was told.
        has_lifeline: Whether it ends with its standard input. One that was started by a person or a scheduler has none
            that says anything: it ends by SIGTERM, by Ctrl-C, or when its lease does.
    """

    def __init__(self, order: AgentOrder, *, has_lifeline: bool = True) -> None:
        self._order = order
        self._has_lifeline = has_lifeline
        self._token = JoinToken.parse(order.token)
        self._own = ProcId(secrets.randbelow(ID_MAX) + 1)
        self._controller = ProcId(0)
        self._interrupted = trio.Event()
        self._down = trio.Event()

    async def run(self) -> str:
        """Join, serve, and return why it ended.

        Raises:
            TrimeshError: It could not join.
        """
        credentials = await self._join()
        context = TLSContext(chain=credentials.chain, key=credentials.key, authority=credentials.authority)
        try:
            return await self._serve(context)
        finally:
            context.close()

    # ---- joining ---------------------------------------------------------------------------------------------

    async def _join(self) -> Credentials:
        context = TLSContext(pin=self._token.pin)
        try:
            async with self._dialled(context, is_join=True) as secure:
                request = KeyRequest()
                await secure.send(LENGTH.pack(len(request.text)) + request.text)
                size = LENGTH.unpack(await secure.receive_exactly(LENGTH.size))[0]
                if size > limits.PKI_FILE_BYTES_MAX:
                    raise LinkLost(f"a certificate of {size} bytes came")
                chain = await secure.receive_exactly(size)
                assert secure.tls.peer is not None
                self._controller = ProcId(secure.tls.peer.incarnation)
                return request.credentials(chain, self._token.pin)
        finally:
            context.close()

    @asynccontextmanager
    async def _dialled(self, context: TLSContext, *, is_join: bool = False) -> AsyncGenerator[SecureSocket, None]:
        """Dial the first address that answers, and shake hands."""
        stream = await _dial(self._order.addresses)
        hello = own_hello(self._own, self._token.mesh, is_join=is_join)
        secure = SecureSocket(stream.socket, context.open(hello, is_server=False, expected=self._controller))
        try:
            try:
                await secure.shake_hands(prove=self._prove)
            except LinkLost as error:
                failure = secure.tls.failure
                if failure is None or failure.status != status.ERR_TLS_REFUSED:
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
        token = self._token
        tls.prove(token.number, proof_of(token.secret, tls.exporter, token.mesh, self._own))

    # ---- serving ---------------------------------------------------------------------------------------------

    async def _serve(self, context: TLSContext) -> str:
        sessions = HostSessions()
        sessions.on_interrupted = self._lost_connection
        sessions.on_down = lambda _: self._down.set()
        async with open_relay(sessions.take) as relay:
            pipe = sessions.begin(
                relay,
                self._controller,
                is_dialler=True,
                lease_seconds=limits.AGENT_LEASE_SECONDS,
                session_id=secrets.randbelow(ID_MAX) + 1,
            )
            async with self._dialled(context) as secure:
                pipe.session.attach(secure.hand_over())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._dial_again, context, pipe)
                async with open_agent(
                    pipe, controller=self._controller, own=self._own, host_id=self._order.host_id
                ) as agent:
                    reason = await self._serve_until_told(agent)
                    pipe.session.close()  # before what runs here ends: the controller hears of one end, not of each
                nursery.cancel_scope.cancel()
            with trio.move_on_after(limits.HOST_BYE_SECONDS):
                await self._down.wait()
            return reason

    async def _serve_until_told(self, agent: HostAgent) -> str:
        reason = "its standard input was closed" if self._has_lifeline else "it was told to by a signal"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_input if self._has_lifeline else self._watch_signals, nursery.cancel_scope)
            reason = await agent.serve()
            nursery.cancel_scope.cancel()
        return reason

    async def _watch_signals(self, scope: trio.CancelScope) -> None:
        """End when a signal says so."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                scope.cancel()

    async def _watch_input(self, scope: trio.CancelScope) -> None:
        """End when the lifeline does."""
        async with trio.lowlevel.FdStream(os.dup(0)) as stream:
            while await stream.receive_some():
                pass
        scope.cancel()

    def _lost_connection(self, _: SessionInterrupted) -> None:
        self._interrupted.set()

    async def _dial_again(self, context: TLSContext, pipe: SessionPipe) -> None:
        """Dial whenever the connection was lost; the lease of the session bounds for how long that makes sense."""
        while True:
            await self._interrupted.wait()
            self._interrupted = trio.Event()
            while not pipe.session.is_connected:
                try:
                    async with self._dialled(context) as secure:
                        pipe.session.attach(secure.hand_over())
                except (HostRefused, LinkLost, OSError):
                    await trio.sleep(_REDIAL_SECONDS)


async def _dial(addresses: tuple[str, ...]) -> trio.SocketStream:
    problems = list[str]()
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            return await trio.open_tcp_stream(host.strip("[]"), int(port))
        except OSError as error:
            problems.append(f"{address}: {error}")
    raise LinkLost(f"the controller cannot be reached: {'; '.join(problems)}")


def main() -> NoReturn:
    """Be the agent that standard input orders."""
    be_agent(lambda: AgentOrder.parse(_read_line()))


def be_agent(read_order: Callable[[], AgentOrder], *, has_lifeline: bool = True) -> NoReturn:
    """Be an agent until it ends, see `HostProgram`; what went wrong is written in one line.

    Ends by `os._exit`: its threads and the interpreter have nothing to do any more.

    Args:
        read_order: Returns what it is told; may raise `ValueError`, `TrimeshError` or `OSError`.
        has_lifeline: See `HostProgram`.
    """
    code, text = 0, ""
    try:
        order = read_order()
        os.environ.update(order.env)
        text = f"trimesh agent: {trio.run(HostProgram(order, has_lifeline=has_lifeline).run)}\n"
    except (TrimeshError, ValueError, OSError) as error:
        code = _EXIT_REFUSED if isinstance(error, (HostRefused, LinkLost, TLSError)) else 1
        text = f"trimesh agent: {error}\n"
    except KeyboardInterrupt:
        code, text = 1, "trimesh agent: it was told to by a signal\n"
    except BaseExceptionGroup as error:  # of the nurseries around its tasks
        code, text = 1, f"trimesh agent: {next(iter(leaves(error)))}\n"
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(code)


def _read_line() -> bytes:
    """Read the order, and nothing behind it: the end of the input is what the agent watches afterwards."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _ORDER_BYTES_MAX:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


if __name__ == "__main__":
    main()
