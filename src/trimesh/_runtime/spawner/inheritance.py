"""Privileges of processes, as the kernel sees them: a new process gets those of its requester, and no more.

A worker is forked from the spawner, which has the privileges of the controller at its start. A process that has given
privileges up, in `setup=` say, must not regain them by requesting a process. So the spawner reads the requester's
privileges from the kernel, not from the request, and the child adopts them before it reads the rest of the request.

Invariants
    PV-1  A child that failed to adopt any of the requester's privileges ends before it imports, opens or executes
          anything (`assume` names it).
    PV-2  Equal privileges are not touched: a family without such changes needs no privilege for this.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

_PR_SET_KEEPCAPS: Final = 8
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_LOWER: Final = 3

_CAPABILITY_VERSION: Final = 0x20080522
_SETS: Final = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_PLACES: Final = ("root", "ns/user", "ns/mnt", "ns/pid", "ns/net", "ns/ipc", "ns/uts", "ns/cgroup")

_HARD_LIMIT_AT: Final = 47
"""Column of /proc/PID/limits, which has a line for each limit, in the order of their numbers."""

_libc = ctypes.CDLL(None, use_errno=True)


class Privileges(msgspec.Struct, frozen=True, kw_only=True):
    """Privileges of one process.

    Attributes:
        users, groups: Real, effective and saved ids.
        more_groups: Supplementary group ids, sorted.
        capabilities: Inheritable, permitted, effective, bounding, ambient, as bits.
        has_no_new: Whether executing a file can give it no privilege.
        filters: Seccomp mode, and number of filters if the kernel reports it.
        niceness: Niceness of its main thread.
        cores: CPUs that its main thread may run on.
        limits: Hard resource limits, by their numbers.
        places: Root folder and namespaces; "" for an unreadable one.
    """

    users: tuple[int, ...]
    groups: tuple[int, ...]
    more_groups: tuple[int, ...]
    capabilities: tuple[int, ...]
    has_no_new: bool
    filters: tuple[int, int]
    niceness: int
    cores: frozenset[int]
    limits: tuple[int, ...]
    places: tuple[str, ...]


def privileges_of(pid: int) -> Privileges:
    """Return the present privileges of a process.

    Raises:
        OSError: It is gone, or /proc does not show it.

    Cost: some 20 system calls, 0.1 ms.
    """
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    return Privileges(
        users=_numbers(fields["Uid"])[:3],
        groups=_numbers(fields["Gid"])[:3],
        more_groups=tuple(sorted(_numbers(fields["Groups"]))),
        capabilities=tuple(int(fields.get(name, "0"), 16) for name in _SETS),
        has_no_new=fields.get("NoNewPrivs") == "1",
        filters=(int(fields.get("Seccomp", "0")), int(fields.get("Seccomp_filters", "0"))),
        niceness=os.getpriority(os.PRIO_PROCESS, pid),
        cores=frozenset(os.sched_getaffinity(pid)),
        limits=_hard_limits(pid),
        places=tuple(_link(f"/proc/{pid}/{name}") for name in _PLACES),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())


def _hard_limits(pid: int) -> tuple[int, ...]:
    lines = Path(f"/proc/{pid}/limits").read_text(encoding="ascii", errors="replace").splitlines()[1:]
    words = [line[_HARD_LIMIT_AT:].split()[0] for line in lines]
    return tuple(resource.RLIM_INFINITY if word == "unlimited" else int(word) for word in words)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def assume(wanted: Privileges) -> str:
    """Adopt, in a new process of one thread, the privileges of the requester.

    Returns:
        Names of the privileges in which this process still exceeds, or differs from, `wanted`; "" for none (PV-1).
    """
    own = privileges_of(os.getpid())
    if own == wanted:  # PV-2
        return ""
    for step in (_take_limits, _take_scheduling, _drop_bounding, _take_users, _take_capabilities):
        with contextlib.suppress(OSError, ValueError):
            step(own, wanted)
    if wanted.has_no_new and not own.has_no_new:
        with contextlib.suppress(OSError):
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    return _excess(privileges_of(os.getpid()), wanted)


def _excess(own: Privileges, wanted: Privileges) -> str:
    capabilities = zip(own.capabilities, wanted.capabilities, strict=True)
    limits = zip(own.limits, wanted.limits, strict=True)
    places = zip(own.places, wanted.places, strict=True)
    found: dict[str, bool] = {
        "its users": own.users != wanted.users,
        "its groups": own.groups != wanted.groups or own.more_groups != wanted.more_groups,
        "its capabilities": any(has & ~may for has, may in capabilities),
        "no_new_privs": wanted.has_no_new and not own.has_no_new,
        "its seccomp filters": own.filters != wanted.filters,
        "its niceness": own.niceness < wanted.niceness,
        "its cores": not own.cores <= wanted.cores,
        "its resource limits": any(_is_above(has, may) for has, may in limits),
        "its root folder or namespaces": any(a != b for a, b in places if a and b),
    }
    return ", ".join(name for name, is_more in found.items() if is_more)


def _is_above(has: int, may: int) -> bool:
    return may != resource.RLIM_INFINITY and (has == resource.RLIM_INFINITY or has > may)


def _take_limits(own: Privileges, wanted: Privileges) -> None:
    for number, (has, may) in enumerate(zip(own.limits, wanted.limits, strict=True)):
        if _is_above(has, may):
            soft = resource.getrlimit(number)[0]
            resource.setrlimit(number, (may if _is_above(soft, may) else soft, may))


def _take_scheduling(own: Privileges, wanted: Privileges) -> None:
    if wanted.cores != own.cores:
        os.sched_setaffinity(0, wanted.cores)
    if wanted.niceness > own.niceness:
        os.setpriority(os.PRIO_PROCESS, 0, wanted.niceness)


def _drop_bounding(own: Privileges, wanted: Privileges) -> None:
    for bit in _bits(own.capabilities[3] & ~wanted.capabilities[3]):
        _prctl(_PR_CAPBSET_DROP, bit)


def _take_users(own: Privileges, wanted: Privileges) -> None:
    _prctl(_PR_SET_KEEPCAPS, 1)  # `_take_capabilities` sets which are kept
    try:
        if own.more_groups != wanted.more_groups:
            os.setgroups(wanted.more_groups)
        if own.groups != wanted.groups:
            os.setresgid(*wanted.groups)
        if own.users != wanted.users:
            os.setresuid(*wanted.users)
    finally:
        _prctl(_PR_SET_KEEPCAPS, 0)


def _take_capabilities(own: Privileges, wanted: Privileges) -> None:
    inheritable, permitted, effective, _, ambient = wanted.capabilities
    for bit in _bits(own.capabilities[4] & ~ambient):
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_LOWER, bit)
    now = privileges_of(os.getpid()).capabilities
    words = [effective & now[1], permitted & now[1], inheritable & (now[0] | now[1])]
    if words == [now[2], now[1], now[0]]:
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)(*(word & 0xFFFFFFFF for word in words), *(word >> 32 for word in words))
    _call(_libc.capset, ctypes.byref(header), ctypes.byref(data))


def _bits(word: int) -> list[int]:
    return [bit for bit in range(word.bit_length()) if word >> bit & 1]


def _prctl(option: int, first: int, second: int = 0) -> None:
    _call(_libc.prctl, option, ctypes.c_ulong(first), ctypes.c_ulong(second), ctypes.c_ulong(0), ctypes.c_ulong(0))


def _call(function: Callable[..., Any], *arguments: Any) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
