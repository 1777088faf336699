"""The owner's side of elastic groups: it follows the views of a mesh, and tells members of their rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.events.membership import MembershipView
from trimesh.service.accounts.keys import Answer, RoundKeys
from trimesh.service.accounts.rounds import Place, RoundMember, Rounds
from trimesh.shape.point import place_name


class GroupsEngine:
    """Elastic groups in the process that has opened them."""

    def __init__(self, procs: ProcMesh, least: int) -> None:
        self._procs = procs
        self._rounds = Rounds(least)
        self._news: dict[RoundMember, trio.Event] = {}
        self._keys: dict[int, RoundKeys] = {}
        self._keys_changed = trio.Event()

    async def watch(self) -> None:
        """Follow the members for as long as the groups are open."""
        async with self._procs.membership() as views:
            async for view in views:
                members = [place_of(point.items()) for point in view.members]
                joined = [place_of(point.items()) for point in view.joined]
                self._tell(self._rounds.see(view.epoch, members, joined, _what_changed(self._procs.name, view)))

    def join(self, place: Place) -> RoundMember:
        """Let a member be in the next round."""
        joined, changed = self._rounds.join(place)
        self._news[joined] = trio.Event()
        self._tell(changed)
        return joined

    def finish(self, joined: RoundMember) -> None:
        """Note that a member is done."""
        self._tell(self._rounds.finish(joined))

    def leave(self, joined: RoundMember) -> None:
        """Take a member out, whose call is over."""
        name = place_name(self._procs.name, dict(joined.place))
        self._tell(self._rounds.leave(joined, f"{name} has died, or has left it before the others"))
        del self._news[joined]

    async def wait_formed(self, joined: RoundMember) -> None:
        """Wait until a member is in a round."""
        while not joined.number:
            await self._news[joined].wait()

    async def wait_over(self, joined: RoundMember) -> None:
        """Wait until the round of a member is over."""
        while not joined.is_over:
            await self._news[joined].wait()

    async def ask(
        self, number: int, verb: str, keys: Sequence[str], values: Sequence[bytes], numbers: Sequence[int]
    ) -> Answer | None:
        """Answer a question about the keys of a round; None when it is over before there is an answer.

        Raises:
            ProtocolError: There is no such question.
        """
        await trio.lowlevel.checkpoint()
        while (known := self._keys.get(number)) is not None:
            answer = known.ask(verb, keys, values, numbers)
            if answer is not None:
                self._tell_keys()
                return answer
            await self._keys_changed.wait()
        return None

    def _tell(self, changed: Iterable[RoundMember]) -> None:
        for one in changed:
            if one.is_over:
                self._keys.pop(one.number, None)
            else:
                self._keys.setdefault(one.number, RoundKeys())
            if one in self._news:
                self._news[one].set()
                self._news[one] = trio.Event()
        self._tell_keys()

    def _tell_keys(self) -> None:
        self._keys_changed.set()
        self._keys_changed = trio.Event()


def place_of(point: Iterable[tuple[str, int]]) -> Place:
    """Return coordinates as they are compared."""
    return tuple((str(label), int(index)) for label, index in point)


def _what_changed(mesh: str, view: MembershipView) -> str:
    left = [f"{place_name(mesh, one.point)} has left ({type(one.reason).__name__})" for one in view.left]
    joined = [f"{place_name(mesh, point)} has joined" for point in view.joined]
    return f"epoch {view.epoch}: {', '.join(left + joined) or 'other members'}"
