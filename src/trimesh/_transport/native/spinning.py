"""Whether a process may spin on its links for a while before it sleeps.

Spinning saves the time that the kernel takes to wake a sleeper on another core, and costs that core meanwhile. The
native library decides anew before each sleep (`native/src/links/busy_poll.zig`); here is decided whether it may at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from trimesh import limits
from trimesh.config import Settings

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def chosen_spin_seconds(settings: Settings, quota: Path = _QUOTA) -> float:
    """Return for how long this process may spin before it sleeps; 0 for never.

    Args:
        settings: Of this process; `spin = "off"` ends all spinning.
        quota: What the control group of this process may use; less than two cores leave none for spinning.
    """
    may = settings.spin != "off" and _quota_cores(quota) >= limits.SPIN_CORES_MIN
    return limits.SPIN_SECONDS if may else 0.0


def _quota_cores(quota: Path) -> float:
    """Return the cores whose whole time the control group may use; infinite where nothing is said."""
    try:
        allowed, period = quota.read_text().split()
        return int(allowed) / int(period)
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return float("inf")
