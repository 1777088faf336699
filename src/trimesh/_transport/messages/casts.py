"""Multicast to several processes of another host: bodies enter the host once, and its processes map them.

    sender                                   the other host
    HostCaster  --bodies, once-->            keeps them in memory that its processes may map
                <--location--
    link        --OFFER: head, location-->   process maps them
                <--TAKEN, or REFUSED--
    HostCaster  --release-->

Three or more hosts form a tree (below): the sender sends bodies to some, whose agents feed them to others, which keep
them and answer as if the sender had sent them.

    HostCaster a   --FEED b, bodies-->     the agent of a  --bodies-->  the agent of b
    HostCaster b   --FED by a-->                                        the agent of b
                   <--location--

Each link has a `CastLeaf`: a chunked message that sends no chunks at first. It holds back messages that may not pass
it, and sends its chunks after all if the other host cannot keep the bodies or its process cannot map them.

    HB-1 Every leaf is settled once: taken, sent in chunks, or its link has ended.
    HB-2 Memory kept by the other host is bounded; a cast without room there is sent in chunks at once.
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
    """Return the number of bytes after a body of `size` that align the next body for an array."""
    return -size % limits.HOST_CAST_ALIGNMENT


def kept_bytes(sizes: Iterable[int]) -> int:
    """Return the number of bytes that bodies of these sizes take at a host, with padding."""
    return sum(size + padding(size) for size in sizes)


class CastBody:
    """The bodies of one cast at one host.

    Args:
        owner: Caster of its host.
        number: Number of the cast at its host.
        bodies: As sent.
        leaves: Number of links on which they are offered.

    Attributes:
        owner, number: As above.
        leaves: Number of links and fed hosts that still need them.
        size: Size in bytes, with padding.
        source: The same bodies at the host that feeds this one; None if the sender sends them, or they have arrived.
        fed: The same bodies at hosts that this one feeds and that have not answered.
        where: Their location, for processes of the host; b"" before they are there.
        has_failed: Whether they will never be there.
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
        """Offer a leaf as soon as the bodies are there."""
        if self.has_failed:
            link.send_chunks(leaf)
        elif self.where:
            link.offer(leaf, self.where)
        else:
            self._waiting[leaf] = link

    def ready(self, where: bytes) -> None:
        """Record the location of the bodies and offer the waiting leaves."""
        self.where = where
        waiting, self._waiting = self._waiting, {}
        for leaf, link in waiting.items():
            link.offer(leaf, where)

    def fail(self) -> None:
        """Mark the bodies as unavailable: waiting leaves are sent in chunks.

        Leaves that were offered before get an answer, or their link ends.
        """
        self.has_failed = True
        for other in self.fed.copy():
            other.owner.send_itself(other)
        waiting, self._waiting = self._waiting, {}
        for leaf, link in waiting.items():
            link.send_chunks(leaf)

    def leave(self, leaf: CastLeaf) -> None:
        """Note that a leaf no longer needs them."""
        self._waiting.pop(leaf, None)
        self.count_down()

    def count_down(self) -> None:
        """Note that a link, or a fed host, no longer needs them."""
        self.leaves -= 1
        if not self.leaves:
            self.owner.left(self)

    # ---- in a tree -------------------------------------------------------------------------------------------

    def feed(self, other: CastBody) -> None:
        """Let this host feed another one, whose cast began later."""
        other.source = self
        self.fed.append(other)
        self.leaves += 1

    def part(self) -> None:
        """Detach from the source: this host has answered, or never will. Idempotent."""
        source, self.source = self.source, None
        if source is not None:
            source.fed.remove(self)
            source.count_down()


class CastLeaf(ChunkedMessage):
    """A large message on one link whose bodies enter the peer's host once, for several links.

    Args:
        head, bodies, flow, completion: As for a chunked message.

    Attributes:
        is_offered: Whether the peer was sent the location of the bodies and has not answered.
    """

    def __init__(
        self, head: bytes, bodies: Sequence[Buffer], flow: int, completion: Completion, body: CastBody
    ) -> None:
        super().__init__(head, bodies, flow, completion)
        self.is_offered = False
        self._body: CastBody | None = body

    @property
    def is_apart(self) -> bool:
        """True while it sends no chunks."""
        return self._body is not None

    def begin(self, link: NativeLink) -> None:
        """Offer this leaf on `link`, where it no longer has to wait."""
        assert self._body is not None
        self.number, self.is_offered = 0, False  # it may have begun on another link, which never came up
        self._body.join(self, link)

    def offer(self, where: bytes) -> list[Buffer]:
        """Return the bodies of the message that offers it: table, head, and location."""
        self.is_offered = True
        return [self._table, self._head, where]

    def leave(self) -> None:
        """Release the bodies at the host. Idempotent."""
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
        wake: Called when there are bodies, or releases, to send.
        agent: Incarnation of its agent.
        circle: Key that is equal for hosts whose agents may connect to each other; None if this one may not.

    Attributes:
        agent, circle: As above.
        bodies: Bodies that wait to be sent, in order.
        let_go: Numbers of bodies that were sent, or are being sent, and that no leaf needs any more.
        kept: Bytes that the host keeps or will keep.
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
        """Begin a cast to `leaves` processes; return None if it does not pay, or there is no room for it (HB-2).

        Args:
            bodies: As sent.
            leaves: Number of links on which they are offered.
            at_least: Smallest number of links for which a cast pays.
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
        """Release bodies that no leaf and no fed host needs any more."""
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
        """Handle the host's answer about the bodies of a cast: their location, or b"" if it cannot keep them.

        No effect if they were released meanwhile.
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
        """Note that the host could not feed another one; no effect if that one has answered meanwhile."""
        for body in self._casts.values():
            for other in body.fed:
                if (other.owner.agent, other.number) == (agent, number):
                    self.unfed.add(agent)
                    other.owner.send_itself(other)
                    return

    def send_itself(self, body: CastBody) -> None:
        """Let the sender send the bodies that another host was to feed (HB-4), and those that this one was to feed."""
        body.part()
        if self._is_closed or body in self.bodies:
            return
        for other in body.fed.copy():
            other.owner.send_itself(other)
        if self._casts.pop(body.number, None) is None:
            return  # it was kept only for the hosts that it was to feed
        self.let_go.append(body.number)
        self._last += 1
        body.number = self._last
        self._casts[body.number] = body
        self.bodies.append(body)
        self._wake()

    def close(self) -> None:
        """Send all casts in flight in chunks, and begin no more. Idempotent."""
        self._is_closed = True
        self.bodies.clear()
        self.let_go.clear()
        for body in list(self._casts.values()):
            body.part()
            body.fail()


# ---- cast tree: which hosts feed which others with the bodies of a cast ----------------------------------------------

# Sending n bytes to each of m hosts takes the sender the time of m copies. Each host that another one feeds saves a
# copy, and costs the time that the first piece of a body needs to pass through a host. PURE.


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
    """Return the fastest fan-out: the number of hosts that the sender, and each host, sends `size` bytes to."""
    widths = [*(1 << n for n in range((hosts - 1).bit_length())), hosts]
    return min(widths, key=lambda width: width * size + depth(hosts, width) * limits.HOST_CAST_HOP_BYTES)


def depth(hosts: int, width: int) -> int:
    """Return the number of hops to the last of some hosts if each sends to `width` others."""
    if width == 1:
        return hosts
    hops, reached = 0, 0
    while reached < hosts:
        hops += 1
        reached += width**hops
    return hops


# ---- precedence: which messages of a link may pass a large one that is being sent in chunks --------------------------

# A *flow* is a number that the sender chooses: messages of one flow keep their order. A message of flow 0 keeps it with
# all others: it passes no message, and no message passes it.

ORDERED: Final = 0
"""The flow that keeps order with all others."""


class Precedence:
    """Chunked messages of one link, and the messages that wait behind them.

    Attributes:
        under_way: Messages that are being sent in chunks, in the order of their turns.
        apart: Messages in flight that send no chunks.
        busy: Number of messages of each flow that are in flight or held, always the same object; if empty, every
            message may be sent.
    """

    def __init__(self) -> None:
        self.under_way: deque[ChunkedMessage] = deque()
        self.apart: list[CastLeaf] = []
        self.busy: Counter[int] = Counter()
        self._held: deque[tuple[Outgoing | ChunkedMessage, int]] = deque()

    def may_pass(self, flow: int) -> bool:
        """Return whether a message may pass all messages that are in flight or held."""
        return _may_pass(self.busy, flow)

    def add(self, chunked: ChunkedMessage) -> bool:
        """Add a chunked message; return whether it is in flight, not held."""
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
        """Let a message that was apart send chunks."""
        self.apart.remove(leaf)
        self.under_way.append(leaf)

    def hold(self, one: Outgoing | ChunkedMessage, flow: int) -> None:
        """Hold back a message that must not be sent now."""
        self.busy[flow] += 1
        self._held.append((one, flow))

    def out(self, chunked: ChunkedMessage, send: Callable[[Outgoing], object]) -> list[CastLeaf]:
        """Record that a chunked message was sent, and send the messages that waited for it.

        Returns:
            Leaves that are no longer held and may begin.
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
        """Remove and return all messages, in order."""
        found = [*((chunked, chunked.flow) for chunked in (*self.under_way, *self.apart)), *self._held]
        self.under_way.clear()
        self.apart.clear()
        self._held.clear()
        self.busy.clear()
        return found

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are in no chunk and in no frame yet."""
        going = sum(one.waiting_bytes for one in (*self.under_way, *self.apart))
        return going + sum(one.waiting_bytes for one, _ in self._held)


def _may_pass(busy: Counter[int], flow: int) -> bool:
    return not busy or (flow != ORDERED and ORDERED not in busy and flow not in busy)
