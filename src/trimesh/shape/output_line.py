"""A line that a command on a host has written."""

from __future__ import annotations

from typing import Literal

import attrs

from trimesh.shape.point import Point, place_name


@attrs.frozen
class OutputLine:
    """A line of a command; `print` shows it behind the coordinates of its host.

    Attributes:
        point: Coordinates of the host, in the mesh of hosts that the command runs on.
        host: Name of the host.
        stream: Where the command has written it.
        text: Without its newline. Bytes that are no UTF-8 are replaced. A line of more than
            `limits.OUTPUT_LINE_BYTES_MAX` bytes comes as several.
    """

    point: Point
    host: str
    stream: Literal["stdout", "stderr"]
    text: str

    def __str__(self) -> str:
        """Return the line as the output of processes is shown."""
        return f"{place_name(self.host, self.point)} | {self.text}"
