"""Two network namespaces joined by a cable: two hosts for whoever looks at addresses, and at `TRIMESH_HOST_ID`.

They outlive whoever made them. Tests that were killed leave theirs; the next ones take those away.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attrs

CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21
_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/var/run/netns")
_NAME = re.compile(r"trimesh-([0-9]+)-[ab]")


def why_not() -> str:
    """Return why there can be no namespaces here; "" when there can."""
    if shutil.which("ip") is None:
        return "the command ip is not installed"
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    missing = [name for name, bit in (("NET", CAP_NET_ADMIN), ("SYS", CAP_SYS_ADMIN)) if not held >> bit & 1]
    return f"this process lacks CAP_{missing[0]}_ADMIN" if missing else ""


@attrs.frozen
class Namespace:
    """One of them.

    Attributes:
        name: As `ip netns` knows it.
        address: Its address on the cable.
    """

    name: str
    address: str

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process gets that is to live there."""
        return {"TRIMESH_HOST_ID": self.name, "TRIMESH_RDMA_ADDRESS": self.address}

    def enter(self) -> None:
        """Move the calling thread, and those that it will start, into the namespace."""
        fd = os.open(_FOLDER / self.name, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(fd)

    def cut(self) -> None:
        """Pull the cable out."""
        _ip("-n", self.name, "link", "set", "cable", "down")


@contextmanager
def two_namespaces() -> Generator[tuple[Namespace, Namespace], None, None]:
    """Make them, and take them away."""
    sweep()
    pid = os.getpid()
    one, other = Namespace(f"trimesh-{pid}-a", "10.77.0.1"), Namespace(f"trimesh-{pid}-b", "10.77.0.2")
    with ExitStack() as stack:
        for space in one, other:
            _ip("netns", "add", space.name)
            stack.callback(_ip, "netns", "del", space.name)
        _ip("-n", one.name, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other.name)
        for space in one, other:
            _ip("-n", space.name, "addr", "add", f"{space.address}/24", "dev", "cable")
            _ip("-n", space.name, "link", "set", "cable", "up")
            _ip("-n", space.name, "link", "set", "lo", "up")
        yield one, other


def sweep() -> None:
    """Take away those of processes that are gone."""
    for path in _FOLDER.glob("trimesh-*"):
        made_by = _NAME.fullmatch(path.name)
        if made_by is not None and not Path(f"/proc/{made_by[1]}").exists():
            with suppress(subprocess.CalledProcessError):  # another run sweeps, too
                _ip("netns", "del", path.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
