"""The first root of the emulated machine: an archive with busybox, some kernel modules and a script."""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "crc32_generic",  # without it `rdma link add` fails, and does not say why
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "veth",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
)

FILE = 0o100755
FOLDER = 0o040755


def build(busybox: Path, modules: Path, texts: dict[str, str]) -> bytes:
    """Return the archive.

    Args:
        busybox: A static one.
        modules: Folder of the kernel's modules.
        texts: More files, name and contents; `init` is what the kernel runs.
    """
    members: list[tuple[str, int, bytes]] = [
        (folder, FOLDER, b"") for folder in ("bin", "dev", "proc", "sys", "modules", "host", "tree", "rw", "new")
    ]
    members.append(("bin/busybox", FILE, busybox.read_bytes()))
    files = {path.name.partition(".")[0].replace("-", "_"): path for path in modules.rglob("*.ko*")}
    order = list(load_order(files))
    members.extend((f"modules/{name}.ko", FILE, contents(files[name])) for name in order)
    members.append(("modules/order", FILE, "".join(f"{name}\n" for name in order).encode()))
    members.extend((name, FILE, text.encode()) for name, text in texts.items())
    return b"".join(newc(members))


def load_order(files: dict[str, Path]) -> Iterator[str]:
    """Yield the names of all modules to load, each after those that it needs. What is built in has no file."""
    seen: set[str] = set()

    def visit(name: str) -> Iterator[str]:
        if name in seen or name not in files:
            return
        seen.add(name)
        found = re.search(rb"\0depends=([^\0]*)\0", contents(files[name]))
        for needed in found[1].decode().split(",") if found else ():
            yield from visit(needed.replace("-", "_"))
        yield name

    for name in MODULES:
        yield from visit(name)


def contents(module: Path) -> bytes:
    """Return a module as the kernel wants it."""
    return lzma.decompress(module.read_bytes()) if module.suffix == ".xz" else module.read_bytes()


def newc(members: list[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """Yield a cpio archive in the one format that kernels read."""
    for number, (name, mode, data) in enumerate([*members, ("TRAILER!!!", 0, b"")], 1):
        # magic, inode, mode, user, group, links, time, size, device (twice major and minor), size of the name, sum
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        yield aligned(b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0")
        yield aligned(data)


def aligned(data: bytes) -> bytes:
    """Return the bytes, filled up to whole words."""
    return data + bytes(-len(data) % 4)
