"""How the programs of these tests speak with the test: a line of JSON for each event, over a named pipe.

Any process of the run may speak, forked ones too; nothing stays open in between, so no descriptor is added or leaked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import trio

import trimesh

PATH = "TRIMESH_TEST_STAGE"

_heard: list[str] = []


def say(event: str, **fields: Any) -> None:
    """Tell the test of an event."""
    line = json.dumps({"event": event, "pid": os.getpid(), "at": time.monotonic(), **fields}) + "\n"
    stage = os.open(os.environ[PATH], os.O_WRONLY)
    try:
        assert os.write(stage, line.encode()) == len(line.encode())
    finally:
        os.close(stage)


async def hear(*words: str) -> str:
    """Wait in the controller until the test says one of `words`, and return it; what it said before is dropped."""
    while (word := next((one for one in _heard if one in words), None)) is None:
        await trio.lowlevel.wait_readable(0)
        _heard.extend(os.read(0, 4096).decode().split())
    del _heard[: _heard.index(word) + 1]
    return word


def plan(**defaults: Any) -> SimpleNamespace:
    """Return what the test wants: its arguments over the defaults."""
    return SimpleNamespace(**{**defaults, **json.loads(sys.argv[1])})


def describe(error: BaseException) -> dict[str, Any]:
    """Return type, text and leaves of what a block has raised."""
    leaves = [
        {
            "type": type(leaf).__name__,
            "text": str(leaf),
            "point": None if (where := trimesh.origin(leaf)) is None or where.point is None else dict(where.point),
            "mesh": None if where is None else where.mesh,
            "pid": None if where is None else where.pid,
            **{name: getattr(leaf, name, None) for name in ("exit_code", "signal", "reason", "by", "stderr_tail")},
        }
        for leaf in trimesh.leaves(error)
    ]
    return {"type": type(error).__name__, "text": str(error), "leaves": leaves}
