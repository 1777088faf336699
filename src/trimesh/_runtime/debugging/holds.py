r"""Threads that debuggers hold, in this process and below it, and the one terminal that has one of them.

    held process --news--> its owner --news--> ... controller --> terminal
                 <--lines-         <--lines-            <-- terminal

HN-1 At most one terminal has one hold at a time, in a whole run.
HN-2 A hold whose terminal has gone goes on; one whose process has gone has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from trimesh import limits
from trimesh._runtime.debugging.pausing import Pauses
from trimesh._runtime.peers.parcel import Parcel
from trimesh._wire import messages, observed
from trimesh.errors import Origin, ProtocolError

if TYPE_CHECKING:
    from trimesh._runtime.control.terminal import SocketTerminal
    from trimesh._runtime.debugging.debugger import Debugger
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer

_log = logging.getLogger("trimesh")
_Key = tuple[int, int]


class _Hold:
    """A hold as the controller knows it, or a process on the way there.

    Attributes:
        row: What the controller shows of it.
        since: Trio time.
    """

    __slots__ = ("row", "since", "terminal", "via")

    def __init__(self, via: Peer, row: observed.HoldRow, since: float) -> None:
        self.via = via
        self.row = row
        self.since = since
        self.terminal: SocketTerminal | None = None


class Holds:
    """The holds that one process knows.

    Attributes:
        pauses: Deadlines of what waits for them.
        debugger: What holds threads of this process.
        post_mortem: Holds a thread by an error that has left an endpoint; None where errors are not held.
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
        """Tell the controller of a hold of this process; called in the Trio thread."""
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
                raise ProtocolError(f"a hold must be told of once, and of {limits.DEBUG_HOLDS_MAX} at most")
            row = observed.decode_hold(message.text)
            known = self._known[key] = _Hold(peer, row, self._proc.now())
            if self._is_root:
                self._announce(known)
        elif known is None or known.via is not peer:
            return  # it has ended here
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
            "  It goes on by itself if none has come after %g s (TRIMESH_DEBUG_WAIT).",
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
        """Give a hold to a terminal; return why not, or an empty text."""
        if (other := self._attached) is not None:
            return f"one debugger at a time: another terminal has {other.row.name}"
        found = next(((key, hold) for key, hold in self._known.items() if hold.row.id == target), None)
        if found is None:
            return f"the hold {target!r} has ended, or was never there"
        key, hold = found
        hold.terminal = terminal
        self._steer(messages.Steer(*key, "attach", ""))
        return ""

    @property
    def _attached(self) -> _Hold | None:
        return next((hold for hold in self._known.values() if hold.terminal is not None), None)

    def say(self, terminal: SocketTerminal, kind: str, text: str) -> None:
        """Hand on what a terminal says to its hold; nothing when that has ended."""
        for key, hold in self._known.items():
            if hold.terminal is terminal:
                self._steer(messages.Steer(*key, kind, text))
                if kind == "detach":
                    hold.terminal = None
                return
