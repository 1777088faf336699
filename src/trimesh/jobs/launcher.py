"""How agents come to run on hosts: the seam between a job and whatever starts programs there.

A job makes one launcher, which starts one agent a host. An agent is a program that reads one line, its *order*, from
standard input and ends when that is closed; nothing secret is ever in its arguments or its environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec


class AgentOrder(msgspec.Struct, frozen=True):
    """What an agent is told by its standard input, as one line.

    Attributes:
        token: Join token; a secret.
        addresses: Where the controller listens, `host:port`, to be tried in order.
        host_id: Setting `host_id` of the processes there; "" leaves it to the machine.
        env: Environment variables that the agent sets, for itself and what it starts.
    """

    token: str
    addresses: tuple[str, ...]
    host_id: str = ""
    env: Mapping[str, str] = {}

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
        """Names of the hosts, in the order of the job; "" for one that will say its name itself."""
        ...

    @property
    def interface(self) -> str:
        """Address at which the controller listens for them, a number; it is advertised, too."""
        ...

    async def start(self, rank: int, order: AgentOrder) -> StartedAgent:
        """Start the agent of one host. A cancel leaves nothing of it.

        Args:
            rank: The place of the host in `hosts`.
            order: For its standard input.

        Raises:
            SpawnError: It cannot be started; the text has the words of whoever refused.
        """
        ...
