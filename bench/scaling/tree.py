"""The shapes of a cast: flat from the caller, or down a tree of host leaders; what each counts and how long it takes.

    flat     caller -> every rank
    tree     caller -> leaders -> leaders ...      every leader -> the ranks of its own host

A tree of fan-out F over H hosts: the caller divides the hosts among at most F leaders as evenly as it can; a leader
keeps one host for itself and divides the rest in the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.scaling.costs import Costs


def shares(hosts: int, fan_out: int) -> list[int]:
    """Return how many hosts each of at most `fan_out` leaders answers for, itself included."""
    parts = min(hosts, fan_out)
    return [hosts // parts + (part < hosts % parts) for part in range(parts)] if parts else []


@dataclass(frozen=True)
class Shape:
    """Who calls whom.

    Attributes:
        hosts: Hosts.
        per_host: Ranks on each.
        fan_out: Leaders that one process calls; 0 for a flat cast.
    """

    hosts: int
    per_host: int
    fan_out: int = 0

    @property
    def ranks(self) -> int:
        """Ranks that answer."""
        return self.hosts * self.per_host

    @property
    def processes(self) -> int:
        """Processes beside the caller: ranks, and leaders where there are any."""
        return self.ranks + (self.hosts if self.fan_out else 0)


@dataclass(frozen=True)
class Counts:
    """What happens in one cast with its replies.

    Attributes:
        messages: Calls and replies, all links together.
        caller_messages: Those that the caller sends or takes.
        links_max: Links of the process that has most.
        hops: Links from the caller to the farthest rank.
    """

    messages: int
    caller_messages: int
    links_max: int
    hops: int


def counts(shape: Shape) -> Counts:
    """Return what a cast over a shape counts."""
    if not shape.fan_out:
        return Counts(2 * shape.ranks, 2 * shape.ranks, shape.ranks, 1)
    top = shares(shape.hosts, shape.fan_out)
    links = max([len(top), *(1 + shape.per_host + below for below in _below(top, shape.fan_out))])
    return Counts(2 * shape.processes, 2 * len(top), links, 1 + levels(shape.hosts, shape.fan_out))


def levels(hosts: int, fan_out: int) -> int:
    """Return the levels of leaders over `hosts`."""
    top = shares(hosts, fan_out)
    return 1 + levels(top[0] - 1, fan_out) if top else 0


def _below(parts: list[int], fan_out: int) -> Iterator[int]:
    """Yield how many leaders stand right below each kind of leader there is."""
    for part in set(parts):
        below = shares(part - 1, fan_out)
        yield len(below)
        yield from _below(below, fan_out)


MESSAGES_BYTES = 75
"""A call and a reply of one float, without the float."""
LIST_BYTES = 4
"""What a list of floats takes besides them."""
FLOAT_BYTES = 9


def caller_bytes(shape: Shape) -> int:
    """Return the bytes that the caller sends and takes when a float is cast and answered, heads included."""
    if not shape.fan_out:
        return shape.ranks * (MESSAGES_BYTES + FLOAT_BYTES)
    top = len(shares(shape.hosts, shape.fan_out))
    return top * (MESSAGES_BYTES + LIST_BYTES) + shape.ranks * FLOAT_BYTES


@dataclass(frozen=True)
class Network:
    """What the processes run on, for `seconds`.

    Attributes:
        costs: Of the processes; every process has a core of its own.
        is_remote: Whether hosts are joined by stream sockets; else all is one host.
        value_bytes: Pickled size of one rank's answer in a list of answers.
        reply_bytes: What a reply has besides.
    """

    costs: Costs
    is_remote: bool
    value_bytes: float
    reply_bytes: float


def seconds(shape: Shape, network: Network) -> float:
    """Return the time from a cast to its last reply when every process has a core, in seconds."""
    costs = network.costs
    if not shape.fan_out:
        ranks = [_Below(network.is_remote, costs.work, 1)] * shape.ranks
        return _call(costs.call, ranks, network) / 1e6
    below = _leaders(shares(shape.hosts, shape.fan_out), shape, network)
    return _call(costs.call, below, network) / 1e6


@dataclass(frozen=True)
class _Below:
    """One of those that a process calls: whether on another host, how long it takes, and for how many it answers."""

    is_remote: bool
    duration: float
    values: int


def _leaders(parts: list[int], shape: Shape, network: Network) -> list[_Below]:
    durations = {part: _leader(part, shape.fan_out, shape.per_host, network) for part in set(parts)}
    return [_Below(network.is_remote, durations[part], part * shape.per_host) for part in parts]


@functools.cache
def _leader(hosts: int, fan_out: int, per_host: int, network: Network) -> float:
    """Return how long a leader takes for the hosts below it and its own: it calls leaders first, then its ranks."""
    shape = Shape(hosts, per_host, fan_out)
    below = _leaders(shares(hosts - 1, fan_out), shape, network)
    ranks = [_Below(is_remote=False, duration=network.costs.work, values=1)] * per_host
    return _call(network.costs.relay, below + ranks, network)


def _call(start: float, below: list[_Below], network: Network) -> float:
    """Return when a process has the last reply: it sends to one after the other, then takes replies as they come."""
    costs, now = network.costs, start
    replies: list[tuple[float, float]] = []
    for one in below:
        now += costs.send + costs.tcp_send * one.is_remote
        hop = costs.tcp_hop if one.is_remote else costs.hop
        took = costs.take + costs.tcp_take * one.is_remote
        took += costs.byte * (network.reply_bytes + one.values * network.value_bytes)
        replies.append((now + hop + one.duration + hop, took))
    for arrival, took in sorted(replies):
        now = max(now, arrival) + took
    return now


def shared_seconds(shape: Shape, costs: Costs, cores: int) -> float:
    """Return the time of a cast whose processes, caller included, share the cores of one machine, in seconds.

    What a call begins and ends with is done by one process while the others wait; all the rest is spread over the
    cores, which therefore bound it.
    """
    per_rank = costs.send + costs.take + costs.work_of(shape.processes)
    if not shape.fan_out:
        return (costs.call + 2 * costs.hop + shape.ranks * per_rank / cores) / 1e6
    depth = levels(shape.hosts, shape.fan_out)
    serial = costs.call + depth * costs.relay + 2 * costs.hop * (depth + 1)
    relays = costs.relay + costs.send + costs.take + (costs.work_of(shape.processes) - costs.work)
    spread = shape.ranks * per_rank + max(0, shape.hosts - depth) * relays
    return (serial + spread / cores) / 1e6


def bulk_seconds(shape: Shape, costs: Costs, nbytes: int, wire_bytes_per_second: float = math.inf) -> float:
    """Return the time to bring a large argument to every rank, over the tree or flat, replies left aside.

    Every host copies once for all of its ranks. Between hosts the bytes leave a process for one receiver after the
    other, at the rate of the wire or of the process that writes them, whichever is less. A leader passes on what it
    has in whole, not while it comes.
    """
    wire = nbytes * max(costs.tcp_copy / 1e6, 1 / wire_bytes_per_second)
    local = nbytes * costs.copy / 1e6
    if not shape.fan_out:
        return shape.ranks * wire if shape.hosts > 1 else local
    return _bulk(shape.hosts, shape.fan_out, wire) + local


def _bulk(hosts: int, fan_out: int, wire: float) -> float:
    """Return when the last leader has the bytes; the largest part is served first, so that its own part may begin."""
    finish = 0.0
    for index, part in enumerate(shares(hosts, fan_out), 1):
        finish = max(finish, index * wire + _bulk(part - 1, fan_out, wire))
    return finish
