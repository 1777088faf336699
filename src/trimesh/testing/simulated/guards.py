"""Refusals: what code in a simulated actor may not do, as all actors share one process and one virtual clock (rule S1).

`stdlib_table.py` lists the names. `os.kill` would hit the test itself, a socket or a subprocess would go on in real
time: in an actor each raises, also when a library calls it for the actor, and names what to use instead.
"""

from __future__ import annotations

import functools
import importlib
import os
import reprlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from trimesh._runtime.actors.context import execution_context
from trimesh._runtime.life.current import current_proc, find_proc_anywhere
from trimesh.testing.simulated.own_modules import Change
from trimesh.testing.simulated.stdlib_table import TABLE, Refusal

_ELSEWHERE: Final = 'or test it over real processes: `@pytest.mark.mesh_backend("proc")`'

_TOOLS: Final = ("pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis", "coverage")
"""First letters of packages that run tests: their signal handlers run inside of whatever runs."""

_OURS: Final = frozenset({"trimesh", "trio", "outcome"})

_WAITING: Final = frozenset(
    {"threading", "queue", "selectors", "subprocess", "socket", "ssl", "asyncio", "concurrent", "multiprocessing"}
)
"""Packages of the standard library that wait in real time, and so read real clocks."""


def is_in_actor() -> bool:
    """Return whether the running code is part of a simulated actor, be it a library's."""
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


def _is_exempt(depth: int) -> bool:
    """Return whether a caller is the runtime, but not what runs an actor's code inline (`threads.py`), or a tool."""
    module = _module(depth + 1)
    if module.startswith("trimesh."):
        return not module.startswith("trimesh.testing.")
    return module.startswith(_TOOLS)


def is_actor_code(depth: int) -> bool:
    """Return whether a caller was written by a user, in an actor: not the standard library, Trio or this package.

    Args:
        depth: Of the frame: 1 for the function that asks, 2 for its caller.
    """
    package = _module(depth + 1).partition(".")[0]
    return (package not in sys.stdlib_module_names or package == "__main__") and reads_virtual_clock(depth + 1)


def reads_virtual_clock(depth: int) -> bool:
    """Return whether a caller, in an actor, gets virtual time: all but Trio, tools, and code that waits in real time.

    Args:
        depth: As in `is_actor_code`.
    """
    package = _module(depth + 1).partition(".")[0]
    return package not in _OURS and package not in _WAITING and not package.startswith(_TOOLS) and is_in_actor()


@contextmanager
def replaced(changes: Iterable[Change]) -> Generator[None, None, None]:
    """Give attributes other values for a while: (owner, name, value)."""
    made = list(changes)
    before: list[Change] = []
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


def owner_of(path: str) -> Any:
    """Return the module or class of a row of the table."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def refused() -> list[Change]:
    """Return what refuses the names of the table in simulated actors, and elsewhere calls the real ones."""
    return [
        (owner, name, _refusing(getattr(owner, name), refusal, full)) for owner, name, refusal, full in _refused_names()
    ]


def own_pid() -> Change:
    """Return a `getpid` that tells simulated processes apart, by numbers that no real one has."""
    real = os.getpid

    def getpid() -> int:
        return current_proc().pid if is_actor_code(2) else real()

    return os, "getpid", getpid


@functools.cache
def _refused_names() -> tuple[tuple[Any, str, Refusal, str], ...]:
    return tuple(_names_of_table())


def _names_of_table() -> Iterator[tuple[Any, str, Refusal, str]]:
    for path, row in TABLE.items():
        if row.refused:
            owner = owner_of(path)
            for refusal, names in row.refused.items():
                for name in names.split():
                    if hasattr(owner, name):
                        yield owner, name, refusal, path if name == "__init__" else f"{path}.{name}"


def _refusing(real: Callable[..., Any], refusal: Refusal, name: str) -> Callable[..., Any]:
    is_refused = is_actor_code if refusal.by_name else _is_refused

    @functools.wraps(real)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if is_refused(2) and not _only_reads(refusal.reads, args, kwargs):
            raise RuntimeError(
                f"a simulated actor cannot {refusal.what}: {refusal.because}; got {name}({_told(args)}); "
                f"{refusal.instead}, {_ELSEWHERE}"
            )
        return real(*args, **kwargs)

    return refuse


def _is_refused(depth: int) -> bool:
    return is_in_actor() and not _is_exempt(depth + 1)


def _only_reads(count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return count >= 0 and all(value is None for value in (*args[count:], *kwargs.values()))


def _told(args: tuple[Any, ...]) -> str:
    """Return those of the arguments that are short: no objects of methods, no environments."""
    return ", ".join(reprlib.repr(arg) for arg in args if isinstance(arg, int | float | str | bytes))
