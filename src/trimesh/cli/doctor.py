"""`trimesh doctor`: what of this machine costs a mesh something, or forbids it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from trimesh.config import current
from trimesh.errors import ConfigError, ConnectError
from trimesh.observe import runs

_FILES_MIN: Final = 4096
_SHM_BYTES_MIN: Final = 256 << 20


class Finding(msgspec.Struct, frozen=True):
    """What was looked at.

    Attributes:
        name: It.
        verdict: "ok", "costs", or "forbids".
        text: What was found, and what it means.
    """

    name: str
    verdict: str
    text: str


def findings() -> Iterator[Finding]:
    """Yield what was found, in a fixed order."""
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    is_new = release >= (5, 4)
    yield Finding("kernel", "ok" if is_new else "forbids", f"Linux {platform.release()}; 5.4 or newer is needed")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} descriptors for a process; a link takes some of them"
    yield Finding("descriptors", "ok" if soft >= _FILES_MIN else "costs", text)
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None  # noqa: S108 - looked at, never written
    free = 0 if shm is None else shm.free
    yield Finding("shared memory", "ok" if free >= _SHM_BYTES_MIN else "costs", f"{free >> 20} MiB free in /dev/shm")
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    is_open = scope in ("", "0")
    text = (
        "processes read each other's memory" if is_open else "no reads of each other's memory, no py-spy: slower reads"
    )
    yield Finding("ptrace", "ok" if is_open else "costs", f"ptrace_scope is {scope or 'not set'}: {text}")
    ssl = find_library("ssl")
    yield Finding("libssl", "ok" if ssl else "costs", ssl or "no libssl is found: no links to other hosts")
    try:
        settings = current()
        is_insecure = settings.pickle == "on"
        text = "all settings are valid" + "; values are pickled among processes of a family" * is_insecure
        yield Finding("settings", "ok", text)
    except ConfigError as error:
        yield Finding("settings", "forbids", str(error))
    try:
        for one in runs():
            one.close()
        yield Finding("private folder", "ok", "control sockets can be made and found")
    except ConnectError as error:
        yield Finding("private folder", "costs", str(error))


def doctor(*, json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> int:
    """Look at this machine: kernel, limits, shared memory, ptrace, libssl, settings, the folder of sockets.

    Args:
        json: Print one JSON document: a list of findings.

    Exit codes: 0 nothing forbids meshes, 1 something does.
    """
    found = list(findings())
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    else:
        sys.stdout.writelines(f"{one.verdict:8}{one.name}: {one.text}\n" for one in found)
    sys.stdout.flush()
    return 1 if any(one.verdict == "forbids" for one in found) else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
