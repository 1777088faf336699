"""The name of this machine, as text that can be encoded."""

from __future__ import annotations

import os
import socket


def host_name() -> str:
    r"""Return the name of this machine; bytes that are not UTF-8, which the kernel takes, are written as `\xff`."""
    return os.fsencode(socket.gethostname()).decode("utf-8", "backslashreplace")
