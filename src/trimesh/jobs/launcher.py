"""How agents come to run on hosts: the seam between a job and whatever starts programs there.

A job makes one launcher, which starts one agent a host. An agent is a program that reads one line, its *order*, from
standard input and ends when that is closed; nothing secret is ever in its arguments or its environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec
import trio

from trimesh.errors import SpawnError
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


class Launcher(ABC):
    """Starts the agents of one run of a job. Opened once; the rest is used while it is open, from several tasks.

    A subclass sets `hosts` and `interface` and defines `open` and `start`. The rest has defaults: no queue, no further
    hosts, no time limit.

    Attributes:
        hosts: Names of the hosts, in the order of the job, then of spare ones; "" for one that reports its own.
        interface: Address at which the controller listens for them, a number; it is advertised, too.
        port: At which the controller listens; 0 lets the system choose.
        advertised: What agents dial, `host` or `host:port`, where that is another address than `interface`.
        starts_again: Whether `start` can be called again for a host whose agent has ended; else `grow` gets another
            one in its place.
    """

    hosts: Sequence[str]
    interface: str
    port: int = 0
    advertised: tuple[str, ...] = ()
    starts_again: bool = True

    @property
    def can_grow(self) -> bool:
        """Whether it defines `grow`; else only spare hosts can be added."""
        return type(self).grow is not Launcher.grow

    def tell_by(self, say: Callable[[str], None]) -> None:
        """Receive, before it is opened, the function that shows what `open` waits for, each time anew."""
        del say

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[object]:
        """Get ready to start agents: find addresses, wait in a queue. Once left, nothing of it is left.

        Entering it may take for as long as a queue does; a cancel leaves nothing queued.

        Raises:
            SpawnError: It cannot; the message includes the scheduler's reason.
        """

    async def allocate(self, addresses: tuple[str, ...], say: Callable[[str], None]) -> None:
        """Get a place for each agent; called once, before the first `start`, after which `hosts` has their names.

        It may take for as long as a queue does. No token is out yet, so none becomes too old. What it has asked for
        ends with the block of `open`.

        Args:
            addresses: What agents will dial, in order.
            say: Shows what is waited for.

        Raises:
            SpawnError: No allocation was granted; the message includes the scheduler's reason.
        """
        del addresses, say
        await trio.lowlevel.checkpoint()

    @abstractmethod
    async def start(self, rank: int, order: AgentOrder) -> StartedAgent:
        """Start the agent of one host. A cancel leaves nothing of it. Called again where one was lost and has ended.

        Args:
            rank: The place of the host in `hosts`.
            order: For its standard input.

        Raises:
            SpawnError: It cannot be started; the message includes the scheduler's reason.
        """

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        """Get a place for more agents, and return their places in `hosts`, which has their names then.

        It may take for as long as a queue does; a cancel leaves nothing queued.

        Args:
            count: How many.
            say: Shows what is waited for.

        Raises:
            SpawnError: No more were granted; the message includes the scheduler's reason.
        """
        del say
        await trio.lowlevel.checkpoint()
        raise SpawnError(f"{count} more hosts cannot be had: {type(self).__name__} defines no grow()")

    async def give_back(self, ranks: Sequence[int]) -> None:
        """Give up what `grow` has got, and nothing runs on any more. Shielded, bounded."""
        del ranks
        await trio.lowlevel.checkpoint()

    async def replace(self, rank: int) -> None:
        """Get another machine at a place of `hosts`, if there is one, after the program has given up the host there.

        The agent that was there has ended. `hosts` has the name of the new machine afterwards.

        Raises:
            SpawnError: It cannot be had.
        """
        del rank
        await trio.lowlevel.checkpoint()

    async def wait_notice(self) -> str:
        """Wait until a time limit of the hosts is so near that a program is to save what it has; return why."""
        await trio.sleep_forever()

    async def wait_end(self, ahead: float = 0.0) -> str:
        """Wait until the block of the hosts has to be left now, to be left in order; return why, in words.

        Args:
            ahead: Seconds more that leaving it takes.
        """
        del ahead
        await trio.sleep_forever()
