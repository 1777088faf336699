"""What happened in one simulated run, in order; the same for the same seed, on every machine and in every process.

    1.250000  dispatch  w[gpus=2]  step()
    ^         ^         ^          ^
    virtual   site      where      what

An entry says what happened by names, coordinates and counted numbers. Ids, addresses, hash order and the wall clock
never enter, so two runs with one seed have the same text, and the same `hash`, whatever PYTHONHASHSEED is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import attrs

_MAGIC = "# trimesh trace 1"


@attrs.frozen
class Entry:
    """One thing that happened.

    Attributes:
        time: Virtual seconds since the run began.
        site: Where in the runtime: "spawn", "receive", "dispatch", "exit", "fault", "note".
        where: Coordinates, as `mesh[gpus=2]`.
        what: In words.
    """

    time: float
    site: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.time:.9f}  {self.site:8}  {self.where}  {self.what}"


@attrs.define(eq=False)
class Trace:
    """The ordered record of one run.

    Attributes:
        seed: Of the run.
        entries: What happened.
    """

    seed: int
    entries: list[Entry] = attrs.field(factory=list[Entry])

    def add(self, time: float, site: str, where: str, what: str) -> None:
        """Note what happens now."""
        self.entries.append(Entry(time, site, where, " ".join(what.split())))

    @property
    def text(self) -> str:
        """The file form: a line with the seed, then one line an entry."""
        lines = [f"{_MAGIC} seed={self.seed:#x}", *map(str, self.entries)]
        return "\n".join(lines) + "\n"

    @property
    def hash(self) -> str:
        """16 hexadecimal digits that stand for everything in it."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def write(self, path: Path) -> None:
        """Write the file form."""
        path.write_text(self.text)

    def at(self, site: str) -> Sequence[Entry]:
        """Return what happened at one site."""
        return [entry for entry in self.entries if entry.site == site]
