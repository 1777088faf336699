"""A line that a command on a host has written."""

from __future__ import annotations

from typing import Literal

import attrs

from trimesh.shape.point import Point


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
        place = ",".join(f"{label}={index}" for label, index in self.point.items())
        return f"{self.host}[{place}] | {self.text}" if place else f"{self.host} | {self.text}"
