"""`ElasticGroup`: one group, as one of its members has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from trimesh._runtime.tasks import in_trio
from trimesh.service.accounts.rounds import Place
from trimesh.service.errors import GroupEnded

if TYPE_CHECKING:
    from trimesh.tensor.groups.elastic import DeviceMesh, EpochGroup, MemberGroups

R = TypeVar("R")


class ElasticGroup:
    """The members of one epoch, and what they do together. Of no use after its block.

    Attributes:
        epoch: Number of the view that it was made of.
        number: Of the group, one more for each: the same members may have several, one after the other.
        places: The coordinates of its members, in the order of their ranks.
        rank: Of this member in the group, without holes.
        size: How many there are.
    """

    def __init__(self, front: Any, name: str, key: str, epoch: int, places: Sequence[Place], own: Place) -> None:
        self.number = int(key.rpartition("/")[2])
        self._key = key
        self.epoch = epoch
        self.places = [dict(place) for place in places]
        self.rank = list(places).index(own)
        self.size = len(places)
        self._front = front
        self._name = name
        self._ended: GroupEnded | None = None
        self._over = trio.Event()
        self._calls: list[Callable[[], object]] = []
        self._groups: MemberGroups | None = None

    @property
    def process_group(self) -> EpochGroup:
        """The group of `torch.distributed`; also the default group of this process, unless there is another one.

        Raises:
            RuntimeError: `open_groups` was told to make none (`backend=None`).
        """
        return self._made().whole

    def device_mesh(self, label: str | None = None) -> DeviceMesh:
        """Return a device mesh over the members; all of them call it, each in a thread (`run`).

        Args:
            label: Name of its only dimension; without it those of the mesh of processes, all of whose places must be
                there.

        Raises:
            ShapeError: Members are missing.
            RuntimeError: See `process_group`.
            GroupEnded: The group has ended.
        """
        return self._made().device_mesh(label)

    def _made(self) -> MemberGroups:
        if self._groups is None:
            raise RuntimeError(
                "open_groups(procs, backend=None) makes no process groups: make your own, and end them by on_end"
            )
        return self._groups

    async def run(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function that does collectives in a thread, as everything is to be run that waits for other members.

        Raises:
            GroupEnded: The group has ended, and the function failed by it.
            BaseException: What the function raises.

        Blocking: a checkpoint. A cancel waits until the function has ended: by the end of the group at the latest.
        """
        self.check()
        return await in_trio(trio.to_thread.run_sync)(function, *args)

    def check(self) -> None:
        """Raise `GroupEnded` if the group has ended."""
        if self._ended is not None:
            raise self._error()

    async def wait_ended(self) -> None:
        """Wait until the group has ended, by whatever but this block: for a body that does something else meanwhile.

        Blocking: a checkpoint, cancellable.
        """
        await in_trio(self._over.wait)()

    def on_end(self, call: Callable[[], object]) -> None:
        """Call a function of no arguments, in the task of Trio, when the group ends before its block: `pg.abort`."""
        if self._ended is None:
            self._calls.append(call)
        else:
            call()

    # ---- its life --------------------------------------------------------------------------------------------

    async def make(self) -> None:
        """Connect the members."""
        from trimesh.tensor.groups.elastic import MemberGroups  # noqa: PLC0415 - imports torch

        token = trio.lowlevel.current_trio_token()
        groups = MemberGroups(self._key, self.places, self.rank, partial(self._ask, token), self._why)
        self.on_end(groups.end)
        self._groups = groups
        await trio.to_thread.run_sync(groups.make, abandon_on_cancel=True)

    def end(self, why: str) -> None:
        """Note that the group has ended, and free those that wait in it."""
        if self._ended is None:
            text = f"the process group of epoch {self.epoch} of {self._name} has ended: {why or 'all have finished'}"
            self._ended = GroupEnded(text, epoch=self.epoch)
            self._over.set()
            calls, self._calls = self._calls, []
            for call in calls:
                call()

    def close(self) -> None:
        """Leave it."""
        self.end("its block was left")
        if self._groups is not None:
            self._groups.close()

    def _error(self) -> GroupEnded:
        assert self._ended is not None
        return GroupEnded(str(self._ended), epoch=self.epoch)

    def _why(self) -> Exception | None:
        return None if self._ended is None else self._error()

    def _ask(
        self,
        token: trio.lowlevel.TrioToken,
        verb: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        numbers: Sequence[int] = (),
        seconds: float | None = None,
    ) -> tuple[int, list[bytes]]:
        """Ask the store of the group, from any thread but that of Trio; return a number and values."""

        async def ask() -> tuple[int, list[bytes]] | None:
            with trio.fail_after(seconds if seconds is not None else float("inf")):
                return await self._front.ask.call_one(  # type: ignore[no-any-return]
                    self.number, verb, list(keys), list(values), list(numbers)
                )

        found = trio.from_thread.run(ask, trio_token=token)
        if found is None:
            trio.from_thread.run_sync(self.end, "a member has gone while it was being made", trio_token=token)
            raise self._error()
        return found

    def __repr__(self) -> str:
        return f"<group of epoch {self.epoch}: rank {self.rank} of {self.size}>"
