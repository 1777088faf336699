"""Whether a process looks at its links for a while before it sleeps, and on what its Trio loop sleeps.

Looking saves the time that the kernel takes to wake a sleeper on another core, and costs that core meanwhile. The
native library decides it anew before each sleep (`native/src/lookout.zig`); here is decided whether it may at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import trio

from trimesh import limits

_CHOICES: Final = {"": limits.LOOK_SECONDS, "auto": limits.LOOK_SECONDS, "off": 0.0}
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def chosen_look_seconds(environment: Mapping[str, str] = os.environ, quota: Path = _QUOTA) -> float:
    """Return for how long this process may look before it sleeps; 0 for never.

    Args:
        environment: Of this process; `TRIMESH_LOOK=off` ends all looking.
        quota: What the control group of this process may use; less than two cores leave none for looking.

    Raises:
        ValueError: The environment says something else.
    """
    said = environment.get("TRIMESH_LOOK", "").strip()
    if said not in _CHOICES:
        raise ValueError(f"TRIMESH_LOOK must be one of auto, off, got {said!r}")
    return 0.0 if _quota_cores(quota) < limits.LOOK_CORES_MIN else _CHOICES[said]


def _quota_cores(quota: Path) -> float:
    """Return the cores whose whole time the control group may use; infinite where nothing is said."""
    try:
        allowed, period = quota.read_text().split()
        return int(allowed) / int(period)
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return float("inf")


def poller_of_run() -> int:
    """Return the descriptor on which the Trio run of this thread sleeps, or -1 where nobody may look in its place.

    It is Trio's epoll set, which has no public name: what else may wake the loop must end the looking. The loop of a
    guest run has other work than Trio's, so nothing looks there; nor with a Trio release that keeps its set elsewhere.
    """
    runner: Any = getattr(trio._core._run.GLOBAL_RUN_CONTEXT, "runner", None)  # noqa: SLF001 - as said above
    if getattr(runner, "is_guest", True):
        return -1
    poll_set: Any = getattr(getattr(runner, "io_manager", None), "_epoll", None)
    return int(poll_set.fileno()) if hasattr(poll_set, "fileno") else -1
