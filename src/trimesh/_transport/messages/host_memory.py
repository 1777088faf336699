"""Bodies that lie in memory which another process of this host keeps, and which the sender, elsewhere, has named.

Whatever a peer names, only sealed memory that was made for this is mapped: its name has a number that was drawn for it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final

from trimesh import limits
from trimesh._transport.messages.assembly import AssemblyError
from trimesh._transport.messages.casting import kept_bytes, padding
from trimesh._transport.messages.chunked import IMMUTABLE
from trimesh._wire.memory import new_bytes

WHERE: Final = struct.Struct("<IIQQ")
"""Where bodies are: pid of the process that keeps them, its descriptor, bytes, number that was drawn for the memory."""

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""Nothing changes in memory that has them."""


class HostMemoryError(Exception):
    """The memory cannot be mapped by this process."""


def memory_name(drawn: int) -> str:
    """Return what the memory of a number is called."""
    return f"trimesh-cast-{drawn:016x}"


def map_bodies(where: bytes, words: Sequence[int]) -> list[memoryview]:
    """Return the bodies of a message: private, writable but for what was sent as a `bytes`.

    Args:
        where: What `WHERE` packs.
        words: The table of the message, see `chunked`.

    Raises:
        HostMemoryError: This process cannot have them, so they are to be sent.
        AssemblyError: `where` says nothing, or does not fit the table.
    """
    if len(where) != WHERE.size:
        raise AssemblyError("an offer of bodies that says nothing about where they are")
    pid, fd, size, drawn = WHERE.unpack(where)
    sizes = [word & ~IMMUTABLE for word in words]
    if size != kept_bytes(sizes) or not 0 < size <= limits.HOST_CAST_BYTES:
        raise AssemblyError(f"an offer of {size} bytes of bodies that does not fit their table")
    try:
        whole = memoryview(_map(f"/proc/{pid}/fd/{fd}", size, memory_name(drawn)))
        return _cut(whole, words)
    except (OSError, ValueError, MemoryError) as error:
        raise HostMemoryError(str(error)) from error


def _map(path: str, size: int, name: str) -> mmap.mmap:
    wanted = f"/memfd:{name} (deleted)"
    if os.readlink(path) != wanted:  # before it is opened: who opens a pipe waits
        raise HostMemoryError("it is not the memory that was named")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        is_same = os.readlink(f"/proc/self/fd/{fd}") == wanted and os.fstat(fd).st_size == size
        if not is_same or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise HostMemoryError("it is not the memory that was named")
        return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def _cut(whole: memoryview, words: Sequence[int]) -> list[memoryview]:
    bodies: list[memoryview] = []
    at = 0
    for word in words:
        size = word & ~IMMUTABLE
        body = whole[at : at + size]
        at += size + padding(size)
        if not size:
            body = memoryview(bytearray())
        elif word & IMMUTABLE:  # a `bytes` owns its memory
            fresh, memory = new_bytes(size)
            memory[:] = body
            body = memoryview(fresh)
        bodies.append(body)
    return bodies
