"""What is stored for training, and what became of each item: trained, evicted, or still there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Literal

from trimesh.service.accounts.draws import Draws

By = Literal["uniform", "priority", "group"]


class ReplayItem:
    """One stored value.

    Attributes:
        number: Its place in the order of arrival.
        size: Bytes, as estimated.
    """

    __slots__ = ("group", "number", "priority", "size", "value", "version")

    def __init__(self, value: Any, *, version: int, group: Hashable, priority: float, size: int) -> None:
        self.value = value
        self.version = version
        self.group = group
        self.priority = priority
        self.size = size
        self.number = -1


class ReplayAccount:
    """A bounded store; `added == len(items) + held + taken + sum(evicted.values())`, always.

    Attributes:
        version: Of what trains; ages are counted from it.
        max_age: Older items are evicted; None for no such bound.
        items: By number, the oldest first.
        holds: Items that consumers have and have not trained yet, by the number of the hold, and the version then.
        bytes: Of items and holds.
        evicted: Items that were removed untrained, by reason.
        drawn: Items that `sample` returned; one may count many times.
        taken_since: Items taken since the version has advanced.
        on_drop: Called with each value that is wanted no more.
    """

    def __init__(self, capacity: int, bytes_max: int, seed: int, max_age: int | None) -> None:
        self.capacity = capacity
        self.bytes_max = bytes_max
        self.max_age = max_age
        self.version = 0
        self.items: dict[int, ReplayItem] = {}
        self.holds: dict[int, tuple[int, list[ReplayItem]]] = {}
        self.bytes = 0
        self.added = self.taken = self.drawn = self.taken_since = 0
        self.evicted: Counter[str] = Counter()
        self._draws = Draws(seed)
        self._holds_made = 0
        self.on_drop: Callable[[Any], object] = lambda _: None

    @property
    def held(self) -> int:
        """Items in the hands of consumers."""
        return sum(len(items) for _, items in self.holds.values())

    @property
    def slots(self) -> int:
        """Slots that the items use: of what is stored, and of what was taken or held since the version has advanced."""
        held = sum(len(items) for version, items in self.holds.values() if version == self.version)
        return len(self.items) + held + self.taken_since

    def has_room(self, size: int) -> bool:
        """Whether an item of this size fits."""
        return len(self.items) + self.held < self.capacity and self.bytes + size <= self.bytes_max

    def add(self, item: ReplayItem) -> None:
        """Store an item that fits; one that is too old already is evicted at once."""
        item.number = self.added
        self.added += 1
        self.items[item.number] = item
        self.bytes += item.size
        if self._is_stale(item):
            self._evict(item, "stale")

    def make_room(self, size: int) -> bool:
        """Evict the oldest items until one of this size fits; nothing if what is held leaves no room for it."""
        held = [item.size for _, items in self.holds.values() for item in items]
        if len(held) >= self.capacity or sum(held) + size > self.bytes_max:
            return False
        while not self.has_room(size):
            self._evict(next(iter(self.items.values())), "full")
        return True

    def evict_oldest(self) -> bool:
        """Evict the oldest item for want of room; False if there is none."""
        for item in self.items.values():
            self._evict(item, "full")
            return True
        return False

    def clear(self, reason: str) -> int:
        """Evict everything that is not held; return how much."""
        found = list(self.items.values())
        for item in found:
            self._evict(item, reason)
        return len(found)

    def advance(self, version: int) -> None:
        """Go on to a version: evict what is too old, and forget what was taken for the versions before.

        Raises:
            ValueError: It is below the current one.
        """
        if version < self.version:
            raise ValueError(f"versions only grow: got version {version} after {self.version}")
        if version > self.version:
            self.taken_since = 0
        self.version = version
        for item in [item for item in self.items.values() if self._is_stale(item)]:
            self._evict(item, "stale")

    def hold(self, count: int, max_age: int | None) -> int | None:
        """Give the oldest items that are young enough to a consumer; return the number of the hold, None if too few."""
        if len(self.items) < count:  # who waits looks at each item that comes
            return None
        found = self._young(max_age)[:count]
        if len(found) < count:
            return None
        for item in found:
            del self.items[item.number]
        self._holds_made += 1
        self.holds[self._holds_made] = (self.version, found)
        return self._holds_made

    def confirm(self, hold: int) -> None:
        """Count the items of a hold as trained."""
        version, found = self.holds.pop(hold)
        self.bytes -= sum(item.size for item in found)
        self.taken += len(found)
        for item in found:
            self.on_drop(item.value)
        if version == self.version:
            self.taken_since += len(found)

    def put_back(self, hold: int) -> None:
        """Store the items of a hold again, at their old places; those that are too old now are evicted."""
        for item in self.holds.pop(hold)[1]:
            self.items[item.number] = item
        self.items = dict(sorted(self.items.items()))
        self.advance(self.version)

    def sample(self, count: int, max_age: int | None, by: By) -> list[ReplayItem] | None:
        """Draw items without removing them, none twice in one draw; return None if too few are young enough.

        By "group", `count` is of groups, and all items of each are returned. O(n log n) of the stored items.
        """
        found = self._young(max_age)
        if by == "group":
            groups: dict[Hashable, list[ReplayItem]] = {}
            for item in found:
                groups.setdefault(item.group, []).append(item)
            if len(groups) < count:
                return None
            chosen = self._draw(list(groups.values()), [1.0] * len(groups), count)
            picked = [item for members in chosen for item in members]
        else:
            if len(found) < count:
                return None
            picked = self._draw(found, [item.priority if by == "priority" else 1.0 for item in found], count)
        self.drawn += len(picked)
        return picked

    def state(self) -> dict[str, Any]:
        """Return what `load` takes; what is held counts as stored: it is not trained yet."""
        stored = [*self.items.values(), *(item for _, items in self.holds.values() for item in items)]
        stored.sort(key=lambda item: item.number)
        return {
            "version": self.version, "added": self.added, "taken": self.taken, "drawn": self.drawn,
            "evicted": dict(self.evicted), "draws": self._draws.state,
            "items": [(one.number, one.value, one.version, one.group, one.priority, one.size) for one in stored],
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state; beyond the bounds of this store the oldest items are evicted."""
        if self.added:
            raise ValueError("load_state_dict goes before the first item")
        self.version, self.added, self.taken = state["version"], state["added"], state["taken"]
        self.drawn, self.evicted = state["drawn"], Counter(state["evicted"])
        self._draws.state = state["draws"]
        for number, value, version, group, priority, size in state["items"]:
            item = ReplayItem(value, version=version, group=group, priority=priority, size=size)
            item.number = number
            self.items[number] = item
            self.bytes += size
        while len(self.items) > self.capacity or self.bytes > self.bytes_max:
            self._evict(next(iter(self.items.values())), "full")
        self.advance(self.version)

    def _draw(self, things: list[Any], weights: list[float], count: int) -> list[Any]:
        # The largest of u ** (1 / weight) are a weighted draw without replacement (Efraimidis and Spirakis).
        keys = [self._draws.next() ** (1 / weight) for weight in weights]
        order = sorted(range(len(things)), key=keys.__getitem__, reverse=True)
        return [things[index] for index in order[:count]]

    def _young(self, max_age: int | None) -> list[ReplayItem]:
        return [one for one in self.items.values() if max_age is None or self.version - one.version <= max_age]

    def _is_stale(self, item: ReplayItem) -> bool:
        return self.max_age is not None and self.version - item.version > self.max_age

    def _evict(self, item: ReplayItem, reason: str) -> None:
        del self.items[item.number]
        self.bytes -= item.size
        self.evicted[reason] += 1
        self.on_drop(item.value)
