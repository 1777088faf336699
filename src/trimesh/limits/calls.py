"""Bounds of calls, channels, the search for deadlocks, errors and values, names and ends."""

from __future__ import annotations

from typing import Final

from trimesh.limits.links import HEAD_PAYLOAD_BYTES_MAX as _HEAD_PAYLOAD_BYTES_MAX

# ---- calls --------------------------------------------------------------------------------------------------

SPARE_STAND_INS_MAX: Final = 64
"""Tasks of Trio that a block keeps for calls of asyncio tasks: one is made in 40 us, and weighs 3 KiB. With so many
calls at once a new one is a small part of the cost."""

MAILBOX_MESSAGES: Final = 128
"""Messages of one sender that wait at one actor before the sender waits."""

MAILBOX_BYTES: Final = 8 << 20
"""Bytes of the same; one message above it is let through when nothing else waits."""

GROUPS_MAX: Final = 256
"""Sets of links that a process remembers for its casts: one for each view that is called; the oldest is dropped."""

GONE_PEERS: Final = 4_096
"""Ended processes of which a process remembers that they are gone: 100 bytes each, so that what comes late from them,
and the messages and ports that name them, are known to be late."""

DEATHS: Final = 256
"""Of those, the ones of which it remembers how they have ended, beside its own members: half a KiB each, and up to
`STDERR_TAIL_BYTES` of last words. Whoever calls by a reference that is older learns no more than that it is gone."""

EARLY_CANCELS_MAX: Final = 65_536
"""Cancels of one peer that have overtaken their calls: more than its credits for 500 actors."""

EARLY_CALLS_MAX: Final = 1_024
"""Calls that wait in a process for actors that are being spawned there; `MAILBOX_BYTES` at most. Each member of a mesh
of 1,000 may call one of the others as it starts."""

ENDED_ACTORS: Final = 4_096
"""Actors of which a process remembers that they have ended in it, 100 bytes each: who calls them late is refused at
once, and not after `SPAWN_SECONDS`."""

SERVICE_EARLY_MESSAGES: Final = 1_024
"""Messages of a service that wait until the owner of this process has said a word of it; `MAILBOX_BYTES` at most."""

MAILBOX_REPORT_BYTES: Final = 1 << 20
"""Bytes of one sender that an actor may have taken without a word to the sender: an eighth of its mailbox."""

CANCEL_ACK_SECONDS: Final = 5.0
"""Wait for the acknowledgement of a cancel before the callee is reported as unresponsive, and, unless
`options(abandon_after=...)` says otherwise, before the caller goes on without it (rule C2)."""

STALLED_ACK_SECONDS: Final = 0.25
"""The same while all that have to acknowledge are known to be stalled: for one that was about to run again."""

REASON_CHARS_MAX: Final = 1_000
"""Text that says why a call was cancelled; it grows by a line with each hop, and must fit a control frame."""

REPLACEMENT_SECONDS: Final = 5.0
"""Wait of a mesh's owner for the news of a death that another process, which asks for the replacement, has heard
of first: the lease of a stopped process, the report of its exit, and a second."""

DEADLINE_SKEW_SECONDS: Final = 0.25
"""A remote budget may end this much before the caller's own deadline does (rule C3)."""

EVENTS: Final = 1_024
"""Records that one reader of `events()` may lag behind (rule T3)."""

STREAM_WINDOW: Final = 64
"""Items a generator endpoint may be ahead of its consumer (rule T1)."""

STREAM_WINDOW_MAX: Final = 65_536
"""Largest window that may be asked for; beyond it a slow consumer would hold memory without any use."""

STREAM_BYTES: Final = 8 << 20
"""Bytes of the same, as of a mailbox; one item above it is let through when little else is ahead."""

STREAM_REPORT_BYTES: Final = 1 << 20
"""Bytes of one rank that a consumer may have taken without a word to it: an eighth of what may be ahead."""

ITEM_LEAVE_SECONDS: Final = 1.0
"""A generator endpoint that is cancelled waits this long for its last item to leave; a consumer drains it in 1 ms."""

MAP_WINDOW: Final = 32
"""Items of one `map` that have been sent and whose results have not been taken: a few for each of several members."""

MAP_UNBROKEN_ITEMS: Final = 32
"""Items that a `map` takes in and sends before it lets other tasks run: a switch costs as much as five of them."""

MAP_UNBROKEN_SECONDS: Final = 1e-3
"""The same where each item takes long to come by: beyond it every item is followed by a switch, as the items may be
made by the program while nothing else of it runs."""

CALLS_PER_MESSAGE: Final = MAP_UNBROKEN_ITEMS
"""Calls in one message: what a `map` sends between two turns of Trio's loop (`MAP_UNBROKEN_ITEMS`). What one more
would save is 3 % of what the message costs by itself."""

CALLS_PER_MESSAGE_BYTES: Final = _HEAD_PAYLOAD_BYTES_MAX
"""Bytes of the arguments of the calls in one message: what one call may have in its head."""

# ---- channels -----------------------------------------------------------------------------------------------

TRANSITS_PER_FRAME: Final = 512
"""Ports named in one frame: 20 KiB of numbers, which fit a head (49 KiB); a message with more has several frames."""

EARLY_TRANSITS: Final = 65_536
"""Transits of one channel that have been taken before their sender's word of them came. They differ by the few
milliseconds between two links; more is a peer that makes them up."""

ITEM_TYPE_DEPTH: Final = 16
"""Types inside of each other in the type of a channel's items; a peer's are taken apart one call deep for each."""

FLUSH_SECONDS: Final = 1.0
"""An ending process waits this long for items that it has sent to leave; they wait for a receiver's process that is
slow to read, and one that does not read at all must not hold up the end."""

# ---- deadlocks ----------------------------------------------------------------------------------------------

DEADLOCK_SEARCH_SECONDS: Final = 0.015
"""How long a call waits for slots whose calls all wait themselves, before a search looks whether it waits for itself
(rule C8). Most such waits are over in a millisecond; a person does not notice 15 ms."""

DEADLOCK_PAUSE_FACTOR: Final = 4
"""A process that has looked for deadlocks rests this many times as long before it looks again, so that doing so takes
a fifth of its time at most, however many calls wait."""

DEADLOCK_ANSWER_SECONDS: Final = 1.0
"""A process that does not say for this long who waits in it is left out of the search, which is made again then."""

DEADLOCK_NODES_MAX: Final = 16_384
"""Waits that one search looks at, and waits in one answer: 2 MiB. A cycle has a handful."""

DEADLOCK_REFS_MAX: Final = 512
"""Names of waits in one control struct: 46 bytes each at most, half of a head."""

DEADLOCKS_KNOWN: Final = 256
"""Deadlocks that a deadline will end of which the controller knows that it has told, and calls of which a process knows
that they wait in one: more than a person reads, and each is over with its deadline."""

# ---- errors and values --------------------------------------------------------------------------------------

BUFFER_INLINE_BYTES: Final = 4_096
"""A buffer of a value below this rides at the end of the payload: copying a page costs less than a body of its own."""

BYTES_ALONE_MIN: Final = _HEAD_PAYLOAD_BYTES_MAX
"""A `bytes` that is the one argument, or the result, goes beside the pickle from this size on: with it the pickle would
be a body, too, and be copied once more (64 KiB there and back: 5 % longer). Below it rides in the head, which costs
20,000 instructions less on either side than a body."""

BYTES_BESIDE_MIN: Final = 131_072
"""The same of a `bytes` or `bytearray` among other arguments. Finding them, and what is left to pickle, costs 60,000
instructions more than pickling all of it, about what copying this much does."""

HUGE_PAGES_BYTES_MIN: Final = 4 << 20
"""Memory for arriving values asks for huge pages from this size on: below it most of a page would go to waste."""

ENCODER_KEEP_BYTES: Final = 1_024
"""After a pickle above this the encoder makes a new pickler (1 us) for the next one: clearing a memo costs as much as
its largest use did, so one long message would slow the short ones that follow (2.4 us instead of 1.1, measured)."""

REDUCER_CACHE_CLASSES: Final = 4_096
"""Classes whose reducer an encoder remembers; beyond it the table is emptied, so that classes made per call go."""

DEFINITIONS_MAX: Final = 65_536
"""Classes, functions and globals that one process sends by value. Each is kept for the life of both processes, so
classes made anew for every call must be told before they fill the memory."""

DIAGNOSIS_OBJECTS: Final = 1_000
"""Objects that are tried one by one to name the part of a value that cannot be serialised."""

DIAGNOSIS_OVERFLOWS: Final = 20
"""Stack overflows until that search ends. In Python 3.14 C code fills the whole stack before it fails: 43,000 lists
inside of each other, and 30 ms, each time."""

TRACEBACK_CHARS_MAX: Final = 65_536
"""Text of one remote traceback; the middle is left out beyond it."""

EXCEPTION_CHAIN_MAX: Final = 64
"""Links of one cause or context chain, and leaves of one group, that travel; the rest is counted in a note."""

EXCEPTION_RECORDS_MAX: Final = 512
"""Exceptions that travel as one, causes, contexts and members: nested groups would multiply the bounds of each."""

EXCEPTION_DEPTH_MAX: Final = 8
"""Exceptions that are values of exceptions, inside of each other: each is decoded by itself, from a copy."""

EXCEPTION_LEAVES_MAX: Final = 65_536
"""Exceptions in groups in groups, each counted as often as it is a member: 500 that share them would be 2**500."""

DIMENSIONS_MAX: Final = 64
"""Dimensions of an extent of a peer: numpy's bound, and the product of their sizes is taken again and again."""
REGION_POINTS_MAX: Final = 1 << 20
"""Points of a region of a peer, who needs 72 bytes for any number: a thousand times more processes than there are."""

EXCEPTION_PAYLOAD_BYTES_MAX: Final = 1 << 20
"""One pickled attribute of an exception; a larger one travels as its (shortened) repr."""

# ---- names and ends -----------------------------------------------------------------------------------------

NAME_CHARS_MAX: Final = 200
"""Name of a mesh; it is part of most messages to people, and of control frames."""

GRACE_SECONDS: Final = 5.0
"""Default of `grace`: clean-up of actors and processes."""

LARGE_VALUE_BYTES: Final = 256 << 20
"""Arguments or a result of this size are logged once for each endpoint: to copy them takes a tenth of a second for each
member, and weights have ways that do not."""
