"""How agents come to run on hosts: the seam between a job and whatever starts programs there.

A job makes one launcher, which starts one agent a host. An agent is a program that reads one line, its *order*, from
standard input and ends when that is closed; nothing secret is ever in its arguments or its environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import msgspec

from trimesh.jobs.pki import OwnPKI


class AgentOrder(msgspec.Struct, frozen=True):
    """What an agent is told by its standard input, as one line.

    Attributes:
        token: Join token; a secret.
        addresses: Where the controller listens, `host:port`, to be tried in order.
        host_id: Setting `host_id` of the processes there; "" leaves it to the machine.
        env: Environment variables that the agent sets, for itself and what it starts.
        is_one_machine: Whether all hosts of the job are this machine, so that agents may meet at a loopback address.
        pki: Certificates of the user's, whose files the agent reads; None joins for one of the mesh.
    """

    token: str
    addresses: tuple[str, ...]
    host_id: str = ""
    env: Mapping[str, str] = {}
    is_one_machine: bool = False
    pki: OwnPKI | None = None

    def __repr__(self) -> str:
        return f"AgentOrder({', '.join(self.addresses)}, token not shown)"

    @property
    def line(self) -> bytes:
        """The order as one line, with its newline."""
        return msgspec.json.encode(self) + b"\n"

    @staticmethod
    def parse(line: bytes) -> AgentOrder:
        """Read `line`. The error shows nothing of it.

        Raises:
            ValueError: It is none.
        """
        try:
            return msgspec.json.decode(line, type=AgentOrder)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ValueError(f"an agent reads its order as one line, got {len(line)} bytes that are none") from None


class AgentExit(msgspec.Struct, frozen=True):
    """How an agent has ended.

    Attributes:
        text: In words: "exit code 3", "SIGKILL", or those of the scheduler.
        last_words: The last lines that it has written, or "".
        reason: See `HostLost.reason`.
    """

    text: str
    last_words: str = ""
    reason: str = "agent exit"


class StartedAgent(Protocol):
    """An agent that was started."""

    async def wait(self) -> AgentExit:
        """Wait until it has ended, or is not known to live any more, and return how. Called once."""
        ...

    async def stop(self) -> None:
        """End it, with what it has started, by force; return when nothing of it is left. Shielded, bounded."""


class Launcher(Protocol):
    """Starts the agents of one run of a job. Opened once; the rest is used while it is open."""

    def open(self) -> AbstractAsyncContextManager[object]:
        """Get ready to start agents: find addresses, wait in a queue. Once left, nothing of it is left.

        Entering it may take for as long as a queue does; a cancel leaves nothing queued.

        Raises:
            SpawnError: It cannot; the text has the words of whoever refused.
        """
        ...

    @property
    def hosts(self) -> Sequence[str]:
        """Names of the hosts, in the order of the job, then of spare ones; "" for one that will say its name itself."""
        ...

    @property
    def interface(self) -> str:
        """Address at which the controller listens for them, a number; it is advertised, too."""
        ...

    async def start(self, rank: int, order: AgentOrder) -> StartedAgent:
        """Start the agent of one host. A cancel leaves nothing of it. Called again where one was lost and has ended.

        Args:
            rank: The place of the host in `hosts`.
            order: For its standard input.

        Raises:
            SpawnError: It cannot be started; the text has the words of whoever refused.
        """
        ...


@runtime_checkable
class QueuedLauncher(Launcher, Protocol):
    """A launcher whose agents are told where to dial when they are asked for, and wait for their orders in a queue."""

    @property
    def port(self) -> int:
        """The port at which the controller listens; 0 lets the system choose."""
        ...

    @property
    def advertised(self) -> tuple[str, ...]:
        """What agents dial, `host` or `host:port`, where that is another address than `interface`."""
        ...

    async def allocate(self, addresses: tuple[str, ...], say: Callable[[str], None]) -> None:
        """Get a place for each agent; called once, before the first `start`, after which `hosts` has their names.

        It may take for as long as a queue does. No token is out yet, so none becomes too old. What it has asked for
        ends with the block of `open`.

        Args:
            addresses: Where agents will dial, in order.
            say: Shows what is waited for.

        Raises:
            SpawnError: There is none; the text has the words of whoever refused.
        """
        ...


@runtime_checkable
class GrowingLauncher(Launcher, Protocol):
    """A launcher that can get more hosts than it was opened with. Used while it is open, from several tasks."""

    @property
    def starts_again(self) -> bool:
        """Whether `start` can be called again for a host whose agent has ended; else another comes in its place."""
        ...

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        """Get a place for more agents, and return their places in `hosts`, which has their names then.

        It may take for as long as a queue does; a cancel leaves nothing queued.

        Args:
            count: How many.
            say: Shows what is waited for.

        Raises:
            SpawnError: There is none; the text has the words of whoever refused.
        """
        ...

    async def give_back(self, ranks: Sequence[int]) -> None:
        """Give up what `grow` has got, and nothing runs on any more. Shielded, bounded."""
        ...


@runtime_checkable
class TellingLauncher(Launcher, Protocol):
    """A launcher that waits in a queue while it is opened, and says for what."""

    def tell_by(self, say: Callable[[str], None]) -> None:
        """Learn, before it is opened, what shows the words of what is waited for, each time anew."""
        ...


@runtime_checkable
class LimitedLauncher(Launcher, Protocol):
    """A launcher whose hosts have an end that is known before it comes: a limit of time. Used while it is open."""

    async def wait_notice(self) -> str:
        """Wait until the end is so near that a program is to save what it has; return why, in words."""
        ...

    async def wait_end(self, ahead: float = 0.0) -> str:
        """Wait until the block of the hosts has to be left now, to be left in order; return why, in words.

        Args:
            ahead: Seconds more that leaving it takes.
        """
        ...


@runtime_checkable
class ReplacingLauncher(Launcher, Protocol):
    """A launcher that may have another machine at a place of `hosts`, for agents that are started there again."""

    async def replace(self, rank: int) -> None:
        """Have another one there, where there is one; the agent that was there has ended. `hosts` has its name then.

        Raises:
            SpawnError: It cannot be had.
        """
        ...
