"""Bounds of processes: how they start, what they say, and how they end."""

from __future__ import annotations

from typing import Final

SPAWN_SECONDS: Final = 60.0
"""From the request for a process to its first word; importing torch on a busy laptop takes 10-20 s."""

TERM_SECONDS: Final = 0.5
"""From SIGTERM to SIGKILL in the stop ladder."""

SPARED_EXIT_SECONDS: Final = 5.0
"""For the exit of a process that has cleaned up in time, where others have used up the grace: interpreters with large
libraries take a second, and several at once on few cores take longer. A shorter grace is the bound of this, too."""

EXIT_REPORT_SECONDS: Final = 2.0
"""From the loss of a link to the spawner's exit report, or what others answer about an end: a millisecond, but a second
where all cores are busy. After it the death is told without a diagnosis."""

STOPPING_LOG_SECONDS: Final = 2.0
"""A block that has been stopping for this long says once what it waits for (rule M4)."""

SPAWNING_LOG_SECONDS: Final = 10.0
"""A spawn that has waited for this long is logged once, with where each process is that is not ready. Imports and small
models take less; a constructor that waits for a peer that is not there never ends."""

SPAWNING_LOG_LINES: Final = 30
"""Lines of that log: a screen. Processes of which the same is to be said share theirs."""

LEAVING_SECONDS: Final = 1.0
"""Blocks that are left this soon after each other end together: milliseconds lie between those of one program."""

SURVIVORS_TOLD: Final = 4
"""Errors of survivors that the note on a death shows; those of a mesh of a thousand say the same a thousand times."""

SURVIVOR_CHARS: Final = 300
"""Of the text of each."""

SUPERVISION_LOG_LINES: Final = 20
"""Lines of a second on deaths, failures and restarts that are not raised: a mesh of a thousand may die at once."""

STDERR_TAIL_BYTES: Final = 4_096
"""Last words of a process that are kept for the error that reports its death."""

SPMD_STDERR_TAIL_BYTES: Final = 16_384
"""Last words of the program of a rank that are kept for its error; the traceback of a collective is several kB."""

SPMD_VERDICT_SECONDS: Final = 5.0
"""For the failure of a rank that others have missed in a collective to be known before they are ended with it; an
interpreter with torch takes some tenths of a second to end."""

OUTPUT_LINE_BYTES_MAX: Final = 8_192
"""One line of worker output; a longer one is cut into several."""

OUTPUT_PROGRESS_SECONDS: Final = 2.0
"""Between two lines that show how far a progress bar of a worker is, which overwrites itself many times a second."""

OUTPUT_SAME_SHOWN: Final = 8
"""Processes on other hosts whose identical lines are shown, each with its coordinates: the GPUs of a host. Lines of
more of them are counted."""

OUTPUT_SAME_SECONDS: Final = 1.0
"""So long after the first one a line counts as the same; its count is told then."""

OUTPUT_SAME_KEPT: Final = 1_024
"""Different lines of that second that are compared: a traceback of 100 lines in ten forms. Others are shown as they
come. With the longest lines they are 8 MiB."""

OUTPUT_QUEUE_BYTES_MAX: Final = 1 << 20
"""Worker output waiting for a slow terminal; beyond it lines are dropped and counted, the worker never waits."""

OUTPUT_BATCH_BYTES_MAX: Final = 32_768
"""Worker output in one record; two may be on their way: an exit report never waits behind more than 64 KiB of text."""

KILL_SECONDS: Final = 5.0
"""From SIGKILL until a process that is still there is given up as stuck in the kernel (rule Z08)."""

EXIT_SECONDS: Final = 10.0
"""For blocks that a script has left open, at the exit of the interpreter: twice the grace, then they are killed."""

TRACKER_SECONDS: Final = 1.0
"""For a resource tracker of `multiprocessing` to unlink what the family has left; it takes some milliseconds."""

FINALIZE_SECONDS: Final = 1.0
"""Wait of a worker that ends for the collection of reference cycles, and the finalizers of what is in them. It takes a
few milliseconds: what the spawner has imported is not in it."""

THREAD_SHUTDOWN_SECONDS: Final = 2.0
"""Wait of an ending worker for threads that are no daemons; an idle pool ends in a millisecond."""

OOM_CLAIM_SECONDS: Final = 2.0
"""An out-of-memory kill that the kernel has counted explains a SIGKILL this much later, no more."""

EXIT_REPORTS: Final = 1_024
"""Ended processes whose report the spawner, and the controller, remember for those who ask later: as many as one
process can have links, should all be lost together."""

BROKER_PACKET_BYTES_MAX: Final = 65_536
"""One packet on a broker socket (the default socket buffer takes three); larger records travel in a memfd."""

BROKER_RECORD_BYTES_MAX: Final = 1 << 26
"""One record on a broker socket: 64 MiB; arguments and environment together are far below it."""

BROKER_QUEUE_RECORDS_MAX: Final = 16_384
"""Answers waiting for one process that does not read them; beyond it the spawner drops the connection."""

FOREIGN_CONNECT_SECONDS: Final = 10.0
"""A link between workers of two spawners, by way of the controller: less than a millisecond; a spawner that has not
answered by then has been stopped."""

PUBLISHED_NAME_CHARS_MAX: Final = 64
"""Characters of the name under which handles are published: it is the name of a file."""

PROGRAM_CLIENTS_MAX: Final = 64
"""Programs that are connected to one publication: a descriptor each, and a link to each process that they call."""

PROGRAM_ANSWERS_MAX: Final = 1_024
"""Answers waiting for a program that does not read them, one for each link it may have; then it is cut off."""

JOIN_SECONDS: Final = 5.0
"""For two programs to learn whether they fit: three records of a socket; beyond it one of them has been stopped."""

JOIN_RETRY_SECONDS: Final = 0.01
"""Between two tries to connect while more programs do than the socket takes."""

PROGRAM_ACCEPT_PAUSE_SECONDS: Final = 0.1
"""After an accept that failed for want of descriptors: nothing tells when there are some again."""

LEAVING_CLIENTS_SECONDS: Final = 1.0
"""For programs that are told to leave, beside the grace for what they have under way: they do it in a millisecond."""

LEAVING_POLL_SECONDS: Final = 0.005
"""How often a program that leaves looks whether its calls have ended: nothing else waits for that."""

OUTPUT_FLUSH_SECONDS: Final = 1.0
"""A block that is left waits this long for the last output; it takes a millisecond unless the spawner is stopped."""

PUBLISHED_SLOTS_MAX: Final = 8
"""Versions of one publication that have memory at one time: each is as large as the model."""

PUBLISH_LOG_SECONDS: Final = 1.0
"""For which a `publish` waits for readers before it is logged: a read of a large model takes half a second."""

PUBLISHED_READERS_MAX: Final = 1_024
"""Processes that read one publication, as many as one process can have links: 80 KiB of rows."""

PUBLISHED_TENSORS_MAX: Final = 65_536
"""Tensors of one version; state dicts have hundreds, of mixtures of experts tens of thousands."""

UNPIN_SECONDS: Final = 1.0
"""A reader that gives a pin back tries this long to say so: a microsecond on one host, a round trip between two. If it
fails, the publisher does without the slot until the reader pins something there, or its process has ended."""

UNPIN_RETRY_SECONDS: Final = 0.05
"""Pause between two tries of that: what the system refuses, or a peer that is silent, is seldom over sooner."""

FAULT_RULES_MAX: Final = 1_024
"""Faults that a test may have planned at one time for links of real processes: one for each direction of each link."""
