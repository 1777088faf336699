"""What the program and the template say to each other; PURE.

A request is one byte with three descriptors: standard input and error of the agent, and the socket of its answers. The
first of those is its number, with a pidfd, told by the copy once it leads its session; or why it could not be forked.
The last one is its exit code, told by the template.
"""

from __future__ import annotations

import struct
from typing import Final

from trimesh import limits

REQUEST: Final = b"\1"
REQUEST_FDS: Final = 3
NUMBER: Final = struct.Struct("<i")
TEXT_BYTES_MAX: Final = 1 << 12

LEFT_SECONDS: Final = limits.AGENT_LEASE_SECONDS + limits.KILL_SECONDS
"""An agent whose lifeline is closed has ended by then; one that a signal has stopped has not."""
