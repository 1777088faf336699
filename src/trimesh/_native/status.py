"""Statuses of the native library as exceptions."""

from __future__ import annotations

import errno
import os
from typing import Final

import trio

from trimesh.errors import LimitExceeded, TrimeshInternalError

OK: Final = 0
FULL: Final = 1
UNDER_WAY: Final = 2
ERR_ARGUMENT: Final = -1
ERR_LINK: Final = -2
ERR_DOWN: Final = -3
ERR_LIMIT: Final = -4
ERR_FORKED: Final = -5
ERR_STATE: Final = -6
ERR_TOO_LARGE: Final = -7
ERR_THREAD: Final = -8
ERR_PEER: Final = -9
ERR_GONE: Final = -10
ERR_REVOKED: Final = -11
ERR_DENIED: Final = -12
ERR_UNREACHABLE: Final = -13
ERR_SILENT: Final = -14
ERR_CANCELLED: Final = -15
ERR_TLS: Final = -16
ERR_TLS_PLAINTEXT: Final = -17
ERR_TLS_VERSION: Final = -18
ERR_TLS_CERTIFICATE: Final = -19
ERR_TLS_NAME: Final = -20
ERR_TLS_REFUSED: Final = -21
ERR_TLS_LATE: Final = -22
ERR_TLS_CUT: Final = -23
ERR_DEVICE: Final = -24
ERR_ERRNO: Final = -1000

_NAMES: Final = {
    ERR_ARGUMENT: "TM_ERR_ARGUMENT",
    ERR_LINK: "TM_ERR_LINK",
    ERR_DOWN: "TM_ERR_DOWN",
    ERR_STATE: "TM_ERR_STATE",
    ERR_TOO_LARGE: "TM_ERR_TOO_LARGE",
}


def error_of(status: int, doing: str, *, limit: str = "LINKS_MAX") -> Exception:
    """Return the exception for a negative status.

    Args:
        status: What the library returned.
        doing: What was tried, for the text: "opening a link".
        limit: The bound that TM_ERR_LIMIT stands for here.
    """
    if status <= ERR_ERRNO:
        number = ERR_ERRNO - status
        return OSError(number, f"{os.strerror(number)} while {doing}")
    if status == ERR_FORKED:
        return trio.ClosedResourceError(
            f"{doing}: this process was forked from one that uses trimesh; links and meshes stay with the parent"
        )
    if status == ERR_LIMIT:
        return LimitExceeded(limit, 0, f"{doing}: {limit} is reached")
    if status == ERR_THREAD:
        return OSError(errno.EAGAIN, f"the system gave no thread while {doing}")
    return TrimeshInternalError(f"{doing}: the native library said {_NAMES.get(status, status)}")


def check(status: int, doing: str, *, limit: str = "LINKS_MAX") -> int:
    """Return `status`, or raise what it stands for if it is negative."""
    if status < 0:
        raise error_of(status, doing, limit=limit)
    return status
