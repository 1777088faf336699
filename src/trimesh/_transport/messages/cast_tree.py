"""The tree by which the bodies of a cast come to several hosts: which of them feeds which others.

A sender that sends n bytes to each of its hosts itself needs the time of that many copies. Hosts that feed others cost
one copy less each, and the time that the first piece of a body needs to pass through a host. PURE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimesh import limits
from trimesh._transport.interface.base import Buffer
from trimesh._transport.messages.casting import CastBody, HostCaster, kept_bytes


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
