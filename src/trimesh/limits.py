"""Every bound of trimesh: its value, its unit (last word of the name) and the reason for the value.

Bounds that the native library shares are repeated in `native/src/limits.zig`; `tests/native` compares the two.
"""

from __future__ import annotations

from typing import Final

# ---- frames and links ------------------------------------------------------------------------------------

FRAME_HEADER_BYTES: Final = 32
"""Fixed little-endian header of every frame: four words of 8 bytes, half a cache line."""

FRAME_PAYLOAD_BYTES_MAX: Final = 69_632
"""One fragment. Larger bodies are cut into fragments of this size, so that a control frame waits for at most
one fragment a link (64 KiB take 20-60 us to copy or send on the machines measured). The 4 KiB above 64 are for what
goes with a body of that size: two frames instead of one cost a call 25 us."""

HEAD_BYTES_MAX: Final = 49_152
"""The head (control struct) of one message; it must fit one frame beside small bodies."""

HEAD_PAYLOAD_BYTES_MAX: Final = 16_384
"""A pickled payload up to this size rides inside the head; a larger one travels as the first body."""

BODIES_MAX: Final = 4_096
"""Out-of-band buffers of one message (a state dict has hundreds of tensors, rarely thousands)."""

MESSAGE_BYTES_MAX: Final = 1 << 36
"""All bodies of one message: 64 GiB, more than one tensor on today's hosts; a length above it is a broken peer."""

RING_BYTES: Final = 1 << 18
"""One direction of a same-host link. Holds four full fragments; 256 KiB stay in the second-level cache."""

RING_CONTROL_RESERVE_BYTES: Final = 1 << 14
"""Part of a ring that data may not use, so that cancels and credits get in when data has filled it."""

LOOK_SECONDS: Final = 100e-6
"""How long a process looks at its links before it sleeps, when it expects something soon: an answer takes 30 to 60 us
where the other process looks, too, and waking a sleeper on another core 12 to 30 us on the machines measured. Twice
in a row in vain, it sleeps at once until its waits have been shorter again."""

LOOK_US_MAX: Final = 10_000
"""Longest time that the native library may be asked to look: Trio's own grain of time is a thousandth of a second."""

LOOK_CORES_MIN: Final = 2
"""With fewer cores, by affinity or by quota, looking takes the core from who is waited for."""

LINKS_MAX: Final = 1_024
"""Links of one process: a controller of the largest single host (several hundred workers) with room."""

SEGMENT_BYTES_MIN: Final = 1 << 17
"""Smallest pooled segment: nearly twice the size up to which a body is copied inline."""

SEGMENT_BYTES_MAX: Final = 1 << 27
"""Largest pooled segment; a larger body travels in parts. Nothing else runs in the sender's loop while it copies:
7 ms for 128 MiB, 90 ms when the pages are new."""

SEGMENT_IDLE_BYTES_MAX: Final = 1 << 28
"""Shared memory of segments that nobody holds, kept for the next bodies: two of the largest. Making pages anew costs
ten times the copy; more than this would count against a container's memory for nothing."""

SEGMENTS_MAX: Final = 128
"""Pooled segments of one process: one descriptor each at the sender, one mapping each at every receiver."""

SEGMENT_FLIGHT_BYTES_MAX: Final = 1 << 24
"""Bytes in segments sent to one peer that has not looked at them; beyond it messages wait, but one alone."""

PART_FLIGHT_BYTES_MAX: Final = 1 << 22
"""The same of parts of larger messages: one that overtakes them waits for what is under way, some 0.3 ms a MiB."""

PART_BYTES: Final = 1 << 20
"""One part of a large message to a process of this host. Copying it takes the loop of either side 0.2 ms; smaller ones
cost more turns of the loop, larger ones are slower for a core's cache."""

STREAM_PART_BYTES: Final = 1 << 17
"""The same between hosts: what a small message may find before it in the ring of the link, half of that."""

PARTED_BYTES_MIN: Final = 2 << 20
"""From this size on messages go in parts between hosts, and to processes of this host if most of it is `bytes`. Those
are copied out of shared memory anyway: in parts, while the sender is still copying in."""

PARTED_MAX: Final = 16
"""Large messages of one link under way in parts at one time; more wait for their turn."""

SEGMENT_POOL_BYTES_MAX: Final = 1 << 31
"""Shared memory that one process may hold for bodies on their way: 2 GiB; beyond it bodies travel as fragments."""

SEND_QUEUE_BYTES_HIGH: Final = 8 << 20
"""Bytes queued for one link above which a broadcast waits for the link to drain before it returns."""

# ---- liveness --------------------------------------------------------------------------------------------

BEAT_SECONDS: Final = 0.5
"""Heartbeat of a native thread: six beats fit one lease, so five may be late."""

LEASE_SECONDS: Final = 3.0
"""Silence after which a peer counts as stopped: a stopped process is known within 4 s."""

STALL_SECONDS: Final = 5.0
"""A Trio loop that has not run for this long while its native thread answers is reported as stalled."""

STALL_AGAIN_SECONDS: Final = 30.0
"""A process that goes on stalling is reported once in this time: its stack is 16 KiB of somebody's log."""

LINK_HELLO_SECONDS: Final = 10.0
"""A peer that has connected but said no hello in this time is dropped."""

# ---- calls -----------------------------------------------------------------------------------------------

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

FOLLOWER_SECONDS: Final = 5.0
"""Wait of a mesh's owner for the news of a death that somebody who asks for the follower has heard of first: the lease
of a stopped process, the report of its exit, and a second."""

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

MAP_UNBROKEN_ITEMS: Final = 16
"""Items that a `map` takes in and sends before it lets other tasks run: a switch costs half of what an item does."""

MAP_UNBROKEN_SECONDS: Final = 1e-3
"""The same where each item takes long to come by: beyond it every item is followed by a switch, as the items may be
made by the program while nothing else of it runs."""

# ---- channels --------------------------------------------------------------------------------------------

LOANS_PER_FRAME: Final = 512
"""Ports named in one frame: 20 KiB of numbers, which fit a head (49 KiB); a message with more has several frames."""

EARLY_LOANS: Final = 65_536
"""Loans of one channel that have been taken before their lender's word of them came. They differ by the few
milliseconds between two links; more is a peer that makes them up."""

ITEM_TYPE_DEPTH: Final = 16
"""Types inside of each other in the type of a channel's items; a peer's are taken apart one call deep for each."""

FLUSH_SECONDS: Final = 1.0
"""An ending process waits this long for items that it has sent to leave; they wait for a receiver's process that is
slow to read, and one that does not read at all must not hold up the end."""

# ---- what becomes of transfers ---------------------------------------------------------------------------

REVOKE_SECONDS: Final = 2.0
"""Wait for transfers that run when a buffer is revoked (rule N4); they look after every MiB. Somebody who is still at
it after that has been stopped, or looks at the memory where it lies: that memory is then never used again."""

REVOKE_POLL_SECONDS: Final = 0.001
"""How often it looks whether they have ended, at first; twice as long each time, up to a twentieth of a second."""

TRANSFER_END_SECONDS: Final = 2.5
"""A transfer that finds its process ended waits this long for the news how: twice the wait for an exit report, and
half a second for whoever waits for the other half of them."""

BATCH_TRANSFERS_MAX: Final = 16_384
"""Transfers of one batch: a state dict has hundreds of tensors; each is kept until the block is left."""

BATCH_TASKS: Final = 32
"""Transfers of one batch that are under way at one time: more take turns in the native thread and gain nothing."""

# ---- deadlocks -------------------------------------------------------------------------------------------

DEADLOCK_SEARCH_SECONDS: Final = 0.015
"""How long a call waits for slots whose calls all wait themselves, before somebody looks whether it waits for itself
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

# ---- errors and values -----------------------------------------------------------------------------------

BUFFER_INLINE_BYTES: Final = 4_096
"""A buffer of a value below this rides at the end of the payload: copying a page costs less than a body of its own."""

BYTES_ALONE_MIN: Final = HEAD_PAYLOAD_BYTES_MAX
"""A `bytes` that is the one argument, or the result, goes beside the pickle from this size on: with it the pickle would
be a body, too, and be copied once more (64 KiB there and back: 5 % longer). Below it rides in the head, which costs
20,000 instructions less on either side than a body."""

BYTES_BESIDE_MIN: Final = 131_072
"""The same of a `bytes` or `bytearray` among other arguments. Finding them, and what is left to pickle, costs 60,000
instructions more than pickling all of it, about what copying this much does."""

HUGE_PAGES_BYTES_MIN: Final = 4 << 20
"""Memory for arriving values asks for huge pages from this size on: below it most of a page would go to waste."""

ENCODER_KEEP_BYTES: Final = 1_024
"""After a payload above this the encoder makes a new pickler (1 us) for the next one: clearing a memo costs as much as
its largest use did, so one long message would slow the short ones that follow (2.4 us instead of 1.1, measured)."""

REDUCER_CACHE_CLASSES: Final = 4_096
"""Classes whose reducer an encoder remembers; beyond it the table is emptied, so that classes made per call go."""

DEFINITIONS_MAX: Final = 65_536
"""Classes, functions and globals that one process sends by value. Each is kept for the life of both processes, so
classes made anew for every call must be told before they fill the memory."""

DIAGNOSIS_OBJECTS: Final = 1_000
"""Objects that are tried one by one to name the part of a value that cannot be serialised."""

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

# ---- processes -------------------------------------------------------------------------------------------

SPAWN_SECONDS: Final = 60.0
"""From the request for a process to its first word; importing torch on a busy laptop takes 10-20 s."""

TERM_SECONDS: Final = 0.5
"""From SIGTERM to SIGKILL in the stop ladder."""

EXIT_REPORT_SECONDS: Final = 1.0
"""From the loss of a link to the spawner's exit report; after it the death is reported without a diagnosis."""

STOPPING_LOG_SECONDS: Final = 2.0
"""A block that has been stopping for this long says once what it waits for (rule M4)."""

LEAVING_SECONDS: Final = 1.0
"""Blocks that are left this soon after each other end together: milliseconds lie between those of one program."""

SUPERVISION_LOG_LINES: Final = 20
"""Lines of a second on deaths, failures and restarts that are not raised: a mesh of a thousand may die at once."""

STDERR_TAIL_BYTES: Final = 4_096
"""Last words of a process that are kept for the error that reports its death."""

OUTPUT_LINE_BYTES_MAX: Final = 8_192
"""One line of worker output; a longer one is cut into several."""

OUTPUT_PROGRESS_SECONDS: Final = 2.0
"""Between two lines that show how far a progress bar of a worker is, which overwrites itself many times a second."""

OUTPUT_QUEUE_BYTES_MAX: Final = 1 << 20
"""Worker output waiting for a slow terminal; beyond it lines are dropped and counted, the worker never waits."""

OUTPUT_BATCH_BYTES_MAX: Final = 32_768
"""Worker output in one record; two may be on their way: an exit report never waits behind more than 64 KiB of text."""

KILL_SECONDS: Final = 5.0
"""From SIGKILL until a process that is still there is given up as stuck in the kernel (rule Z08)."""

TRACKER_SECONDS: Final = 1.0
"""For a resource tracker of `multiprocessing` to unlink what the family has left; it takes some milliseconds."""

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
answered by then has been stopped by somebody."""

OUTPUT_FLUSH_SECONDS: Final = 1.0
"""A block that is left waits this long for the last output; it takes a millisecond unless the spawner is stopped."""

PUBLISHED_SLOTS_MAX: Final = 8
"""Versions of one publication that have memory at one time: each is as large as the model."""

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

# ---- bulk data -------------------------------------------------------------------------------------------

GRANTS_MAX: Final = 8_192
"""Buffers of one process that others may reach at one time: a row of 128 bytes each in a table that they all map."""

BLOCKS_MAX: Final = 256
"""Pieces of allocated memory of one process: a descriptor each, and a shell often allows 1,024."""

BLOCK_BYTES_MAX: Final = 1 << 40
"""One piece of allocated memory: 1 TiB, more than a host has; a size above it is a mistake."""

BLOCK_IDLE_BYTES_MAX: Final = 1 << 29
"""Allocated memory that was given back and is kept for the next: making pages anew costs ten times the copy, and more
than this would count against a container's memory for nothing."""

VISITS_MAX: Final = 1_024
"""Processes whose memory one process reaches at one time: as many as it may have links."""

TRANSFERS_MAX: Final = 1_024
"""Transfers of one process that are under way; more wait for one of them to end."""

VIEWS_MAX: Final = 4_096
"""Views of others' memory that one process has open: a mapping each, and the kernel allows 65,530 of those."""

INLINE_BYTES_MAX: Final = 1 << 17
"""A transfer up to this size is done at once: 16 us in the slowest case, about what waking a thread and back costs."""

EXPORT_BYTES_MAX: Final = 4_096
"""What a handle says to readers with an RDMA adapter: 20 to 250 bytes for each adapter of a machine (at most 9)."""

MOVER_SILENCE_MS: Final = 5_000
"""A process that lives and does not answer a transfer for this long is called silent: longer than a lease, so that a
stopped process is reported as such where anybody watches it."""

# ---- memory of CUDA devices --------------------------------------------------------------------------------

CUDA_PIECE_BYTES: Final = 1 << 22
"""One of the two pieces of pinned memory between a device and the host: 4 MiB take 0.2 ms over 16 lanes of PCIe, and
more than that in a carrier, so that starting a copy and looking for its end do not show. A batch pins 256 MiB."""

CUDA_COPY_BYTES: Final = 1 << 26
"""A copy between devices is made in pieces of this size, with a look at the grant after each: 64 MiB take 0.05 ms
within a device and 3 ms from one to another."""

CUDA_TICKET_BYTES: Final = 512
"""What others need to open memory of a device, in memory that they can look at: 128 bytes for the two handles of CUDA,
at most 80 for the name of the device, and four numbers."""

CUDA_TICKET_BLOCK_BYTES: Final = 1 << 16
"""Tickets that share one piece of allocated memory, of which a process has few: 128."""

CUDA_POLL_SECONDS: Final = 0.000_05
"""How soon it is looked again whether a device has come to something, at first; twice as long each time."""

CUDA_POLL_SECONDS_MAX: Final = 0.001
"""At most; what takes longer than a few milliseconds is a computation of the user's."""

CUDA_THREADS: Final = 4
"""Threads in which one process opens and closes memory of devices, pins memory, and copies within it. They wait for
nobody, and are apart from those of endpoints, which may all be waiting for a transfer."""

CUDA_END_SECONDS: Final = 2.0
"""A transfer that fails or is cancelled waits this long for the pieces that are being copied, and each for memory of
another process to be closed: milliseconds, unless the device hangs. Memory of a copy that has not ended is kept."""

# ---- names and ends --------------------------------------------------------------------------------------

NAME_CHARS_MAX: Final = 200
"""Name of a mesh; it is part of most messages to people, and of control frames."""

GRACE_SECONDS: Final = 5.0
"""Default of `grace`: clean-up of actors and processes."""

assert HEAD_PAYLOAD_BYTES_MAX < HEAD_BYTES_MAX < FRAME_PAYLOAD_BYTES_MAX
assert RING_BYTES >= 4 * (FRAME_PAYLOAD_BYTES_MAX // 2 + FRAME_HEADER_BYTES)
assert RING_CONTROL_RESERVE_BYTES * 8 <= RING_BYTES
assert LEASE_SECONDS >= 4 * BEAT_SECONDS
assert FRAME_PAYLOAD_BYTES_MAX < SEGMENT_BYTES_MIN <= SEGMENT_BYTES_MAX <= SEGMENT_POOL_BYTES_MAX

# ---- tensors -----------------------------------------------------------------------------------------------

TENSOR_BATCH_COMMANDS: Final = 16
"""Commands that are sent together at most while a task goes on issuing: a message costs some 20 us, a command 3."""

TENSOR_COMMANDS_AHEAD: Final = 16_384
"""Commands of a team that its slowest rank may be behind before issuing waits: seconds of work, megabytes queued."""

TENSOR_PLANS: Final = 16_384
"""Operations, with the looks of their arguments, that a controller remembers: a large model has a few thousand."""

TENSOR_FAILURES: Final = 1_000
"""Failed commands of a team whose lines are kept for whoever fetches: more are the same mistake in a loop."""

TENSOR_PLOTTED_RANKS: Final = 64
"""Ranks whose values one figure shows: eight rows of eight images, which still fit a screen."""

COLLECTIVE_SECONDS: Final = 1_800.0
"""A rank waits this long for the others of its process group: torch's own bound. A rank that has failed or died frees
them at once; this is for one that computes for half an hour, or is stuck and answers."""

COLLECTIVE_POLL_SECONDS: Final = 0.000_05
"""How often a rank looks whether its device has done a collective: what one takes that crosses a link of devices."""

GROUP_KEYS: Final = 65_536
"""Keys of a team's store: a process group of n ranks takes n, and a thousand ranks may have tens of groups."""

GROUP_LEAVES: Final = 16_384
"""Commands by which ranks left a process group that are remembered: no rank is `TENSOR_COMMANDS_AHEAD` behind."""

TENSOR_INLINE_BYTES: Final = 32_768
"""A tensor of at most this size moves between ranks inside a message, which costs less than a read of its memory."""

TENSOR_LENT_BYTES_MIN: Final = 1 << 20
"""A tensor of at least this size goes to the controller, or comes from there, by memory that the other side reads; a
smaller one in a message, which waits for nobody and needs no second copy."""

TENSOR_MOVE_BYTES: Final = 2**30
"""Copies of tensors that a process keeps for others to read; the next waits for room, a larger one for all others."""

SIGNAL_SECONDS: Final = 0.05
"""How often a function that waits without `await` looks at signals and links."""

TENSOR_STUCK_SECONDS_MAX: Final = 1.0
"""How often at least a rank that waits for an actor beside it looks whether that waits for an actor of the controller,
which may be waiting for the rank; it begins with SIGNAL_SECONDS, and each look costs as one for deadlocks."""
