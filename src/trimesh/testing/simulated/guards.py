"""What code in a simulated actor may not do, because all actors share one real process and one virtual clock (rule S1).

`os.kill` would hit the test itself, a socket or a subprocess would go on in real time, and what it answers, and when,
would not follow from the seed: in an actor each raises, and names what to use instead. Some are refused wherever the
actor's own code calls them by name, the others also when a library does it for the actor.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Final

from trimesh._runtime.actors.context import execution_context
from trimesh._runtime.life.current import find_proc_anywhere

_BY_NAME: Final = {
    "kill": 'plan it from the test: `faults.kill(point, how="sigkill")`',
    "abort": 'plan it from the test: `faults.kill(point, how="abort")`',
    "_exit": 'plan it from the test: `faults.kill(point, how="exit(1)")`',
    "getpid": "use `trimesh.current_point()`, or `trimesh.context().incarnation`, to tell processes apart",
}
"""Functions of `os` that libraries call for reasons of their own, and what to do instead."""

_ELSEWHERE: Final = 'or test it over real processes: `@pytest.mark.mesh_backend("proc")`'

_REAL_TIME: Final[tuple[tuple[Any, str, str, str], ...]] = (
    (socket.socket, "__init__", "open a socket", "use calls, streams and `trimesh.open_channel` between actors"),
    (subprocess.Popen, "__init__", "start a subprocess", "pass in what it would answer"),
    (os, "system", "start a subprocess", "pass in what it would answer"),
    (os, "fork", "fork", "spawn processes by `trimesh.this_host().spawn_procs`"),
    (threading.Thread, "start", "start a thread", "use `thread=True` or `trio.to_thread.run_sync`"),
    (asyncio, "new_event_loop", "run asyncio", "write the endpoint with Trio"),
    (asyncio.events, "new_event_loop", "run asyncio", "write the endpoint with Trio"),
)
"""What goes on in real time beside the simulation, whoever calls it: (owner, name, what, what to write instead)."""

_OURS: Final = frozenset({"trimesh", "trio", "pytest", "_pytest", "hypothesis", "outcome"})


def is_in_actor() -> bool:
    """Tell whether the running code is part of a simulated actor, be it a library's."""
    proc = find_proc_anywhere()
    if proc is None or not proc.is_simulated:
        return False
    try:
        execution_context()
    except RuntimeError:
        return False
    return True


def _module(depth: int) -> str:
    return str(sys._getframe(depth).f_globals.get("__name__", ""))  # noqa: SLF001


def _is_runtime(depth: int) -> bool:
    """Tell whether a caller is the runtime, and not what runs the code of an actor inline (`sim_threads.py`)."""
    module = _module(depth + 1)
    return module.startswith("trimesh.") and not module.startswith("trimesh.testing.")


def is_actor_code(depth: int) -> bool:
    """Tell whether a caller is what a user wrote, in an actor: neither the library of Python, nor Trio, nor we.

    Args:
        depth: Of the frame: 1 for the function that asks, 2 for its caller.
    """
    package = _module(depth + 1).partition(".")[0]
    if package in _OURS or (package in sys.stdlib_module_names and package != "__main__"):
        return False
    return is_in_actor()


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Generator[None, None, None]:
    """Give attributes other values for a while: (owner, name, value)."""
    made = list(changes)
    before: list[tuple[Any, str, Any]] = []
    for owner, name, _ in made:
        own: dict[str, Any] = owner.__dict__
        before.append((owner, name, own.get(name, replaced)))
    for owner, name, value in made:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is replaced:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, value)


def _refusal_by_name(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if is_actor_code(2):
            raise RuntimeError(
                f"os.{name}() in an actor would act on the process of the whole simulation: {_BY_NAME[name]}"
            )
        return real(*args, **kwargs)

    return refuse


def _refusal(real: Callable[..., Any], what: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if is_in_actor() and not _is_runtime(2):
            raise RuntimeError(
                f"a simulated actor cannot {what}: it would go on in real time, beside the virtual clock and not by "
                f"the seed; {instead}, {_ELSEWHERE}"
            )
        return real(*args, **kwargs)

    return refuse


@contextmanager
def guarded() -> Generator[None, None, None]:
    """Refuse what simulated actors may not do, while a simulation runs."""
    by_name = [(os, name, _refusal_by_name(name, getattr(os, name))) for name in _BY_NAME]
    real_time = [
        (owner, name, _refusal(getattr(owner, name), what, instead)) for owner, name, what, instead in _REAL_TIME
    ]
    with replaced([*by_name, *real_time]):
        yield
