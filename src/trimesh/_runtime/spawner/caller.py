"""What a new process takes over from its caller, as the caller sees it at the moment of the launch (rule O2)."""

from __future__ import annotations

import os
import re
import resource
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.boot import own_prefixes

_RESOURCES: Final = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

_THREADS_VARIABLE: Final = b"OMP_NUM_THREADS"


def capture_caller(overlay: Mapping[str, str], *, are_several: bool, cwd: str | None = None) -> wire.CallerContext:
    """Return the context of the running process.

    Args:
        overlay: Variables set on top of the environment.
        are_several: The process is one of several of its mesh: each gets one computing thread unless the caller's
            environment or `overlay` says otherwise, as torchrun does, because N times all cores is too much.
        cwd: Working directory; by default the caller's.
    """
    env = dict(os.environb)
    env.update((os.fsencode(name), os.fsencode(value)) for name, value in overlay.items())
    if are_several:
        env.setdefault(_THREADS_VARIABLE, b"1")
    return wire.CallerContext(
        env=env,
        cwd=_working_directory() if cwd is None else os.fsencode(Path(cwd).absolute()),
        sys_path=tuple(os.fsencode(path) for path in sys.path),
        argv=tuple(os.fsencode(argument) for argument in sys.argv),
        filters=warning_filters(),
        umask=_umask(),
        rlimits=tuple((number, *resource.getrlimit(number)) for number in _RESOURCES),
        prefixes=tuple(os.fsencode(prefix) for prefix in own_prefixes()),
        version=sys.version_info[:2],
    )


def _working_directory() -> bytes:
    try:
        return os.getcwdb()
    except FileNotFoundError:  # it was removed under us: the new process stays where the spawner is
        return b""


def _umask() -> int:
    """Read the mask without changing it: `os.umask` would, for a moment, for all threads."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def warning_filters() -> tuple[wire.WarningFilter, ...]:
    """Return `warnings.filters`, first to last."""
    found = list[wire.WarningFilter]()
    for action, message, category, module, line in warnings.filters:
        for kind in category if isinstance(category, tuple) else (category,):
            parts = (kind.__module__, kind.__qualname__, _pattern(module), line)
            found.append(wire.WarningFilter(action, _pattern(message), *parts))
    return tuple(found)


def _pattern(pattern: str | re.Pattern[str] | None) -> str:
    if pattern is None:
        return ""
    return pattern if isinstance(pattern, str) else pattern.pattern
