"""Where the processes of a mesh meet for `torch.distributed`: a port of their own, and who is who.

The owner of the mesh binds the port and never listens there, with `SO_REUSEADDR`: so the kernel gives it to no other
process that asks for any port, and lets the store of rank 0, which binds it by its number and has the same option, have
it. It is held for as long as the mesh lives: a process that is restarted, or a second group, finds it free.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Final

_ADDRESS: Final = "127.0.0.1"
"""Of the processes of one host, to each other."""


class Rendezvous:
    """A port that is held for a mesh.

    Attributes:
        port: Its number.
    """

    def __init__(self) -> None:
        """Take a port.

        Raises:
            OSError: The system has none, or no descriptor.
        """
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("", 0))  # every address: the store listens on all of them
            self.port: int = self._socket.getsockname()[1]
        except BaseException:
            self._socket.close()
            raise

    def environment(self, rank: int, size: int) -> Mapping[str, str]:
        """Return the variables by which `torch.distributed.init_process_group()` finds the others, as torchrun's."""
        return {
            "MASTER_ADDR": _ADDRESS,
            "MASTER_PORT": str(self.port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # that of a torchrun which has started this program
        }

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self._socket.close()
