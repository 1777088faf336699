"""Bounds of what a run tells of itself: tables, the control socket, flight records."""

from __future__ import annotations

from typing import Final

OBSERVE_SECONDS: Final = 1.5
"""For the processes of a run to say what they do. A loop that is free answers in a millisecond; the rest of the time is
for those below it, and for asking those that do not answer by a signal."""

OBSERVE_LOOP_SECONDS: Final = 0.3
"""For a Trio loop to take a question before it counts as one that does not run: a turn takes a millisecond."""

OBSERVED_CALLS: Final = 1_024
"""Calls that one process tells of, oldest first; how many more there are is said."""

OBSERVED_EVENTS: Final = 1_024
"""Events that one process keeps for readers that come later, newest last: some 300 kB."""

OBSERVED_TEXT_CHARS: Final = 500
"""Of the text of one event: what an error says first."""

OBSERVED_BYTES_MAX: Final = 64 << 20
"""One answer of a control socket: 4,096 processes with ten calls each say 20 MB."""

CONTROL_CLIENTS_MAX: Final = 16
"""Connections to one control socket at a time: people with terminals, and a page."""

CONTROL_REQUEST_BYTES_MAX: Final = 65_536
"""One request to a control socket."""

CONTROL_SECONDS: Final = 10.0
"""For one client to send its request, or to take a part of an answer; a client that hangs keeps one thread so long."""

OBSERVED_ROWS: Final = 10_000
"""Rows of one table of a snapshot: 4,096 processes are shown whole, and drawn in less than a second."""
