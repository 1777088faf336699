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

PROGRESS_SECONDS: Final = 2.0
"""What takes longer shows that it does: people wonder after two seconds."""

PROGRESS_DRAW_SECONDS: Final = 0.2
"""Between two drawings of a line in a terminal or a notebook: it moves, and costs nothing that is seen."""

PROGRESS_LOG_SECONDS: Final = 10.0
"""Between two lines of a log that say how far something is, where they were asked for: each of them stays."""

CONTROL_CLIENTS_MAX: Final = 16
"""Connections to one control socket at a time: people with terminals, and a page."""

CONTROL_REQUEST_BYTES_MAX: Final = 65_536
"""One request to a control socket."""

CONTROL_SECONDS: Final = 10.0
"""For one client to send its request, or to take a part of an answer; a client that hangs keeps one thread so long."""

OBSERVED_ROWS: Final = 10_000
"""Rows of one table of a snapshot: 4,096 processes are shown whole, and drawn in less than a second."""

RECORD_ROWS: Final = 8_192
"""Newest calls of one process in its flight record, 48 bytes each: those of half a second at full speed."""

RECORD_NAMES_BYTES: Final = 65_536
"""Names of endpoints of actors in one flight record: some thousand. Calls of others are kept without a name."""

RECORD_HALF_BYTES: Final = 1 << 18
"""Each half of the log of one flight record: what a process has told of itself for some minutes, and its events."""

RECORD_FILE_BYTES_MAX: Final = 1 << 26
"""A flight record that is read; those that are written have a megabyte."""

RECORD_SECONDS: Final = 1.0
"""From one look of a process at itself to the next: what is a second old when everything is killed is known."""

RECORD_SHARE: Final = 0.005
"""Of the time of a process for its looks at itself: where a look takes long, the next one is later."""

RECORD_CALLS: Final = 64
"""Calls under way in one look, oldest first: what hangs is among them."""

RECORD_STACK_CHARS: Final = 4_096
"""Of the stack of a stalled process: its innermost frames."""

RECORD_ERRORS_PER_SECOND: Final = 10
"""Texts of errors of calls that one process keeps: a program that raises all the time keeps the rest of its record."""

RECORD_RUNS_MAX: Final = 16
"""Folders of ended runs that are kept for one user, the newest: 16 MB for 16 processes each."""

RECORD_AGE_SECONDS: Final = 7 * 86_400.0
"""For which they are kept."""

RECORD_ENDED_MAX: Final = 256
"""Files in the folder of a running run of processes that have ended; the oldest are removed."""

RECORD_FILES_MAX: Final = 8_192
"""Flight records of one run that are read, a megabyte each."""

AUTOPSY_CALLS: Final = 5
"""Last calls of each process that an autopsy tells of, besides those that ran."""

OBSERVED_OUTPUT_BYTES: Final = 1 << 20
"""Newest lines that a controller keeps for those who look on: some ten thousand."""

OBSERVED_OUTPUT_LINES: Final = 10_000
"""Lines of one answer to that."""
