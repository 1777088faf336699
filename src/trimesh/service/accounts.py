"""PURE: state machines of slots, replay buffers, elastic groups and stores.

Spill files (`FileExtents`):

FE-1 Pieces in use never overlap, and stay within the bound.
FE-2 Free pieces are merged with their neighbours, and all free bytes can be taken.

Elastic groups (`Rounds`):

    gathering --every member has joined--> formed --all have finished--> gathering
                                             |--a member is lost, new or has left--> gathering

MR-1 A round is formed of all members of one view, at one moment; each of them is in it once.
MR-2 A formed round ends once: when all of its members have finished, or with the reason of the first member that cannot
     go on, or of a view with other members. After that no member of it waits for another one.
MR-3 A member that has joined stays joined until its round is formed: views may change meanwhile.

Stores (`StoreAccount`):

KV-1 A version is visible as a whole or not at all: `put` is one step, made when its bytes are complete.
KV-2 Numbers only grow, over all keys of a shard: a key that is deleted and put again has a larger version.
KV-3 The bytes of a version count until it is removed and no reader has it pinned; then it is once in `freed`.
"""

from __future__ import annotations

import bisect
import heapq
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from trimesh import limits
from trimesh.errors import ProtocolError, place_name

DEPTH_MAX = 4
"""Levels of nested containers whose items are counted; items of deeper ones are not."""


_NUMBERS: Final = frozenset((int, float, bool, type(None)))
_CONTAINERS: Final = frozenset((list, tuple, dict))


def estimate_bytes(value: Any, depth: int = DEPTH_MAX) -> int:
    """Return the bytes of a value: exact for bytes, arrays and tensors, an estimate for containers and objects."""
    if type(value) not in _CONTAINERS:
        size = getattr(value, "nbytes", None)
        if isinstance(size, int):
            return size
        if isinstance(value, bytes | bytearray | str):
            return len(value)
    total = sys.getsizeof(value)
    parts: Any = value
    if depth:
        if isinstance(value, list | tuple | set | frozenset):
            if _NUMBERS.issuperset(map(type, parts)):  # a prompt has thousands
                total += sum(map(sys.getsizeof, parts))
            else:
                total += sum([estimate_bytes(one, depth - 1) for one in parts])
        elif isinstance(value, dict | Mapping):
            total += sum([estimate_bytes(key, 0) + estimate_bytes(one, depth - 1) for key, one in parts.items()])
        elif (fields := getattr(value, "__dict__", None)) is not None:
            total += estimate_bytes(fields, depth - 1)
    return total


# ---- slots -----------------------------------------------------------------------------------------------------------


class SlotLease(msgspec.Struct, eq=False):
    """Permission to begin work that uses `group` slots; `version` is None until it is granted."""

    group: int
    version: int | None = None


class SlotAccount:
    """Slots: a lease is granted while fewer than `batch * (staleness + 1)` are in use, first come, first served.

    A slot is in use from its grant until the work is given back, or the version that trained it is passed. If every
    version trains `batch` items, oldest first, work that begins now is trained at most `staleness` versions later,
    except for work that others overtake.

    Attributes:
        version: Version of the trainer.
        running: Slots of leases that are held.
        finished: Slots of finished work that are not yet freed; used if no buffer counts them.
        stored: Slots of finished work, as the linked buffer counts them; None without a buffer.
        begun: Slots that were ever granted; `begun == running + returned + handed_on + lost`.
        returned: Slots whose lease ended with an error or a cancel.
        handed_on: Slots whose lease ended well.
        lost: Slots that were held when the loaded state was saved.
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
        """Number of all slots."""
        return self.batch * (self.staleness + 1)

    @property
    def in_use(self) -> int:
        """Slots that are not free."""
        return self.running + (self.finished if self.stored is None else self.stored)

    @property
    def waiting(self) -> int:
        """Number of leases that wait."""
        return len(self._waiting)

    def ask(self, group: int) -> SlotLease:
        """Queue a lease, until `grant` grants it."""
        lease = SlotLease(group)
        self._waiting.append(lease)
        return lease

    def withdraw(self, lease: SlotLease) -> None:
        """Remove a lease that was not granted."""
        self._waiting.remove(lease)

    def grant(self) -> list[SlotLease]:
        """Grant leases in order: one that needs many slots is not overtaken."""
        granted: list[SlotLease] = []
        while self._waiting and self.in_use + self._waiting[0].group <= self.capacity:
            lease = self._waiting.popleft()
            lease.version = self.version
            self.running += lease.group
            self.begun += lease.group
            granted.append(lease)
        return granted

    def end(self, lease: SlotLease, *, well: bool) -> None:
        """End a granted lease: its work was handed on, or its slots are free again."""
        self.running -= lease.group
        if not well:
            self.returned += lease.group
            return
        self.handed_on += lease.group
        if self.stored is None:
            self.finished += lease.group

    def advance(self, version: int) -> bool:
        """Advance to a version, at least the current one; return whether it is a new one."""
        if version < self.version:
            raise ValueError(f"version must be at least the current one, {self.version}, got {version}")
        self.finished -= min(self.finished, self.batch * (version - self.version))
        is_new = version > self.version
        self.version = version
        return is_new

    def release(self, count: int) -> None:
        """Free slots of work that was handed on and will not be trained."""
        if not 0 <= count <= self.finished:
            raise ValueError(f"release() takes 0 to {self.finished} slots, those of finished work, got {count}")
        self.finished -= count

    def state(self) -> dict[str, Any]:
        """Return the state, for `load`."""
        return {
            "version": self.version, "running": self.running, "finished": self.finished, "begun": self.begun,
            "returned": self.returned, "handed_on": self.handed_on, "lost": self.lost,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a state: leases that were held then have ended with their holders."""
        if self.begun or self._waiting:
            raise ValueError("load_state_dict() must be called before the first lease, got a call after it")
        self.version, self.finished = state["version"], state["finished"]
        self.begun, self.returned, self.handed_on = state["begun"], state["returned"], state["handed_on"]
        self.lost = state["lost"] + state["running"]


# ---- replay buffers --------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


class Draws:
    """Random numbers in [0, 1), a function of `state` (splitmix64)."""

    def __init__(self, seed: int) -> None:
        self.state = seed & _MASK

    def next(self) -> float:
        self.state = (self.state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self.state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)


Piece = tuple[int, int]
"""Offset and length."""


class FileExtents:
    """Allocator of the parts of a file: a value gets one or several free pieces."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._free: list[Piece] = [(0, bytes_max)]

    def fits(self, size: int) -> bool:
        """Return whether `size` bytes are free."""
        return self.used + size <= self.bytes_max

    def take(self, size: int) -> list[Piece]:
        """Take the first free bytes."""
        assert self.fits(size), "the caller must check `fits` first"
        self.used += size
        taken: list[Piece] = []
        while size:
            offset, length = self._free[0]
            some = min(size, length)
            taken.append((offset, some))
            size -= some
            if some == length:
                del self._free[0]
            else:
                self._free[0] = offset + some, length - some
        return taken

    def give_back(self, pieces: list[Piece]) -> None:
        """Free pieces."""
        for offset, length in pieces:
            self.used -= length
            begin, end = offset, offset + length
            at = bisect.bisect_left(self._free, (offset, 0))
            if at < len(self._free) and end == self._free[at][0]:
                end += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == begin:
                at -= 1
                begin = self._free.pop(at)[0]
            self._free.insert(at, (begin, end - begin))


By = Literal["uniform", "priority", "group"]


class ReplayItem(msgspec.Struct, eq=False):
    """One stored value; `number` is its place in the order of arrival, `size` its estimated bytes."""

    value: Any
    version: int
    group: Hashable
    priority: float
    size: int
    number: int = -1


class ReplayAccount:
    """Bounded storage of items; `added == len(items) + held + taken + sum(evicted.values())`, always.

    Attributes:
        version: Current version, from which ages are counted.
        items: Items by number, the oldest first.
        holds: Items held by consumers, by the number of the hold, and the version then.
        bytes: Bytes of items and holds.
        taken_since: Items taken since the version last advanced.
        on_drop: Called with each value that is no longer needed.
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
        """Number of items held by consumers."""
        return sum(len(items) for _, items in self.holds.values())

    @property
    def slots(self) -> int:
        """Slots in use: by stored items, and by those taken or held since the version last advanced."""
        held = sum(len(items) for version, items in self.holds.values() if version == self.version)
        return len(self.items) + held + self.taken_since

    def has_room(self, size: int) -> bool:
        """Return whether an item of this size fits."""
        return len(self.items) + self.held < self.capacity and self.bytes + size <= self.bytes_max

    def add(self, item: ReplayItem) -> None:
        """Store an item that fits; evict one that is too old already."""
        item.number = self.added
        self.added += 1
        self.items[item.number] = item
        self.bytes += item.size
        if self._is_stale(item):
            self._evict(item, "stale")

    def make_room(self, size: int) -> bool:
        """Evict the oldest items until one of this size fits; evict none if held items leave no room for it."""
        held = [item.size for _, items in self.holds.values() for item in items]
        if len(held) >= self.capacity or sum(held) + size > self.bytes_max:
            return False
        while not self.has_room(size):
            self._evict(next(iter(self.items.values())), "full")
        return True

    def evict_oldest(self) -> bool:
        """Evict the oldest item to make room; return False if there is none."""
        for item in self.items.values():
            self._evict(item, "full")
            return True
        return False

    def clear(self, reason: str) -> int:
        """Evict all items that are not held; return how many."""
        found = list(self.items.values())
        for item in found:
            self._evict(item, reason)
        return len(found)

    def advance(self, version: int) -> None:
        """Advance to a version, at least the current one; evict items that are too old for it."""
        if version < self.version:
            raise ValueError(f"version must be at least the current one, {self.version}, got {version}")
        if version > self.version:
            self.taken_since = 0
        self.version = version
        for item in [item for item in self.items.values() if self._is_stale(item)]:
            self._evict(item, "stale")

    def hold(self, count: int, max_age: int | None) -> int | None:
        """Hold the oldest items within `max_age` for a consumer; return the hold's number, None if too few."""
        if len(self.items) < count:  # quick: a waiting consumer retries at each new item
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
        """Return the items of a hold to their old places; evict those that are now too old."""
        for item in self.holds.pop(hold)[1]:
            self.items[item.number] = item
        self.items = dict(sorted(self.items.items()))
        self.advance(self.version)

    def sample(self, count: int, max_age: int | None, by: By) -> list[ReplayItem] | None:
        """Draw items without removing them, none twice in one draw; return None if too few are within `max_age`.

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
        """Return the state, for `load`; held items count as stored, because they are not trained yet."""
        stored = [*self.items.values(), *(item for _, items in self.holds.values() for item in items)]
        stored.sort(key=lambda item: item.number)
        return {
            "version": self.version, "added": self.added, "taken": self.taken, "drawn": self.drawn,
            "evicted": dict(self.evicted), "draws": self._draws.state,
            "items": [(one.number, one.value, one.version, one.group, one.priority, one.size) for one in stored],
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a state; evict the oldest items beyond the bounds of this buffer."""
        if self.added:
            raise ValueError("load_state_dict() must be called before the first item, got a call after it")
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


# ---- elastic groups --------------------------------------------------------------------------------------------------

Place = tuple[tuple[str, int], ...]
"""Coordinates of a member."""


class RoundMember(msgspec.Struct, eq=False):
    """Member that waits for the next round, or is in one.

    Attributes:
        place: Its coordinates.
        number: Number of its round; 0 before.
        epoch: Epoch of the view that the round was formed of.
        places: Members of the round, in the order of their ranks.
        is_over: Whether the round is over.
        why: Reason of its end; "" if all members have finished.
    """

    place: Place
    number: int = 0
    epoch: int = -1
    places: tuple[Place, ...] = ()
    is_over: bool = False
    why: str = ""


class Rounds:
    """Rounds of one mesh, each of at least `least` members; `number` is the number of the last round."""

    def __init__(self, least: int) -> None:
        self.epoch = -1
        self.number = 0
        self._least = least
        self._members: tuple[Place, ...] = ()
        self._waiting: dict[Place, RoundMember] = {}
        self._inside: dict[Place, RoundMember] = {}
        self._finished: set[Place] = set()

    def see(self, epoch: int, members: Sequence[Place], joined: Collection[Place], why: str) -> list[RoundMember]:
        """Apply a new view; return the members whose round has changed.

        Args:
            epoch: Epoch of the view.
            members: Members in the order of their ranks.
            joined: Members that are new, or have a new incarnation, since the view before.
            why: Description of the change.
        """
        self.epoch = epoch
        has_changed = tuple(members) != self._members or any(place in self._inside for place in joined)
        self._members = tuple(members)
        ended = self._end(why) if has_changed else []
        return ended + self._form()

    def join(self, place: Place) -> tuple[RoundMember, list[RoundMember]]:
        """Add a member to the next round; return it, and the members whose round has changed."""
        if place in self._waiting or place in self._inside:
            name = place_name("", dict(place))
            raise ValueError(
                f"a process can be in one group at a time, and {name} is in one or waits for one: leave its block first"
            )
        joined = self._waiting[place] = RoundMember(place)
        return joined, self._form()

    def finish(self, joined: RoundMember) -> list[RoundMember]:
        """Mark a member as finished; return the members whose round has changed."""
        if self._inside.get(joined.place) is not joined:
            return []
        self._finished.add(joined.place)
        return self._end("") if len(self._finished) == len(self._inside) else []

    def leave(self, joined: RoundMember, why: str) -> list[RoundMember]:
        """Remove a member; return the members whose round has changed."""
        if self._waiting.get(joined.place) is joined:
            del self._waiting[joined.place]
        if self._inside.get(joined.place) is joined:
            return self._end(why) + self._form()
        return []

    def _end(self, why: str) -> list[RoundMember]:
        ended = list(self._inside.values())
        for one in ended:
            one.is_over, one.why = True, why
        self._inside.clear()
        self._finished.clear()
        return ended

    def _form(self) -> list[RoundMember]:
        if (
            self._inside
            or len(self._members) < self._least
            or any(place not in self._waiting for place in self._members)
        ):
            return []
        self.number += 1
        for place in self._members:
            one = self._inside[place] = self._waiting.pop(place)
            one.number, one.epoch, one.places = self.number, self.epoch, self._members
        return list(self._inside.values())


Answer = tuple[int, list[bytes]]
"""Number and values of a reply, depending on the request."""


class RoundKeys:
    """Key-value store by which the members of one round connect, as a `torch.distributed.Store`, and its requests.

    set [key] [value]; get [key, ...]; wait [key, ...]; check [key, ...]; delete [key]; count
    add [key] [] [number]; swap [key] [expected, desired]
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def ask(self, verb: str, keys: Sequence[str], values: Sequence[bytes], numbers: Sequence[int]) -> Answer | None:
        """Answer a request; return None if it must wait for another key.

        Raises:
            ProtocolError: The request is unknown, or there are too many keys.
        """
        known = self._values
        match verb, list(keys), list(values), list(numbers):
            case "set", [str(key)], [bytes(value)], []:
                self._put(key, value)
                return 0, []
            case (("get" | "wait"), [_, *_] as wanted, [], []):
                if not all(key in known for key in wanted):
                    return None
                return 0, [known[key] for key in wanted] if verb == "get" else []
            case "check", wanted, [], []:
                return int(all(key in known for key in wanted)), []
            case "add", [str(key)], [], [int(amount)]:
                total = _number(known.get(key, b"0")) + amount
                self._put(key, str(total).encode())
                return total, []
            case "swap", [str(key)], [bytes(expected), bytes(desired)], []:
                found = known.get(key)
                if found == expected or (found is None and not expected):
                    self._put(key, desired)
                    return 0, [desired]
                return 0, [expected if found is None else found]
            case "delete", [str(key)], [], []:
                return int(known.pop(key, None) is not None), []
            case "count", [], [], []:
                return len(known), []
            case _:
                raise ProtocolError(f"a request to the keys of a group must be known, got {verb!r} of {keys!r:.200}")

    def _put(self, key: str, value: bytes) -> None:
        if key not in self._values and len(self._values) >= limits.GROUP_KEYS:
            raise ProtocolError(
                f"a group must have at most limits.GROUP_KEYS ({limits.GROUP_KEYS}) keys, got {key!r:.100}, too"
            )
        self._values[key] = value


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ProtocolError(f"add needs a key whose value is a number, got {value[:40]!r}") from error


# ---- stores ----------------------------------------------------------------------------------------------------------

KEY_OVERHEAD_BYTES: Final = 512
"""Memory that a version takes besides its value and key: its entries in the tables."""


class StoredVersion(msgspec.Struct, eq=False):
    """One version of one key; it ends at `expires`, on the shard's clock. Once it `is_out` it cannot be found."""

    key: str
    number: int
    value: Any
    nbytes: int
    expires: float
    pins: int = 0
    is_out: bool = False


class StoreAccount:
    """Versions by key in one shard of a store.

    Attributes:
        bytes: Bytes in use, reserved ones included.
        puts: Number of versions ever put.
        expired: Number of these that ended by their time to live.
        freed: Versions whose memory can be released; the shard removes them from here.
    """

    def __init__(self, capacity_bytes: int, retain: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self.puts = 0
        self.expired = 0
        self.freed: list[StoredVersion] = []
        self._retain = retain
        self._keys: dict[str, deque[StoredVersion]] = {}
        self._ends: list[tuple[float, int, StoredVersion]] = []

    def reserve(self, nbytes: int) -> bool:
        """Reserve bytes for a version that is being written; return False if there is no room."""
        if self.bytes + nbytes > self.capacity_bytes:
            return False
        self.bytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Release bytes that were reserved for a version that failed."""
        self.bytes -= nbytes

    def put(self, key: str, value: Any, nbytes: int, expires: float) -> int:
        """Make a version with reserved bytes the newest of a key; return its number (KV-1, KV-2)."""
        self.puts += 1
        one = StoredVersion(key, self.puts, value, nbytes, expires)
        versions = self._keys.setdefault(key, deque())
        versions.append(one)
        if expires != float("inf"):
            heapq.heappush(self._ends, (expires, one.number, one))
        while len(versions) > self._retain:
            self._drop(versions.popleft())
        return one.number

    def find(self, key: str, number: int | None = None) -> StoredVersion | None:
        """Return the newest version of a key, or one by its number; None if it does not exist."""
        versions = self._keys.get(key)
        if not versions:
            return None
        if number is None:
            return versions[-1]
        return next((one for one in versions if one.number == number), None)

    def pin(self, one: StoredVersion) -> None:
        """Keep the memory of a version while a reader uses it."""
        one.pins += 1

    def unpin(self, one: StoredVersion) -> None:
        """Undo a `pin`."""
        one.pins -= 1
        self._free_if_unused(one)

    def delete(self, key: str) -> bool:
        """Remove all versions of a key; return whether there were any."""
        versions = self._keys.pop(key, None)
        for one in versions or ():
            self._drop(one)
        return versions is not None

    def expire(self, now: float) -> None:
        """Remove versions that have expired by `now`."""
        while self._ends and (self._ends[0][0] <= now or self._ends[0][2].is_out):
            one = heapq.heappop(self._ends)[2]
            if not one.is_out:
                self.expired += 1
                versions = self._keys[one.key]
                versions.remove(one)
                if not versions:
                    del self._keys[one.key]
                self._drop(one)

    @property
    def next_end(self) -> float:
        """Time of the next expiry, or infinity."""
        return self._ends[0][0] if self._ends else float("inf")

    def keys(self, prefix: str) -> Iterator[str]:
        return (key for key in self._keys if key.startswith(prefix))

    @property
    def key_count(self) -> int:
        """Number of keys."""
        return len(self._keys)

    @property
    def version_count(self) -> int:
        """Number of versions that can be found."""
        return sum(map(len, self._keys.values()))

    def _drop(self, one: StoredVersion) -> None:
        one.is_out = True
        self._free_if_unused(one)

    def _free_if_unused(self, one: StoredVersion) -> None:
        if one.is_out and not one.pins:
            self.bytes -= one.nbytes
            self.freed.append(one)
