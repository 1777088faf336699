"""Ports for servers of others, which can only be told a number."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that are free, below those that the system gives to whoever names none.

    One of those might be another's by the time that a server listens there.
    """
    least = int(_RANGE.read_text().split()[0])
    with ExitStack() as held:
        ports = list[int]()
        while len(ports) < count:
            port = random.SystemRandom().randrange(least // 2, least)
            sock = held.enter_context(socket.socket())
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:  # it is in use
                continue
            ports.append(port)
        return ports
