"""Which host this is, as a number: processes of one host may reach each other's memory.

It is of this boot of this kernel, and of this namespace of process ids: what is told by it is found by /proc/PID.
The setting `host_id` replaces it, so that two parts of one machine can count as two hosts.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def boot_id() -> str:
    """Return which start of this machine it is: no other one, of any machine, has the same.

    Raises:
        OSError: The kernel does not say.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def host_identity(named: str = "") -> int:
    """Return the identity of this host, or the one that it was given; not 0."""
    text = f"named {named}" if named else f"boot {boot_id()} pids {os.stat('/proc/self/ns/pid').st_ino}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) | 1
