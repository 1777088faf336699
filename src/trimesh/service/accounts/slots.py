"""How much work may be under way, so that what is begun now can still be used when it is ready."""

from __future__ import annotations

from collections import deque
from typing import Any


class SlotLease:
    """Permission to begin some work.

    Attributes:
        group: Slots that it holds.
        version: The version when it was granted; None before.
    """

    __slots__ = ("group", "version")

    def __init__(self, group: int) -> None:
        self.group = group
        self.version: int | None = None


class SlotAccount:
    """Slots: a lease is granted while fewer than `batch * (staleness + 1)` are in use, first come, first served.

    A slot is in use from its grant until the work is given back, or the version advances past what was trained with
    it. If every version trains `batch` items, oldest first, work that begins now is trained at most `staleness`
    versions later, but for work that others overtake.

    Attributes:
        version: Of what trains.
        running: Slots of leases that are held.
        finished: Slots of work that is over and not yet freed, where no buffer counts them.
        stored: The same, as the buffer counts them; None without one.
        begun: Slots that were ever granted; `begun == running + returned + handed_on + lost`.
        returned: Slots whose lease ended with an error or a cancel.
        handed_on: Slots whose lease ended well.
        lost: Slots that were held when the state was saved that was loaded.
    """

    def __init__(self, batch: int, staleness: int, version: int) -> None:
        self.batch = batch
        self.staleness = staleness
        self.version = version
        self.running = 0
        self.finished = 0
        self.stored: int | None = None
        self.begun = self.returned = self.handed_on = self.lost = 0
        self._waiting: deque[SlotLease] = deque()

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self.batch * (self.staleness + 1)

    @property
    def in_use(self) -> int:
        """Slots that no new lease can have."""
        return self.running + (self.finished if self.stored is None else self.stored)

    @property
    def waiting(self) -> int:
        """Leases that wait."""
        return len(self._waiting)

    def ask(self, group: int) -> SlotLease:
        """Let a lease wait; `grant` grants it."""
        lease = SlotLease(group)
        self._waiting.append(lease)
        return lease

    def withdraw(self, lease: SlotLease) -> None:
        """Forget a lease that was not granted."""
        self._waiting.remove(lease)

    def grant(self) -> list[SlotLease]:
        """Grant what can be granted: the first one that waits goes before all others, however many slots it wants."""
        granted: list[SlotLease] = []
        while self._waiting and self.in_use + self._waiting[0].group <= self.capacity:
            lease = self._waiting.popleft()
            lease.version = self.version
            self.running += lease.group
            self.begun += lease.group
            granted.append(lease)
        return granted

    def end(self, lease: SlotLease, *, well: bool) -> None:
        """End a lease that was granted: its work was handed on, or its slots are free again."""
        self.running -= lease.group
        if not well:
            self.returned += lease.group
            return
        self.handed_on += lease.group
        if self.stored is None:
            self.finished += lease.group

    def advance(self, version: int) -> bool:
        """Go on to a version; return whether it is a new one.

        Raises:
            ValueError: It is below the current one.
        """
        if version < self.version:
            raise ValueError(f"versions only grow: got version {version} after {self.version}")
        self.finished -= min(self.finished, self.batch * (version - self.version))
        is_new = version > self.version
        self.version = version
        return is_new

    def release(self, count: int) -> None:
        """Free slots of work that was handed on and will not be trained."""
        if not 0 <= count <= self.finished:
            raise ValueError(f"release frees slots of work that is over: {self.finished}, got {count}")
        self.finished -= count

    def state(self) -> dict[str, Any]:
        """Return what `load` takes."""
        return {
            "version": self.version, "running": self.running, "finished": self.finished, "begun": self.begun,
            "returned": self.returned, "handed_on": self.handed_on, "lost": self.lost,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state: leases that were held then have ended with their holders."""
        if self.begun or self._waiting:
            raise ValueError("load_state_dict goes before the first lease")
        self.version, self.finished = state["version"], state["finished"]
        self.begun, self.returned, self.handed_on = state["begun"], state["returned"], state["handed_on"]
        self.lost = state["lost"] + state["running"]
