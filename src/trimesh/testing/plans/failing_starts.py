"""Starts of processes that fail as planned, counted in the process that starts them, simulated or real."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Final

import attrs
import msgspec

from trimesh._runtime.peers.host import LaunchRequest
from trimesh._runtime.system.records import WorkerConfig
from trimesh.errors import SpawnError
from trimesh.shape.point import place_name
from trimesh.testing.plans.plan import Planned
from trimesh.testing.plans.vocabulary import SpawnFault

STILLBORN: Final = f"{__name__}:end_unheard"
"""What a process runs that ends before its first word."""


def end_unheard(config: WorkerConfig, link: socket.socket, broker: socket.socket, lifelines: list[int]) -> int:
    """End as a worker does whose set-up has failed: with a word on stderr, and none to its owner."""
    del config
    for one in (link, broker):
        one.close()
    for pidfd in lifelines:
        os.close(pidfd)
    sys.stderr.write("a planned fault: it ended before its first word\n")
    return 1


@attrs.define(eq=False)
class FailingStarts:
    """The starts of one process, or of a whole simulation.

    Attributes:
        fire: Called with number, site and place of a fault when it happens.
    """

    fire: Callable[[int, str, str], None]
    _planned: list[tuple[int, SpawnFault, int]] = attrs.field(factory=list[tuple[int, SpawnFault, int]])
    _launched: int = 0

    def plan(self, planned: Planned, fault: SpawnFault) -> None:
        """Let a start fail, counted from now on."""
        self._planned.append((planned.index, fault, self._launched))

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        """Count a start, and return what is to be started for it; see `Sites.launching`."""
        self._launched += 1
        for index, fault, first in self._planned:
            if self._launched == first + fault.nth:
                where = place_name(request.mesh, request.whole.point(request.rank))
                self.fire(index, "spawn", where)
                if fault.stage == "launch":
                    raise SpawnError(f"{where} could not be started: a planned fault ({fault})")
                return msgspec.structs.replace(request, entry=STILLBORN)
        return request
