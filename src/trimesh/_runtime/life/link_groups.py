"""The groups of links that casts of this process have gone to, kept for the next cast to the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trimesh import limits
from trimesh._transport.interface import Link, LinkGroup


class LinkGroups:
    """At most `limits.GROUPS_MAX` groups; the oldest one makes room.

    Attributes:
        groups: By their links.
    """

    def __init__(self, define: Callable[[Sequence[Link]], LinkGroup]) -> None:
        self._define = define
        self.groups: dict[tuple[Link, ...], LinkGroup] = {}

    def of(self, links: tuple[Link, ...]) -> LinkGroup:
        group = self.groups.get(links)
        if group is None:
            if len(self.groups) >= limits.GROUPS_MAX:
                self.groups.pop(next(iter(self.groups))).close()
            group = self.groups[links] = self._define(links)
        return group

    def forget(self, link: Link) -> None:
        """Close every group that a link is part of."""
        for links in [links for links in self.groups if link in links]:
            self.groups.pop(links).close()
