"""Multicast to several processes of another host: bodies enter the host once, and its processes map them.

    sender                                 the other host
    HostCaster  --bodies, once-->          keeps them in memory that its processes may map
                <--where they are--
    link        --OFFER: head, where-->    process maps them
                <--TAKEN, or REFUSED--
    HostCaster  --let go-->

Three or more hosts form a tree (below): the sender sends bodies to some, whose agents feed them to others, which keep
them and answer as if the sender had sent them.

    HostCaster a   --FEED b, bodies-->     the agent of a  --bodies-->  the agent of b
    HostCaster b   --FED by a-->                                        the agent of b
                   <--where they are--

Each link has a `CastLeaf`: a chunked message that sends no chunks at first. So it holds back messages that may not pass
it, and sends its chunks after all if the other host cannot keep the bodies or its process cannot map them.

    HB-1 Every leaf is settled once: taken, sent in chunks, or its link has ended.
    HB-2 Memory kept by the other host is bounded; a cast that finds no room goes in chunks at once, without waiting.
    HB-3 Bodies are released when all leaves are settled, in whatever way; at a host that feeds others, once those have
         answered, too.
    HB-4 If a host cannot be fed, the sender sends it the bodies itself, and the feeding host feeds it no more.

PURE but for memory; `_runtime/hosts` carries bodies and answers.

    PR-1 Messages that wait are held in the order in which they were sent; messages that may not pass them wait, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from trimesh import limits
from trimesh._transport.interface import Buffer
from trimesh._transport.messages.outgoing import ChunkedMessage, Outgoing

if TYPE_CHECKING:
    from trimesh._transport.messages.outgoing import Completion
    from trimesh._transport.native.link import NativeLink


def padding(size: int) -> int:
    """Return how many bytes follow a body of `size`, so that the next one lies where an array may begin."""
    return -size % limits.HOST_CAST_ALIGNMENT


def kept_bytes(sizes: Iterable[int]) -> int:
    """Return the number of bytes that bodies of these sizes take at a host, with padding."""
    return sum(size + padding(size) for size in sizes)


class CastBody:
    """The bodies of one cast at one host.

    Args:
        owner: Of the casts to its host.
        number: Of the cast at its host.
        bodies: As sent.
        leaves: How many links are offered them.

    Attributes:
        owner, number: See there.
        leaves: How many links and other hosts have not had them.
        size: Bytes with what lies between bodies.
        source: Whose host feeds them to this one; None: the sender sends them, or it has them.
        fed: Those at other hosts that this one feeds, and that have not answered.
        where: What says to the processes of the host where they are; b"" before they are there.
        has_failed: Whether they will never be.
    """

    def __init__(self, owner: HostCaster, number: int, bodies: Sequence[memoryview], leaves: int) -> None:
        self.owner: Final = owner
        self.number = number
        self.source: CastBody | None = None
        self.fed: list[CastBody] = []
        self.size: Final = kept_bytes(body.nbytes for body in bodies)
        self.where = b""
        self.has_failed = False
        self._bodies = bodies
        self.leaves = leaves
        self._waiting: dict[CastLeaf, NativeLink] = {}

    def pieces(self) -> Iterator[memoryview]:
        """Return the bytes sent to the host, in order."""
        for body in self._bodies:
            yield body
            if padding(body.nbytes):
                yield memoryview(bytes(padding(body.nbytes)))

    def join(self, leaf: CastLeaf, link: NativeLink) -> None:
        """Have a leaf offered as soon as the bodies are there."""
        if self.has_failed:
            link.send_chunks(leaf)
        elif self.where:
            link.offer(leaf, self.where)
        else:
            self._waiting[leaf] = link

    def ready(self, where: bytes) -> None:
        """Learn where the bodies are."""
        self.where = where
        waiting, self._waiting = self._waiting, {}
        for leaf, link in waiting.items():
            link.offer(leaf, where)

    def fail(self) -> None:
        """Mark the bodies as unavailable: waiting leaves go in chunks.

        Leaves already offered get an answer, or their link ends.
        """
        self.has_failed = True
        for other in self.fed.copy():
            other.owner.send_itself(other)
        waiting, self._waiting = self._waiting, {}
        for leaf, link in waiting.items():
            link.send_chunks(leaf)

    def leave(self, leaf: CastLeaf) -> None:
        """Note that a leaf needs them no more."""
        self._waiting.pop(leaf, None)
        self.count_down()

    def count_down(self) -> None:
        """Note that a link, or another host, has had them."""
        self.leaves -= 1
        if not self.leaves:
            self.owner.left(self)

    # ---- in a tree -------------------------------------------------------------------------------------------

    def feed(self, other: CastBody) -> None:
        """Have this host feed another one, which was begun after it."""
        other.source = self
        self.fed.append(other)
        self.leaves += 1

    def part(self) -> None:
        """Note that it needs its source no more: it has answered, or never will. Idempotent."""
        source, self.source = self.source, None
        if source is not None:
            source.fed.remove(self)
            source.count_down()


class CastLeaf(ChunkedMessage):
    """A large message on one link whose bodies enter the peer's host once, for several links.

    Args:
        head, bodies, flow, completion: As for a chunked message.

    Attributes:
        is_offered: Whether the peer was told where the bodies are, and has not answered.
    """

    def __init__(
        self, head: bytes, bodies: Sequence[Buffer], flow: int, completion: Completion, body: CastBody
    ) -> None:
        super().__init__(head, bodies, flow, completion)
        self.is_offered = False
        self._body: CastBody | None = body

    @property
    def is_apart(self) -> bool:
        """True if it sends no chunks."""
        return self._body is not None

    def begin(self, link: NativeLink) -> None:
        """Offer this leaf on `link`, whose turn it is."""
        assert self._body is not None
        self.number, self.is_offered = 0, False  # another link may have begun it, which never came up
        self._body.join(self, link)

    def offer(self, where: bytes) -> list[Buffer]:
        """Return the bodies of the message that offers it: the table, the head, and where they are."""
        self.is_offered = True
        return [self._table, self._head, where]

    def leave(self) -> None:
        """Need the bodies at the host no more. Idempotent."""
        body, self._body = self._body, None
        self.is_offered = False
        if body is not None:
            body.leave(self)

    def finish(self) -> None:
        super().finish()
        self.leave()


class HostCaster:
    """All casts to one other host.

    Args:
        wake: Called when there is something to carry.
        agent: Incarnation of its agent.
        circle: Hosts whose agents may talk to each other have the same; None: they may not.

    Attributes:
        agent, circle: See there.
        bodies: Those that wait to be carried, in order.
        let_go: Numbers of those that were carried, or are being carried, and that no leaf needs.
        kept: Bytes that the host keeps, or will.
        unfed: Agents that this one could not feed.
    """

    def __init__(self, wake: Callable[[], None], agent: int = 0, circle: object = None) -> None:
        self.agent: Final = agent
        self.circle: Final = circle
        self.bodies = deque[CastBody]()
        self.let_go = deque[int]()
        self.kept = 0
        self.unfed = set[int]()
        self._wake = wake
        self._casts: dict[int, CastBody] = {}
        self._last = 0
        self._is_closed = False

    def begin(self, bodies: Sequence[Buffer], leaves: int, *, at_least: int = 2) -> CastBody | None:
        """Begin a cast to `leaves` processes; None: it does not pay, or there is no room for it now (HB-2).

        Args:
            bodies: As sent.
            leaves: How many links are offered them.
            at_least: So many pay.
        """
        views = [memoryview(body).cast("B") for body in bodies if memoryview(body).nbytes]
        size = kept_bytes(view.nbytes for view in views)
        is_full = len(self._casts) == limits.HOST_CASTS_MAX or self.kept + size > limits.HOST_CAST_BYTES
        if self._is_closed or leaves < at_least or size < limits.HOST_CAST_BYTES_MIN or is_full:
            return None
        self._last += 1
        body = self._casts[self._last] = CastBody(self, self._last, views, leaves)
        self.kept += body.size
        self.bodies.append(body)
        self._wake()
        return body

    def left(self, body: CastBody) -> None:
        """Let go of bodies that no leaf and no other host needs any more."""
        if self._casts.pop(body.number, None) is None:
            return
        body.part()
        self.kept -= body.size
        if body in self.bodies:
            self.bodies.remove(body)
        else:
            self.let_go.append(body.number)
            self._wake()

    def answered(self, number: int, where: bytes) -> None:
        """Take the answer of the host about the bodies of a cast: where they are, or b"" if it cannot keep them.

        Nothing if they were let go meanwhile.
        """
        body = self._casts.get(number)
        if body is None:
            return
        body.part()
        if where:
            body.ready(where)
        else:
            body.fail()

    def could_not_feed(self, agent: int, number: int) -> None:
        """Learn that the host has not fed another one; nothing if that one has answered meanwhile."""
        for body in self._casts.values():
            for other in body.fed:
                if (other.owner.agent, other.number) == (agent, number):
                    self.unfed.add(agent)
                    other.owner.send_itself(other)
                    return

    def send_itself(self, body: CastBody) -> None:
        """Make the sender send the bodies that another host was to feed (HB-4), and those that this one was to feed."""
        body.part()
        if self._is_closed or body in self.bodies:
            return
        for other in body.fed.copy():
            other.owner.send_itself(other)
        if self._casts.pop(body.number, None) is None:
            return  # it was kept for those only
        self.let_go.append(body.number)
        self._last += 1
        body.number = self._last
        self._casts[body.number] = body
        self.bodies.append(body)
        self._wake()

    def close(self) -> None:
        """Have all casts from now on, and those that are under way, go in chunks. Idempotent."""
        self._is_closed = True
        self.bodies.clear()
        self.let_go.clear()
        for body in list(self._casts.values()):
            body.part()
            body.fail()


# ---- the tree by which the bodies of a cast come to several hosts: which of them feeds which others ------------------

# A sender that sends n bytes to each of its hosts itself needs the time of that many copies. Hosts that feed others
# cost one copy less each, and the time that the first piece of a body needs to pass through a host. PURE.


def begin_casts(bodies: Sequence[Buffer], leaves: Mapping[HostCaster, int]) -> dict[HostCaster, CastBody]:
    """Begin a cast to the hosts for which it pays and that have room for it.

    Args:
        bodies: As sent.
        leaves: Processes that take part, by host.
    """
    size = kept_bytes(memoryview(body).nbytes for body in bodies)
    if size < limits.HOST_CAST_BYTES_MIN:
        return {}
    circles: dict[int, list[HostCaster]] = {}
    for caster in leaves:
        circles.setdefault(id(caster if caster.circle is None else caster.circle), []).append(caster)
    found: dict[HostCaster, CastBody] = {}
    for casters in circles.values():
        count = len(casters)
        is_tree = count >= limits.HOST_CAST_TREE_HOSTS_MIN
        width = fan_out(count, size) if is_tree else count
        for index, caster in enumerate(casters):
            body = caster.begin(bodies, leaves[caster], at_least=1 if is_tree else 2)
            if body is None:
                continue
            found[caster] = body
            above = None if index < width else casters[index // width - 1]
            source = None if above is None else found.get(above)
            if above is not None and source is not None and caster.agent not in above.unfed:
                source.feed(body)
    return found


def fan_out(hosts: int, size: int) -> int:
    """Return how many hosts the sender, and each host, sends `size` bytes to, so that all have them soonest."""
    widths = [*(1 << n for n in range((hosts - 1).bit_length())), hosts]
    return min(widths, key=lambda width: width * size + depth(hosts, width) * limits.HOST_CAST_HOP_BYTES)


def depth(hosts: int, width: int) -> int:
    """Return over how many hops the last of some hosts is reached where each sends to `width` others."""
    if width == 1:
        return hosts
    hops, reached = 0, 0
    while reached < hosts:
        hops += 1
        reached += width**hops
    return hops


# ---- which message of a link may pass a large one that is under way in chunks ----------------------------------------

# A *flow* is a number of the sender's: messages of one flow keep their order. Flow 0 keeps it with all others: such a
# message passes nothing, and nothing passes it.

ORDERED: Final = 0
"""The flow that keeps order with all others."""


class Precedence:
    """Chunked messages of one link, and the messages that wait behind them.

    Attributes:
        under_way: Chunked messages that have not left, in the order of their turns.
        apart: Messages under way that send no chunks.
        busy: How many messages of each flow are under way or held, always the same object; empty: every message may
            go.
    """

    def __init__(self) -> None:
        self.under_way: deque[ChunkedMessage] = deque()
        self.apart: list[CastLeaf] = []
        self.busy: Counter[int] = Counter()
        self._held: deque[tuple[Outgoing | ChunkedMessage, int]] = deque()

    def may_pass(self, flow: int) -> bool:
        """True if a message may pass all messages under way or held."""
        return _may_pass(self.busy, flow)

    def add(self, chunked: ChunkedMessage) -> bool:
        """Take a chunked message; return whether it is under way, and not held."""
        goes = self.may_pass(chunked.flow) and not self._is_full
        if goes:
            self.busy[chunked.flow] += 1
            self._go(chunked)
        else:
            self.hold(chunked, chunked.flow)
        return goes

    @property
    def _is_full(self) -> bool:
        return len(self.under_way) + len(self.apart) == limits.CHUNKED_MAX

    def _go(self, chunked: ChunkedMessage) -> None:
        if isinstance(chunked, CastLeaf) and chunked.is_apart:
            self.apart.append(chunked)
        else:
            self.under_way.append(chunked)

    def rejoin(self, leaf: CastLeaf) -> None:
        """Have a message send chunks that was apart."""
        self.apart.remove(leaf)
        self.under_way.append(leaf)

    def hold(self, one: Outgoing | ChunkedMessage, flow: int) -> None:
        """Keep a message that must not go now."""
        self.busy[flow] += 1
        self._held.append((one, flow))

    def out(self, chunked: ChunkedMessage, send: Callable[[Outgoing], object]) -> list[CastLeaf]:
        """Record that a chunked message has been sent, and send the messages that waited for it.

        Returns:
            Leaves that have become apart: they may begin.
        """
        if isinstance(chunked, CastLeaf) and chunked.is_apart:
            self.apart.remove(chunked)
        else:
            self.under_way.remove(chunked)
        before = len(self.apart)
        busy = Counter(other.flow for other in (*self.under_way, *self.apart))
        rest: deque[tuple[Outgoing | ChunkedMessage, int]] = deque()
        for one, flow in self._held:
            if not _may_pass(busy, flow) or (isinstance(one, ChunkedMessage) and self._is_full):
                busy[flow] += 1
                rest.append((one, flow))
            elif isinstance(one, ChunkedMessage):
                busy[flow] += 1
                self._go(one)
            else:
                send(one)
        self._held = rest
        self.busy.clear()
        self.busy.update(busy)
        return self.apart[before:]

    def take_all(self) -> list[tuple[Outgoing | ChunkedMessage, int]]:
        """Return everything, in order, and forget it."""
        found = [*((chunked, chunked.flow) for chunked in (*self.under_way, *self.apart)), *self._held]
        self.under_way.clear()
        self.apart.clear()
        self._held.clear()
        self.busy.clear()
        return found

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are in no chunk, and in no frame, yet."""
        going = sum(one.waiting_bytes for one in (*self.under_way, *self.apart))
        return going + sum(one.waiting_bytes for one, _ in self._held)


def _may_pass(busy: Counter[int], flow: int) -> bool:
    return not busy or (flow != ORDERED and ORDERED not in busy and flow not in busy)
