"""The hosts that a program has lost, as the program itself has seen it: for tests whose program prints something else.

What a program prints of a `HostLost` is too little to find out why there was one more.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from trimesh import HostLost
from trimesh.errors import ConnectError
from trimesh.observe import autopsy

_FRAMES = 6


def tell_losses(path: str) -> None:
    """Have every `HostLost` that this process makes from now on written to a file."""
    made = HostLost.__init__

    @wraps(made)
    def make(error: HostLost, *args: Any, **named: Any) -> None:
        made(error, *args, **named)
        frames = traceback.extract_stack(limit=_FRAMES + 1)[:-1]
        where = " < ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in reversed(frames))
        seen = f".host={error.host!r} .point={error.point!r} .reason={error.reason!r} {error}"
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {_clock(time.time())} HostLost {seen!r} made at {where}\n")

    HostLost.__init__ = make  # type: ignore[method-assign]


def losses_told(path: Path) -> str:
    """Return what is in such a file, and the time line of the run by its flight records; empty if nothing was lost."""
    if not path.exists():
        return ""
    told = path.read_text(encoding="utf-8")
    return "\n".join(["hosts that the program has lost:", told, *_time_line(int(told.split()[0]))])


def _time_line(pid: int) -> Iterator[str]:
    try:
        found = autopsy(pid=pid)
    except ConnectError as error:
        yield f"no time line: {error}"
        return
    seen = [(one.at, f"{one.kind} {one.name}: {one.text}") for one in found.events]
    for proc in found.procs:
        name = f"{proc.name or 'controller'} (pid {proc.pid})"
        seen += [(proc.began_at, f"{name} began"), (proc.last_at, f"{name} last sign of life, {proc.state}")]
        seen += [(one.at, f"{one.name} {one.outcome} in {name}") for one in proc.calls]
    yield "time line of the run:"
    yield from (f"{_clock(at)} {text}" for at, text in sorted(seen))


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) + f"{at % 1:.4f}"[1:]
