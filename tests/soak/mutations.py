"""Bugs to plant in the runtime, which the mixed workload must find; and the search for the first seed that shows one.

They are planted by replacing one function of the runtime for a while. None is aimed at: no check of the workload or of
the oracles is there for the sake of one of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import msgspec
from tests.soak.workload import run_schedule

import trimesh
from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.meshes.proc_members import ProcMembers
from trimesh._runtime.peers.deaths import ProcDeath
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Peer
from trimesh._transport.in_memory.transport import MemoryLink
from trimesh._transport.interface import Link, LinkDown
from trimesh._wire import messages
from trimesh.ids import ProcId
from trimesh.testing.simulated.seeded_run import HangError

CONTROLLER: Final = ProcId(1)
"""In a simulation."""

_RULE: Final = re.compile(r"\b(OR|W)-\d+")


Patch = tuple[type, str, Callable[[Callable[..., Any]], Callable[..., Any]]]
"""Whose function is replaced, its name, and what makes of the real function the wrong one."""


@attrs.frozen
class Mutation:
    """A bug.

    Attributes:
        text: What is wrong, for people.
        patches: Of what it consists.
        rule: The rule that finds it, or "hang".
        seed: The first that does.
    """

    text: str
    patches: tuple[Patch, ...]
    rule: str
    seed: int

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have the bug while the block runs."""
        real = [(owner, name, getattr(owner, name)) for owner, name, _ in self.patches]
        for owner, name, make in self.patches:
            setattr(owner, name, make(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, function in real:
                setattr(owner, name, function)


@attrs.frozen
class Finding:
    """What has found a bug.

    Attributes:
        seed: Under which.
        rule: Of the oracles or the workload, or "hang", or the class of an error that nothing explains.
    """

    seed: int
    rule: str


def rule_of(error: BaseException, rules: re.Pattern[str] = _RULE) -> str:
    """Return the rule that an error says is broken; `rules` is what its text begins with."""
    for leaf in trimesh.leaves(error):
        if isinstance(leaf, HangError):
            return "hang"
        found = rules.match(str(leaf))
        if found is not None:
            return found[0]
    return " ".join(sorted({type(leaf).__name__ for leaf in trimesh.leaves(error)}))


def find(
    mutation: Mutation,
    seeds: Iterable[int],
    rule: str | None = None,
    *,
    run: Callable[[int], Any] = run_schedule,
    rules: re.Pattern[str] = _RULE,
) -> Finding | None:
    """Return the first of `seeds` under which a bug shows, or None; with `rule`, the first that this rule finds.

    `run` runs a workload under a seed and returns what has its `error`; `rules` is what texts of its rules begin with.
    """
    with mutation.planted():
        for seed in seeds:
            error = run(seed).error
            if error is not None and rule in (None, rule_of(error, rules)):
                return Finding(seed, rule_of(error, rules))
    return None


# ---- bugs ------------------------------------------------------------------------------------------------------------


def _lose_cancels(real: Callable[..., Any]) -> Callable[..., Any]:
    def cancel(self: Proc, peer: Peer, message: messages.Cancel) -> None:
        call = peer.inbound.get(message.call)
        if call is None or not call.running:
            real(self, peer, message)

    return cancel


def _keep_the_links(real: Callable[..., Any]) -> Callable[..., Any]:
    def drop_links(self: Proc, peer: Peer) -> None:
        if peer.death is None:
            real(self, peer)
        peer.link = None

    return drop_links


def _keep_the_link(real: Callable[..., Any]) -> Callable[..., Any]:
    def link_down(self: Proc, link: Link, down: LinkDown) -> None:
        peer = self._of_link.get(link)
        real(self, link, down)
        if peer is not None:
            self._of_link[link] = peer

    return link_down


def _end_no_held_link(real: Callable[..., Any]) -> Callable[..., Any]:
    def abort(self: MemoryLink) -> None:
        if not self.incoming.is_held or self.transport.proc_id != CONTROLLER:
            real(self)

    return abort


def _leak_credits(real: Callable[..., Any]) -> Callable[..., Any]:
    def cancelled(self: IncomingCall) -> None:
        was_running, self.running = self.running, True  # as if it had been counted when it started
        real(self)
        self.running = was_running

    return cancelled


def _reply_twice(real: Callable[..., Any]) -> Callable[..., Any]:
    def end(self: IncomingCall, head: bytes, bodies: Sequence[Any] = (), **options: Any) -> Any:
        is_late = (
            self.running and self.cancelled_by is not None and not self.is_broadcast and self.peer.link is not None
        )
        if is_late:
            self.peer.link.send(messages.encode(messages.CancelAck(self.call_id, self.mesh, 0, True, "caller", "")))
        return real(self, head, bodies, **options)

    return end


def _restart_in_reverse(real: Callable[..., Any]) -> Callable[..., Any]:
    async def follow(self: ProcMembers, ranks: Sequence[int]) -> None:
        self.actors.reverse()
        try:
            await real(self, ranks)
        finally:
            self.actors.reverse()

    return follow


def _swallow_errors(real: Callable[..., Any]) -> Callable[..., Any]:
    def raised(self: IncomingCall, error: Any) -> Any:
        if self.scope.deadline == math.inf:
            return real(self, error)
        return self.returned(self.peer.proc.values.encode_result(None, self.spec))

    return raised


def _miss_deaths(real: Callable[..., Any]) -> Callable[..., Any]:
    def declare_gone(self: Proc, peer: Peer, death: ProcDeath) -> None:
        if len(peer.calls) > 1:
            peer.calls.popitem()
        real(self, peer, death)

    return declare_gone


def _hold_in_reverse(real: Callable[..., Any]) -> Callable[..., Any]:
    def take_held(self: Cell) -> list[IncomingCall]:
        return list(reversed(real(self)))

    return take_held


def _ignore_budgets(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Proc, peer: Peer, link: Any, message: messages.Call, size: int, bodies: Any) -> None:
        real(self, peer, link, msgspec.structs.replace(message, budget=None), size, bodies)

    return call


def _leave_zombies(real: Callable[..., Any]) -> Callable[..., Any]:
    del real

    async def discard(self: ProcMembers) -> None:
        """Forget the mesh, and end nothing of it."""
        self._forget()

    return discard


MUTATIONS: Final = {
    "lost-cancel": Mutation("a cancel of a running call is lost", ((Proc, "_cancel", _lose_cancels),), "OR-5", 0),
    "stale-epoch": Mutation(
        "frames of a process that was given up, held by a partition, are read after it",
        (
            (Proc, "_drop_links", _keep_the_links),
            (Proc, "link_down", _keep_the_link),
            (MemoryLink, "abort", _end_no_held_link),
        ),
        "OR-7",
        61,
    ),
    "credit-leak": Mutation(
        "a message that is cancelled in its mailbox is not credited",
        ((IncomingCall, "cancelled", _leak_credits),),
        "OR-6",
        1,
    ),
    "double-reply": Mutation("a cancelled call is answered twice", ((IncomingCall, "_end", _reply_twice),), "OR-1", 0),
    "restart-order": Mutation(
        "the actors of a restarted process are made in reverse",
        ((ProcMembers, "follow", _restart_in_reverse),),
        "W-4",
        0,
    ),
    "swallowed-error": Mutation(
        "the error of a call that has a deadline is swallowed", ((IncomingCall, "raised", _swallow_errors),), "W-1", 1
    ),
    "missed-death": Mutation(
        "one call in flight is not told of the death", ((Proc, "declare_gone", _miss_deaths),), "hang", 9
    ),
    "fifo-reconnect": Mutation(
        "messages that wait for a restarted actor are handed over in reverse",
        ((Cell, "take_held", _hold_in_reverse),),
        "OR-2",
        2,
    ),
    "deadline-ignored": Mutation(
        "the budget of a call is not kept", ((Proc, "take_call", _ignore_budgets),), "OR-5", 0
    ),
    "zombie": Mutation(
        "what has started of a failed spawn is left", ((ProcMembers, "_discard", _leave_zombies),), "OR-8", 0
    ),
}
"""By name."""
