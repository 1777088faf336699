"""Threads held by debuggers in this process and its descendants, and the one terminal attached to one of them.

    held process --news--> its owner --news--> ... controller --> terminal
                 <--lines-         <--lines-            <-- terminal

HN-1 In a whole run at most one terminal is attached to at most one hold at a time.
HN-2 A hold continues when its terminal disconnects without leaving it held, and ends with its process.

Pausing of deadlines: while a debugger holds a thread, deadlines of callers that wait for it are paused.

    held process --Pause: all calls to me--> caller --Pause: that call of yours--> callers of the caller ...

PA-1 All deadlines around a task that waits for a held thread are paused, and that of the call that the task belongs to.
PA-2 When the hold ends, each has the time left that it had. A deadline that the program set meanwhile stays unchanged.
PA-3 Calls of the agent are not paused: a block keeps its time limits for ending its processes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Parcel, Peer
from trimesh._wire import messages, observed
from trimesh.errors import Origin, ProtocolError
from trimesh.ids import AGENT

if TYPE_CHECKING:
    from trimesh._runtime.control import SocketTerminal
    from trimesh._runtime.debugger import Debugger
    from trimesh._runtime.life.proc import Proc


_log = logging.getLogger("trimesh")
_Key = tuple[int, int]


class _Hold:
    """A hold, as known to the controller or to a process on the way there.

    Attributes:
        via: The child from which news of it arrives.
        row: Its row for observers.
        since: Trio time of the first news.
        terminal: In the controller, the terminal that is attached to it.
    """

    __slots__ = ("row", "since", "terminal", "via")

    def __init__(self, via: Peer, row: observed.HoldRow, since: float) -> None:
        self.via = via
        self.row = row
        self.since = since
        self.terminal: SocketTerminal | None = None


class Holds:
    """Holds of this process and its descendants.

    Attributes:
        pauses: Paused deadlines of this process.
        debugger: Holds threads of this process; None in a process without debugging.
        post_mortem: Holds the thread in which an error left an endpoint; None unless post-mortem debugging is on.
    """

    def __init__(self, proc: Proc) -> None:
        self.pauses = Pauses(proc)
        self.debugger: Debugger | None = None
        self.post_mortem: Callable[[BaseException, Origin], None] | None = None
        self._proc = proc
        self._known: dict[_Key, _Hold] = {}
        proc.routes[messages.HoldNews] = self._take_news
        proc.routes[messages.Steer] = self._take_steer
        proc.on_gone.append(self._gone)

    # ---- up --------------------------------------------------------------------------------------------------

    def tell(self, hold: int, kind: str, text: str) -> None:
        """Report news of a hold of this process to the controller; called in the Trio thread."""
        self._pass_on(messages.HoldNews(self._proc.proc_id, hold, kind, text))

    def _pass_on(self, message: messages.HoldNews) -> None:
        family = self._proc.family
        owner = None if family is None or family.parent is None else self._proc.find_peer(family.parent)
        if owner is not None:
            owner.send(Parcel(messages.encode(message)))

    def _take_news(self, peer: Peer, message: messages.HoldNews, _: list[memoryview]) -> None:
        key = message.proc, message.hold
        known = self._known.get(key)
        if message.kind == "held":
            if known is not None or len(self._known) >= limits.DEBUG_HOLDS_MAX:
                raise ProtocolError(
                    f"a hold must be reported once, and at most {limits.DEBUG_HOLDS_MAX} in a run; got hold "
                    f"{message.hold} of process {message.proc:x} with {len(self._known)} known"
                )
            row = observed.decode_hold(message.text)
            known = self._known[key] = _Hold(peer, row, self._proc.now())
            if self._is_root:
                self._announce(known)
        elif known is None or known.via is not peer:
            return  # the hold has ended here already
        elif message.kind == "ended":
            del self._known[key]
        if not self._is_root:
            self._pass_on(message)
        elif known.terminal is not None and message.kind != "held":
            known.terminal.say(message.kind, message.text)
        elif message.kind == "ended" and message.text:
            _log.warning("%s", message.text)

    @property
    def _is_root(self) -> bool:
        return self._proc.family is None or self._proc.family.parent is None

    def _announce(self, hold: _Hold) -> None:
        row = hold.row
        what = "a breakpoint" if row.kind == "breakpoint" else f"an error: {row.text}"
        _log.warning(
            "%s (process %d on %s) is held at %s, at %s; debug it:\n    trimesh debug --pid %d '%s'\n"
            "  It continues by itself if no debugger attaches within %g s (TRIMESH_DEBUG_WAIT).",
            *(row.name, row.pid, row.host, what, row.at, self._proc.pid, row.proc_name, row.seconds),
        )

    def _gone(self, peer: Peer) -> None:
        for key, hold in list(self._known.items()):
            if hold.via is peer:
                del self._known[key]
                if hold.terminal is not None:
                    hold.terminal.say("ended", f"{hold.row.proc_name} has ended")
                elif not self._is_root:
                    self._pass_on(messages.HoldNews(*key, "ended", ""))

    # ---- down ------------------------------------------------------------------------------------------------

    def _take_steer(self, peer: Peer, message: messages.Steer, _: list[memoryview]) -> None:
        del peer
        self._steer(message)

    def _steer(self, message: messages.Steer) -> None:
        known = self._known.get((message.proc, message.hold))
        if message.proc == self._proc.proc_id:
            if self.debugger is not None:
                self.debugger.steer(message.hold, message.kind, message.text)
        elif known is not None:
            known.via.send(Parcel(messages.encode(message)))

    # ---- the controller --------------------------------------------------------------------------------------

    def rows(self) -> tuple[observed.HoldRow, ...]:
        """Return the holds of a run, the oldest first."""
        now = self._proc.now()
        return tuple(
            msgspec.structs.replace(hold.row, age=now - hold.since, is_attached=hold.terminal is not None)
            for hold in self._known.values()
        )

    def attach(self, target: str, terminal: SocketTerminal) -> str:
        """Attach a terminal to a hold; return why it cannot be, or an empty text."""
        if (other := self._attached) is not None:
            return f"one debugger at a time: another terminal has {other.row.name}; detach that one first"
        found = next(((key, hold) for key, hold in self._known.items() if hold.row.id == target), None)
        if found is None:
            return f"there is no hold {target!r}, or it has ended; `trimesh debug --json` lists the holds"
        key, hold = found
        hold.terminal = terminal
        self._steer(messages.Steer(*key, "attach", ""))
        return ""

    @property
    def _attached(self) -> _Hold | None:
        return next((hold for hold in self._known.values() if hold.terminal is not None), None)

    def say(self, terminal: SocketTerminal, kind: str, text: str) -> None:
        """Forward input of a terminal to its hold; do nothing if the hold has ended."""
        for key, hold in self._known.items():
            if hold.terminal is terminal:
                self._steer(messages.Steer(*key, kind, text))
                if kind in ("detach", "leave"):
                    hold.terminal = None
                if kind == "leave":
                    terminal.say("ended", "it stays held")
                return


# ---- pausing ---------------------------------------------------------------------------------------------------------

# Deadlines of callers that wait for a held thread are paused, and continue with the time that they had left.

_FAR_SECONDS: Final = 1e9
"""Time until the paused deadline of a call. Not infinite: a slot clears only finite deadlines from its scope."""

_Numbers = tuple[int, ...] | None


class Pauses:
    """Paused deadlines of one process.

    Attributes:
        held: Callees that reported calls of this process as held, with the numbers of those; None for all calls.
    """

    def __init__(self, proc: Proc) -> None:
        self.held: dict[Peer, _Numbers] = {}
        self._proc = proc
        self._held_here = 0
        self._is_watching = False
        self._scopes: dict[trio.CancelScope, float] = {}
        self._calls: dict[IncomingCall, float] = {}
        self._told: dict[Peer, _Numbers] = {}
        proc.routes[messages.Pause] = self._take
        proc.on_gone.append(self._gone)

    def is_held(self, peer: Peer) -> bool:
        """Return whether a thread of another process is held, so that all calls to it wait."""
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
        """Pause the deadlines of all callers: the main thread of this process is held, so no task runs here."""
        self._tell({peer: None for peer in self._proc.peers() if peer.link is not None})

    def hold_here(self, change: int) -> None:
        """Count a thread other than the main one that is held (1), or continues (-1)."""
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

    # ---- one update ------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Pause the deadlines that wait for a held thread now, resume the others, and report changes to callers."""
        waits = self._proc.deadlocks.look()
        scopes, calls, told = set[trio.CancelScope](), set[IncomingCall](), dict[Peer, _Numbers]()
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

    def _tell(self, told: dict[Peer, _Numbers]) -> None:
        for peer in {**self._told, **told}:
            numbers = told.get(peer, ())
            if numbers != self._told.get(peer, ()) and peer.proc_id != self._proc.proc_id:
                peer.send(Parcel(messages.encode(messages.Pause(numbers))))
        self._told = told

    def tell_free(self) -> None:
        """Resume the deadlines of all callers: the main thread of this process continues."""
        self._tell({})


def scopes_around(task: trio.lowlevel.Task) -> Iterator[trio.CancelScope]:
    """Yield the cancel scopes that a task is in, innermost first."""
    status: Any = task._cancel_status  # noqa: SLF001 - Trio has no public way to list them
    while status is not None:
        yield status._scope  # noqa: SLF001 - the same
        status = status._parent  # noqa: SLF001 - the same
