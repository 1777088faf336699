"""Publications that do not go on as they should, in words; PURE."""

from __future__ import annotations

from collections.abc import Iterator

from trimesh.cli.text import duration, one_line, size, some
from trimesh.observe import KeptVersions, RunSnapshot, UnreadVersions, kept_versions, unread_versions

_LINE_CHARS = 300


def kept_title(one: KeptVersions) -> str:
    """Return who keeps which versions, for how long."""
    has = "has" if len(one.holders) == 1 else "have"
    numbers = ", ".join(map(str, one.versions))
    plural = "s" * (len(one.versions) > 1)
    kept = f"version{plural} {numbers} of {some(one.publishers)}"
    return f"{some(one.holders)} {has} {kept} pinned, in the way of publish for {duration(one.seconds)}"


def kept_text(one: KeptVersions) -> str:
    """Return what follows from that, what its holder does, and what to do about it."""
    effect = f"{one.kept} of {one.slots} slots cannot be written to, the latest version is {one.latest}"
    if one.is_waiting:
        effect = f"publish waits until one is let go: {effect}"
    doing = ""
    if one.call is not None:
        doing = f"; the oldest call there is {one.call.name}.{one.call.endpoint}, for {duration(one.call.age)}"
    return f"{effect}{doing}; leave the block of pin() once the tensors are copied, or publish with more slots"


def unread_title(one: UnreadVersions) -> str:
    """Return who publishes, how many versions no process has read, for how long."""
    versions = f"{one.count} versions in {duration(one.seconds)}"
    return f"{some(one.publishers)} has published {versions} that no process has read"


def unread_text(one: UnreadVersions) -> str:
    """Return who has read before, what it costs, and what to do about it."""
    who = f"{some(one.readers)} has read earlier ones" if one.readers else "it has no reader"
    cost = f"; each is copied, into {size(one.nbytes)} of memory" * bool(one.nbytes)
    return f"{who}{cost}; look whether the task that follows it has ended, or was never started"


def publication_lines(seen: RunSnapshot) -> Iterator[str]:
    """Yield a line on each publication that does not go on as it should."""
    for kept in kept_versions(seen):
        yield one_line(f"pinned: {kept_title(kept)}; {kept_text(kept)}", _LINE_CHARS)
    for unread in unread_versions(seen):
        yield one_line(f"unread: {unread_title(unread)}; {unread_text(unread)}", _LINE_CHARS)
