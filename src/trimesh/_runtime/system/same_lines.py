"""Identical lines of many processes on other hosts, shown as one (rule H12).

    first ones --> shown as they come --> of `limits.OUTPUT_SAME_SHOWN` processes --> counted --> "(x120 more) text"

SM-1 A line counts as the same within `limits.OUTPUT_SAME_SECONDS` of the first one like it, in one mesh and stream.
SM-2 What one process writes again and again is shown again and again, unless many do.
SM-3 Nothing waits for it: lines that differ are shown at once, so before the count of those that came before them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trimesh import limits
from trimesh._runtime.system.records import OutputChunk

_Key = tuple[str, int, bytes]


class _Same:
    """Lines that are the same."""

    __slots__ = ("members", "more", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.members = set[str]()
        self.more = 0


class SameLines:
    """What was shown in the last second, and how many more lines were the same. It has no clock of its own."""

    def __init__(self) -> None:
        self._found: dict[_Key, _Same] = {}

    def __bool__(self) -> bool:
        """Whether there is a count to be told."""
        return any(same.more for same in self._found.values())

    def take(self, chunks: Iterable[OutputChunk], now: float) -> list[OutputChunk]:
        """Return what is to be shown now: lines that are not the same as many others, and counts that are due."""
        shown = self.due(now)
        for chunk in chunks:
            lines = tuple(line for line in chunk.lines if self._is_shown(chunk, line, now))
            if lines or chunk.dropped:
                shown.append(chunk if len(lines) == len(chunk.lines) else msgspec.structs.replace(chunk, lines=lines))
        return shown

    def _is_shown(self, chunk: OutputChunk, line: bytes, now: float) -> bool:
        key = (_mesh_of(chunk.member), chunk.stream, line)
        same = self._found.get(key)
        if same is None:
            if len(self._found) < limits.OUTPUT_SAME_KEPT:
                same = self._found[key] = _Same(now + limits.OUTPUT_SAME_SECONDS)
                same.members.add(chunk.member)
            return True
        if len(same.members) >= limits.OUTPUT_SAME_SHOWN:
            same.more += 1
            return False
        same.members.add(chunk.member)
        return True

    def due(self, now: float) -> list[OutputChunk]:
        """Return the counts whose second is over, and forget them; oldest first."""
        told = list[OutputChunk]()
        for key, same in list(self._found.items()):
            if now < same.until:
                break  # they are in the order of their ends
            del self._found[key]
            if same.more:
                mesh, stream, line = key
                told.append(OutputChunk(mesh, stream, 0, (b"(x%d more) %b" % (same.more, line),)))
        return told


def _mesh_of(member: str) -> str:
    return member.partition("[")[0]
