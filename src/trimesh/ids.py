"""Identifiers that travel: plain integers with names, so that a frame stays small and nothing is parsed.

A process incarnation is one random 63-bit number (`ProcId`); it doubles as the *epoch* of its frames, so a frame
of a dead incarnation can never be taken for one of its successor. Actor meshes and calls are numbered by the
process that makes them; a number is never used twice within an incarnation.
"""

from __future__ import annotations

from typing import NewType

ProcId = NewType("ProcId", int)
"""One incarnation of one process; also the epoch of its frames. 1 .. 2**63 - 1."""

MeshId = NewType("MeshId", int)
"""One actor mesh, unique in the family of processes: drawn at random by the process that spawns it. 0 is the agent."""

CallId = NewType("CallId", int)
"""One call of one process, counted from 1."""

AGENT = MeshId(0)
"""The built-in actor of every process: it spawns and stops the others."""

ID_MAX = 2**63 - 1
