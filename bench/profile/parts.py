"""To which part of a program a sample belongs.

A stack, as py-spy writes it, goes from the outermost frame to the innermost; a frame is `function (file)`. The
innermost frame that names a part decides: `memcpy` belongs to whoever called it, and so do the built-in functions of
Python, which have no frame of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.profile.perf import NATIVE

KERNEL = "kernel"
COLLECTOR = "collector of garbage"
VALUES = "msgspec, pickle"
IMPORTS = "import machinery"
OTHER = "rest of Python"

SYSTEM_CALLS = frozenset({
    "accept4", "brk", "clone", "close", "epoll_create1", "epoll_ctl", "epoll_wait", "fork", "fstat64", "fstatat64",
    "getdents64", "ioctl", "kill", "lseek64", "madvise", "mmap", "mmap64", "mprotect", "munmap", "open64", "openat64",
    "pidfd_open", "poll", "pread64", "read", "readlink", "recvmsg", "sendmsg", "socketpair", "stat64", "syscall",
    "tcgetattr", "vfork", "waitid", "waitpid", "write",
})  # fmt: skip
"""Functions of libc that do little but enter the kernel. As innermost frames they are the kernel's time."""

ENTERING = frozenset({"AroundWait.before_io_wait", "_AroundSleep.before_io_wait", "EpollIOManager.get_events"})
"""From where the native library looks, once called otherwise, and from where the loop sleeps: where a sample has no
native frames, its time is the library's and the kernel's, which perf tells."""

_FILES = {
    "bench": "the workload itself",
    "trio": "Trio",
    "outcome": "Trio",
    "sniffio": "Trio",
    "attr": "attrs",
    "attrs": "attrs",
    "cffi": "cffi",
    "pycparser": "cffi",
    "_cffi_backend": "cffi",
    "msgspec": VALUES,
    "_pickle": VALUES,
    "pickle": VALUES,
    "cloudpickle": VALUES,
    "<frozen importlib": IMPORTS,
    "<frozen zipimport": IMPORTS,
    "trimesh": "rest of trimesh",
    "trimesh/_native/libtrimesh": NATIVE,
    "trimesh/_native": "transport",
    "trimesh/_transport": "transport",
    "trimesh/_wire": "encode, decode",
    "trimesh/_runtime/values/codec": "encode, decode",
    "trimesh/_runtime/values/torch_values": "encode, decode",
    "trimesh/_routing/channel_accounts": "credits, outbox",
    "trimesh/_runtime/peers/peer": "credits, outbox",
    "trimesh/_runtime/life/proc": "tables of the process",
    "trimesh/_routing": "call, collector",
    "trimesh/_runtime/calls/call_set": "call, collector",
    "trimesh/_runtime/calls/invocation": "call, collector",
    "trimesh/_runtime/calls/outgoing": "call, collector",
    "trimesh/_runtime/calls/outgoing_stream": "call, collector",
    "trimesh/_runtime/actors/cell": "mailbox, slot",
    "trimesh/_runtime/peers/incoming": "mailbox, slot",
    "trimesh/_runtime/actors/mailbox": "mailbox, slot",
    "trimesh/_runtime/actors/server": "mailbox, slot",
    "trimesh/actor": "endpoint, verbs",
    "trimesh/shape": "endpoint, verbs",
    "trimesh/_runtime/actors/context": "endpoint, verbs",
    "trimesh/_runtime/life/current": "endpoint, verbs",
    "trimesh/_runtime/values/endpoint_spec": "endpoint, verbs",
    "trimesh/_runtime/tasks/crossing": "endpoint, verbs",
    "trimesh/_runtime/calls/membership": "endpoint, verbs",
    "trimesh/_runtime": "meshes, processes",
    "trimesh/_supervision": "meshes, processes",
}
"""Folders and files, without suffix; the longest that fits counts."""

_NAMELESS = ("lib", "ld-", "linux-vdso", "[vdso]")
"""Libraries that say nothing of the part they work for: those of C and of Python."""


def part_of(stack: Sequence[str]) -> str:
    """Return the part that a sample belongs to.

    Args:
        stack: Frames, the outermost first.
    """
    return _decide(stack)[0]


def function_of(stack: Sequence[str]) -> str:
    """Return the function that a sample belongs to, with its file: the frame that decides the part."""
    return _decide(stack)[1]


def _decide(stack: Sequence[str]) -> tuple[str, str]:
    innermost, file = _split(stack[-1])
    if innermost in (SYSTEM_CALLS if file.startswith("libc.") else ENTERING if _lacks_native(stack) else ()):
        return KERNEL, stack[-1]
    is_native = False
    for frame in reversed(stack):
        name, file = _split(frame)
        if name.startswith("gc_collect"):
            return COLLECTOR, frame
        part = _part_of_file(file)
        if part == NATIVE:
            if not name.startswith("0x"):
                return NATIVE, frame
            is_native = True  # the library does not export it, but one of its callers
        elif is_native:
            return NATIVE, "not exported (trimesh/_native/libtrimesh.so)"
        elif part is not None:
            return part, frame
        elif not file.startswith(_NAMELESS):
            return OTHER, frame
    return OTHER, stack[-1]


def _lacks_native(stack: Sequence[str]) -> bool:
    return not any(".so" in frame for frame in stack)


def _split(frame: str) -> tuple[str, str]:
    """Return function and file of a frame; of a method that attrs has written, the class that it was written for."""
    name, _, file = frame.rpartition(" (")
    file = file.removesuffix(")")
    if file.startswith("<attrs generated "):
        file = file.split()[-1].removesuffix(">").replace(".", "/")
    return name, file


def _part_of_file(file: str) -> str | None:
    found = ""
    for known in _FILES:
        follows = file[len(known) : len(known) + 1]
        if len(known) > len(found) and file.startswith(known) and (follows in {"", "/", "."} or known[0] == "<"):
            found = known
    return _FILES.get(found)
