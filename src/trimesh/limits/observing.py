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

UNREAD_SECONDS: Final = 30.0
"""For which versions are published and written over unread before that is said: a reader that has begun takes its first
version sooner, and people who look want to know within a minute."""

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

OBSERVED_RECORDS: Final = 64
"""Flight records that are read for one snapshot, of processes that do not answer: a fifth of a second. Where more are
silent, those of the first ones say what the others do, too."""

RECORD_ROWS: Final = 8_192
"""Newest calls of one process in its flight record, 64 bytes each: those of half a second at full speed."""

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

TRACE_SECONDS: Final = 0.25
"""Between two readings of flight records while a trace is made: half of the time in which the rows of a record are
written over."""

TRACE_CALLS_MAX: Final = 500_000
"""Calls in one trace, some 100 MB; the rest is counted."""

TOP_SECONDS_MIN: Final = 0.1
"""Between two looks of `trimesh top` at a run: each asks every process."""

TOP_ROWS_MAX: Final = 500
"""Rows of its screen, which are drawn anew at each look; a filter shows others."""

AUTOPSY_CALLS: Final = 5
"""Last calls of each process that an autopsy tells of, besides those that ran."""

DEBUG_WAIT_SECONDS: Final = 600.0
"""For a terminal to come to a thread that is held: time to see the message and to log in; a run that is not watched
goes on after it."""

DEBUG_PAUSE_SECONDS: Final = 0.05
"""Between two looks at which calls wait for a thread that is held: a deadline that is nearer may pass."""

DEBUG_TURN_SECONDS: Final = 0.25
"""For which a main thread that is held waits for messages at a time, before it looks whether it is still wanted."""

DEBUG_TEXT_CHARS: Final = 16_384
"""Of one message with output of a debugger: it goes by the control lane of no link, but must not hold up others."""

DEBUG_TERMINAL_CHARS_MAX: Final = 1 << 22
"""Output that waits for one terminal: one that takes nothing (Ctrl-Z) is detached beyond it."""

DEBUG_HOLDS_MAX: Final = 16_384
"""Threads of one run that are held at a time: four for each of 4,096 ranks."""

TRACE_CONTEXT_CHARS_MAX: Final = 1_024
"""Of the trace context of one call or item: 55 of a traceparent, and a tracestate, of which W3C wants 512 passed on."""

TRACE_LINKS_MAX: Final = 1_024
"""Senders of items that one span is linked to: they are remembered while it lives; the SDK keeps 128 unless told."""

OBSERVED_OUTPUT_BYTES: Final = 1 << 20
"""Newest lines that a controller keeps for those who look on: some ten thousand."""

OBSERVED_OUTPUT_LINES: Final = 10_000
"""Lines of one answer to that."""

OBSERVED_CAUSES: Final = 8
"""Errors behind the error of one event that are told, each cut to `OBSERVED_TEXT_CHARS`: a chain is rarely longer."""

PAGE_SECONDS: Final = 1.0
"""Between two looks of the page at a run, while a browser has it open: each asks every process."""

PAGE_CLIENTS_MAX: Final = 8
"""Browsers that follow the page at a time: the tabs of a few people."""

PAGE_REQUEST_BYTES_MAX: Final = 4_096
"""The body of one request to the page: the name of a process or call."""

PAGE_HISTORY: Final = 600
"""Looks whose sums are kept for the charts of a page that is opened later: ten minutes."""

PAGE_CELLS_MAX: Final = 65_536
"""Cells of one mesh that the page draws: more have no pixel."""

PAGE_MESHES_MAX: Final = 64
"""Meshes that the page draws; those with failures first."""

PAGE_PROBLEMS_MAX: Final = 100
"""Lines on what is wrong, those that need a look first; how many more there are is said."""

PAGE_ROWS_MAX: Final = 200
"""Rows of a table of the page: calls that differ in more than their member, links, events. Filters find others."""

PAGE_NODES_MAX: Final = 150
"""Boxes in the picture of who waits for whom; calls that differ in their member only are one."""

PAGE_LINES_MAX: Final = 2_000
"""Lines of output that one answer has, and that the page keeps."""

PAGE_TASK_PROCS: Final = 32
"""Rows of processes in one time line: each is a flight record that is read, in some 10 ms."""

PAGE_TASK_SECONDS: Final = 60.0
"""The longest time line."""

PAGE_TASK_BARS: Final = 400
"""Parts of the length of a time line into which short calls are put together, so that a row has no more bars."""

PAGE_LATENCY_PROCS: Final = 4
"""Processes, the busiest, whose newest calls give the latency of a look."""

OBSERVE_STATE_SECONDS: Final = 0.5
"""A host is asked for so long how its kernel sees a process that does not answer itself: agents answer within
milliseconds, and who looks on waits for it."""
