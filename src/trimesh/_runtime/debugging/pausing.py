r"""Deadlines of what waits for a thread that a debugger holds: they wait, too, and go on with what was left of them.

    held process --Pause: all calls to me--> caller --Pause: that call of yours--> who waits for the caller ...

PA-1 Of a task that waits for such a call every deadline around it is paused, and that of the call that it is part of.
PA-2 When it goes on, each has as much time left as it had. One that the program has set meanwhile stays as it is.
PA-3 Calls of the agent are not paused: what a block does to end its processes keeps its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import trio

from trimesh import limits
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.parcel import Parcel
from trimesh._runtime.peers.peer import Peer
from trimesh._wire import messages
from trimesh.ids import AGENT

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc

_FAR_SECONDS: Final = 1e9
"""A deadline that does not come, and is still one: a slot forgets that of its call only if there is one."""

Told = tuple[int, ...] | None


class Pauses:
    """The deadlines of one process that are paused.

    Attributes:
        held: Who has said that calls of this process wait; the numbers of those, None for all.
    """

    def __init__(self, proc: Proc) -> None:
        self.held: dict[Peer, Told] = {}
        self._proc = proc
        self._held_here = 0
        self._is_watching = False
        self._scopes: dict[trio.CancelScope, float] = {}
        self._calls: dict[IncomingCall, float] = {}
        self._told: dict[Peer, Told] = {}
        proc.routes[messages.Pause] = self._take
        proc.on_gone.append(self._gone)

    def is_held(self, peer: Peer) -> bool:
        """Return whether a thread of another process is held."""
        return peer in self.held and self.held[peer] is None

    def _take(self, peer: Peer, message: messages.Pause, _: list[memoryview]) -> None:
        if message.calls is None or message.calls:
            self.held[peer] = message.calls
        else:
            self.held.pop(peer, None)
        self._watch()

    def _gone(self, peer: Peer) -> None:
        self._told.pop(peer, None)
        if self.held.pop(peer, ()) != ():
            self._look()

    def tell_held(self) -> None:
        """Let the callers of this process wait, whose main thread is held: no task runs here."""
        self._tell({peer: None for peer in self._proc.peers() if peer.link is not None})

    def hold_here(self, change: int) -> None:
        """Learn that a thread beside the main one is held (1), or goes on (-1)."""
        self._held_here += change
        self._watch()

    def _watch(self) -> None:
        if self._is_watching or not self._proc.serve(self._keep_looking):
            self._look()
        else:
            self._is_watching = True

    @trio.lowlevel.enable_ki_protection
    async def _keep_looking(self) -> None:
        try:
            while self.held or self._held_here:
                self._look()
                await trio.sleep(limits.DEBUG_PAUSE_SECONDS)
        finally:
            self._is_watching = False
            self._look()

    # ---- one look --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        waits = self._proc.deadlocks.look()
        scopes, calls, told = set[trio.CancelScope](), set[IncomingCall](), dict[Peer, Told]()
        if self._held_here:
            told.update((peer, None) for peer in self._proc.peers() if peer.link is not None)
            calls.update(call for cell in self._cells() for call in cell.mailbox.queued())
        for task in self._waiting_tasks():
            call = waits.call_of(task)
            if call is not None:
                calls.add(call)
                if call.call_id and (peer := self._proc.find_peer(call.peer.proc_id)) is not None:
                    numbers = told.get(peer, ())
                    told[peer] = None if numbers is None else tuple(sorted({*numbers, call.call_id}))
            scopes.update(scope for scope in scopes_around(task) if call is None or scope is not call.scope)
        self._pause(scopes, calls)
        self._tell(told)

    def _cells(self) -> Iterator[Any]:
        return (cell for mesh, cell in self._proc.cells.items() if mesh != AGENT)

    def _waiting_tasks(self) -> Iterator[trio.lowlevel.Task]:
        for peer, numbers in self.held.items():
            for call in list(peer.calls):
                if not isinstance(call, OutgoingCall) or call.mesh == AGENT:
                    continue
                if numbers is None or call.call_id in numbers:
                    yield from (task for task in (call.part_of, *call.awaiters) if task is not None)
        if self._held_here:
            for cell in self._cells():
                for group in cell.mailbox.groups():
                    yield from group.running.values()

    def _pause(self, scopes: set[trio.CancelScope], calls: set[IncomingCall]) -> None:
        now = self._proc.now()
        for scope in scopes - self._scopes.keys():
            if scope.deadline != math.inf and not scope.cancel_called:
                self._scopes[scope] = scope.deadline - now
                scope.deadline = math.inf
        for call in calls - self._calls.keys():
            if call.deadline != math.inf and not call.is_cancelled:
                self._calls[call] = call.deadline - now
                call.set_deadline(now + _FAR_SECONDS)
        for scope in self._scopes.keys() - scopes:
            left = self._scopes.pop(scope)
            if scope.deadline == math.inf:
                scope.deadline = now + left
        for call in self._calls.keys() - calls:
            left = self._calls.pop(call)
            if not call.ended:
                call.set_deadline(now + left)

    def _tell(self, told: dict[Peer, Told]) -> None:
        for peer in {**self._told, **told}:
            numbers = told.get(peer, ())
            if numbers != self._told.get(peer, ()) and peer.proc_id != self._proc.proc_id:
                peer.send(Parcel(messages.encode(messages.Pause(numbers))))
        self._told = told

    def tell_free(self) -> None:
        """Let the callers of this process go on, whose main thread does."""
        self._tell({})


def scopes_around(task: trio.lowlevel.Task) -> Iterator[trio.CancelScope]:
    """Yield the cancel scopes that a task is in, innermost first."""
    status: Any = task._cancel_status  # noqa: SLF001 - Trio has no other way to ask for them
    while status is not None:
        yield status._scope  # noqa: SLF001 - the same
        status = status._parent  # noqa: SLF001 - the same
