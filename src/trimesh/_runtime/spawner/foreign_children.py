"""Questions of workers about processes that their spawner does not know, as the spawner sees them.

They go to the controller, which asks its other spawners (`spawner_siblings`); the answer goes back as if it were ours.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import msgspec

from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.families import Connection
from trimesh._runtime.spawner.socket import close_all
from trimesh.errors import ProtocolError

Send = Callable[[Connection, wire.AnyRecord, tuple[int, ...]], bool]
"""Sends, or queues, a record with descriptors, which are given away; returns False when it will never arrive."""


class ForeignQuestions:
    """What was asked and is not answered yet; one entry for each request of a worker.

    Args:
        root: Connection of the controller.
    """

    def __init__(self, root: Connection, send: Send) -> None:
        self._root = root
        self._send = send
        self._numbers = count(1)
        self._asked: dict[int, tuple[Connection, int]] = {}

    def may_ask(self, sender: Connection, proc_id: int) -> bool:
        """Return whether the controller may know more about a process; it asks each spawner itself."""
        return sender is not self._root and proc_id != self._root.proc_id

    def connect(self, sender: Connection, question: wire.Connect) -> None:
        """Ask for a connection to a process of another spawner."""
        number = self._add(sender, question.request)
        self._send(self._root, wire.ForeignConnect(number, sender.proc_id, question.target), ())

    def exit_of(self, sender: Connection, question: wire.ExitOf) -> None:
        """Ask how a process of another spawner has ended."""
        self._send(self._root, wire.ForeignExitOf(self._add(sender, question.request), question.proc_id), ())

    def _add(self, sender: Connection, request: int) -> int:
        number = next(self._numbers)
        self._asked[number] = (sender, request)
        return number

    def answered(self, answer: wire.Answer, fds: tuple[int, ...]) -> None:
        """Hand on what the controller says. The descriptors are given away.

        Raises:
            ProtocolError: It was not asked for.
        """
        asked = self._asked.pop(answer.request, None)
        if asked is None:
            close_all(fds)
            raise ProtocolError(f"the controller answers what was asked, got an answer to {answer.request}")
        sender, request = asked
        if isinstance(answer, wire.Connected) and not fds:
            self._send(sender, wire.ConnectFailed(request, "the spawner has no descriptor left"), ())
        else:
            self._send(sender, msgspec.structs.replace(answer, request=request), fds)
