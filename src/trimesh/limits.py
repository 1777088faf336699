"""Every bound of trimesh: its value, its unit (last word of the name) and the reason for the value.

Code reads them as `limits.NAME` at the time of use, so that a test can set one. The native library shares some of them:
after a change, `python -m native.shared_limits` writes their values into `native/src/limits.zig`.
"""

from __future__ import annotations

from typing import Final

# ---- Frames and links ----

FRAME_HEADER_BYTES: Final = 32
"""Fixed little-endian header of every frame: four words of 8 bytes, half a cache line."""
FRAME_PAYLOAD_BYTES_MAX: Final = 69_632
"""Payload of one frame. Larger bodies are cut into such fragments, and a control frame waits for at most one of them on
each link: 64 KiB take 20 to 60 us to copy or send. The 4 KiB above 64 hold the head of a message with a body of that
size: a second frame costs 25 us a call."""
HEAD_BYTES_MAX: Final = 49_152
"""Head (control struct) of one message; it must fit one frame beside small bodies."""
HEAD_PAYLOAD_BYTES_MAX: Final = 16_384
"""Largest pickled payload inside the head; a larger one travels as the first body."""
BODIES_MAX: Final = 4_096
"""Out-of-band buffers of one message: a state dict has hundreds of tensors, rarely thousands."""
MESSAGE_BYTES_MAX: Final = 1 << 36
"""All bodies of one message: 64 GiB, more than one tensor on today's hosts; a greater length is a broken peer."""
LINKS_MAX: Final = 1_024
"""Links of one process: a controller of the largest single host (several hundred workers), with room."""
RING_BYTES: Final = 1 << 18
"""Size of one direction of a same-host link: it holds four full fragments, and 256 KiB stay in the second-level
cache."""
RING_CONTROL_RESERVE_BYTES: Final = 1 << 14
"""Part of a ring that data may not use, so that cancels and credits still fit when data has filled it."""

SPIN_SECONDS: Final = 500e-6
"""Longest spin on the links before a process that expects something soon sleeps. The length used is measured
(`native/src/links/spin_bound.zig`): at most four times a wake, which costs 12 to 30 us on most machines and up to 100
on slow virtual ones, and at most an eighth of all time in vain."""
SPIN_US_MAX: Final = 10_000
"""Longest spin that the native library accepts before it sleeps; Trio's own grain of time is 1 ms."""
SPIN_CORES_MIN: Final = 2
"""Smallest number of cores, by affinity or quota, at which a process spins: with fewer, spinning takes the core from
the process that is awaited."""
WAIT_HERE_SECONDS: Final = 1e-3
"""Longest wait for a message by the task itself, in place of the loop, and longest recent wait after which a task does
so: ten times an answer that is worth spinning for, twice the pause of one of 16 ranks on two cores."""
WAITS_HERE_MAX: Final = 16
"""Consecutive waits of a task in place of the loop (`WAIT_HERE_SECONDS`) before the loop has its turn: a sixteenth of
the cost of a turn is left, and sockets and signals, which a wait that is over at once does not poll, are polled within
1 ms."""
SKIP_TURNS_SECONDS: Final = 1e-3
"""Time in which a task passes checkpoints without a turn of the loop, as nothing else can run. Sockets, signals and
messages wait as long; Trio's own grain of time is 1 ms."""
SKIP_TURNS_MAX: Final = 32
"""Such checkpoints in one turn: a thirtieth of the cost of a turn is left."""
SKIP_TURNS_MARGIN_SECONDS: Final = 1e-4
"""Time to the next deadline below which a turn has no such checkpoints: the loop looks for due deadlines a few
microseconds after it is known which tasks run in the turn."""
TURNS_LEFT_OUT: Final = 4
"""Turns of the loop after such a wait in vain before the next attempt: slow answers cost a fifth of an attempt each."""

# ---- Bodies in shared memory and in chunks ----

SEGMENT_BYTES_MIN: Final = 1 << 17
"""Smallest pooled segment: nearly twice the size up to which a body is copied inline."""
SEGMENT_BYTES_MAX: Final = 1 << 27
"""Largest pooled segment; larger bodies travel in chunks. The copy blocks the sender's loop: 7 ms, 90 with new
pages."""
SEGMENT_POOL_BYTES_MAX: Final = 1 << 31
"""Shared memory that one process holds for bodies on their way: 2 GiB; beyond it bodies travel as fragments."""
SEGMENT_IDLE_BYTES_MAX: Final = 1 << 28
"""Shared memory of segments that are not held, kept for the next bodies: two of the largest. New pages cost ten times
the copy; more would count against a container's memory for nothing."""
SEGMENTS_MAX: Final = 128
"""Pooled segments of one process: a descriptor each at the sender, a mapping each at every receiver."""
SEGMENT_FLIGHT_BYTES_MAX: Final = 1 << 24
"""Bytes in segments that one peer has not read yet; beyond it messages wait, but a single larger body passes."""
CHUNK_FLIGHT_BYTES_MAX: Final = 1 << 22
"""Bytes in chunks of larger messages that one peer has not read yet: a small message that overtakes them waits for
these, some 0.3 ms a MiB."""

CHUNK_BYTES: Final = 1 << 20
"""One chunk of a large message on this host: 0.2 ms of the loop of either side. Smaller ones cost more turns of the
loop, larger ones are slower for a core's cache."""
STREAM_CHUNK_BYTES: Final = 1 << 17
"""One chunk of a large message between hosts: a small message may find half of it ahead in the ring of the link."""
CHUNKED_BYTES_MIN: Final = 2 << 20
"""Smallest message that goes in chunks: between hosts, and on this host if most of it is `bytes`, which are copied out
of shared memory anyway, in chunks while the sender is still copying in. Other messages of this host go in chunks from
`SEGMENT_BYTES_MAX` a body and `SEGMENT_IDLE_BYTES_MAX` in all."""
CHUNKED_MAX: Final = 16
"""Large messages of one link under way in chunks; more wait for their turn."""

KEPT_BYTES_MIN: Final = 32 << 20
"""Smallest `bytes` received in chunks whose memory is kept for others of the same size: glibc returns memory of this
size to the system each time, and keeps smaller pieces itself."""
KEPT_BYTES_MAX: Final = 1 << 27
"""Kept memory of one process: two of 64 MiB. New pages cost as much as the copy; more counts against a container."""
KEPT_BYTES_SECONDS: Final = 5.0
"""Kept memory unused for so long, at most twice that, is freed: most programs send large messages more often."""
KEPT_SIZES_MAX: Final = 8
"""Latest sizes of large `bytes` that are remembered: memory is kept only for a size that arrives again."""

# ---- Liveness ----

BEAT_SECONDS: Final = 0.5
"""Heartbeat of a native thread: six beats fit one lease, so five may be late."""
LEASE_SECONDS: Final = 3.0
"""Silence after which a peer counts as stopped: a stopped process is known within 4 s."""
STALL_SECONDS: Final = 5.0
"""Time without a turn after which a Trio loop, whose native thread still answers, is reported as stalled."""
STALL_AGAIN_SECONDS: Final = 30.0
"""Interval of reports on a process that goes on stalling: its stack is 16 KiB of a log."""

assert HEAD_PAYLOAD_BYTES_MAX < HEAD_BYTES_MAX < FRAME_PAYLOAD_BYTES_MAX
assert RING_BYTES >= 4 * (FRAME_PAYLOAD_BYTES_MAX // 2 + FRAME_HEADER_BYTES)
assert RING_CONTROL_RESERVE_BYTES * 8 <= RING_BYTES
assert LEASE_SECONDS >= 4 * BEAT_SECONDS
assert FRAME_PAYLOAD_BYTES_MAX < SEGMENT_BYTES_MIN <= SEGMENT_BYTES_MAX <= SEGMENT_POOL_BYTES_MAX

# ---- TLS between hosts ----

TLS_HALF_OPEN_BYTES: Final = 1 << 16
"""Bytes from a peer that is not admitted yet: a handshake with a long chain of certificates takes a tenth of it."""
TLS_HALF_OPEN_MS: Final = 5_000
"""Time from a link's first byte until its peer is admitted: a handshake takes 2 ms on one host; hosts may be far
away."""
TLS_HALF_OPEN_MAX: Final = 64
"""Peers of one door that are not admitted yet: 100 KiB each, and as many hosts may dial in the same moment."""
TLS_HELLO_BYTES: Final = 256
"""First record of either side inside TLS; fixed, so that nothing is parsed to find its end."""

# ---- Calls ----

MAILBOX_MESSAGES: Final = 128
"""Messages of one sender that wait at one actor before the sender waits."""
MAILBOX_BYTES: Final = 8 << 20
"""Bytes of one sender that wait at one actor before the sender waits; one larger message passes when nothing else
waits."""
MAILBOX_REPORT_BYTES: Final = 1 << 20
"""Bytes of one sender that an actor takes before it reports them to the sender: an eighth of its mailbox."""
SPARE_STAND_INS_MAX: Final = 64
"""Tasks of Trio that a block keeps for calls of asyncio tasks: one takes 40 us to make and weighs 3 KiB. With so many
calls at once a new one is a small part of the cost."""
GROUPS_MAX: Final = 256
"""Sets of links that a process remembers for its casts: one for each view that is called; the oldest is dropped."""
GONE_PEERS: Final = 4_096
"""Ended processes that a process remembers, 100 bytes each, so that late messages from them, and messages and ports
that name them, are recognised."""
DEATHS: Final = 256
"""Ended processes among `GONE_PEERS` whose diagnosis is remembered, beside a process's own members: half a KiB each,
and last words of up to `STDERR_TAIL_BYTES`. A call by an older reference learns only that the process is gone."""
ENDED_ACTORS: Final = 4_096
"""Ended actors that a process remembers, 100 bytes each: late calls are refused at once, not after `SPAWN_SECONDS`."""
EARLY_CANCELS_MAX: Final = 65_536
"""Cancels of one peer that have overtaken their calls: more than its credits for 500 actors."""
EARLY_CALLS_MAX: Final = 1_024
"""Calls that wait for actors that are still being spawned, in `MAILBOX_BYTES` at most: each member of a mesh of 1,000
may call one of the others as it starts."""
SERVICE_EARLY_MESSAGES: Final = 1_024
"""Messages of a service that wait for the first one from this process's owner; `MAILBOX_BYTES` at most."""

CANCEL_ACK_SECONDS: Final = 5.0
"""Wait for the acknowledgement of a cancel before the callee is reported as unresponsive, and, unless
`options(abandon_after=...)` is given, before the caller goes on without it (rule C2)."""
STALLED_ACK_SECONDS: Final = 0.25
"""Wait for the acknowledgement of a cancel while all that have to acknowledge are known to be stalled: for one that was
about to run again."""
REASON_CHARS_MAX: Final = 1_000
"""Reason of a cancelled call; it grows by a line with each hop, and must fit a control frame."""
REPLACEMENT_SECONDS: Final = 5.0
"""Wait of a mesh's owner, asked for a replacement, for its own news of the death, which the process that asks may learn
first: the lease of a stopped process, the report of its exit, and a second."""
DEADLINE_SKEW_SECONDS: Final = 0.25
"""Largest time by which a remote budget may end before the caller's own deadline (rule C3)."""
LARGE_VALUE_BYTES: Final = 256 << 20
"""Smallest size of arguments or a result that is logged, once for each endpoint: the copy takes 0.1 s for each member,
and weights have ways without one."""

EVENTS: Final = 1_024
"""Records that one reader of `events()` may lag behind (rule T3)."""
STREAM_WINDOW: Final = 64
"""Items that a generator endpoint may be ahead of its consumer (rule T1)."""
STREAM_WINDOW_MAX: Final = 65_536
"""Largest window; beyond it a slow consumer would hold memory without any use."""
STREAM_BYTES: Final = 8 << 20
"""Bytes of the items that a generator endpoint may be ahead, as of a mailbox; one larger item passes when little else
is ahead."""
STREAM_REPORT_BYTES: Final = 1 << 20
"""Bytes that a consumer takes from one rank before it reports them: an eighth of those that may be ahead."""
ITEM_LEAVE_SECONDS: Final = 1.0
"""Wait of a cancelled generator endpoint for its last item to leave; a consumer drains it in 1 ms."""

MAP_WINDOW: Final = 32
"""Items of one `map` that are sent and whose results are not taken yet: a few for each of several members."""
MAP_UNBROKEN_ITEMS: Final = 32
"""Items that a `map` sends before it lets other tasks run: a switch costs as much as five of them."""
MAP_UNBROKEN_SECONDS: Final = 1e-3
"""Time for which a `map` sends without letting other tasks run: with a slow source each item is then followed by a
switch, as the program may be making the items while nothing else of it runs."""
FUNCTIONS_AT_ONCE_MAX: Final = 1024
"""Functions of `procs.map` that one process runs at once: each number in use has actors of its own."""
CALLS_PER_MESSAGE: Final = MAP_UNBROKEN_ITEMS
"""Calls in one message: those that a `map` sends between two turns of Trio's loop. One more would save 3 % of a
message."""
CALLS_PER_MESSAGE_BYTES: Final = HEAD_PAYLOAD_BYTES_MAX
"""Bytes of the arguments of the calls in one message: as many as one call may have in its head."""

# ---- Channels ----

TRANSITS_PER_FRAME: Final = 512
"""Ports named in one frame: 20 KiB of numbers, which fit a head (48 KiB); a message with more has several frames."""
EARLY_TRANSITS: Final = 65_536
"""Transits of one channel that are taken before their sender's notice arrives, within the few milliseconds between two
links; a peer that sends more makes them up."""
ITEM_TYPE_DEPTH: Final = 16
"""Nesting of the type of a channel's items; a peer's type is decoded one call deep for each level."""
FLUSH_SECONDS: Final = 1.0
"""Wait of an ending process for sent items to leave, where a receiver's process reads slowly; one that does not read at
all must not hold up the end."""

# ---- Deadlocks ----

DEADLOCK_SEARCH_SECONDS: Final = 0.015
"""Wait of a call, for slots whose calls all wait, after which it starts a search (rule C8). Most such waits are over in
1 ms; a person does not notice 15."""
DEADLOCK_PAUSE_FACTOR: Final = 4
"""Rest after a search, in lengths of that search: searching takes a fifth of a process's time at most."""
DEADLOCK_ANSWER_SECONDS: Final = 1.0
"""Time for a process to report its waits; one that takes longer is left out of the search, which is then repeated."""
DEADLOCK_NODES_MAX: Final = 16_384
"""Waits in one search, and in one answer: 2 MiB. A cycle has a handful."""
DEADLOCK_REFS_MAX: Final = 512
"""Names of waits in one control struct: at most 46 bytes each, half of a head."""
DEADLOCKS_KNOWN: Final = 256
"""Deadlocks with a deadline that the controller remembers to have reported, and calls that a process knows to wait in
one: more than a person reads, and each is over with its deadline."""

# ---- Values and errors ----

BUFFER_INLINE_BYTES: Final = 4_096
"""Size below which buffers of a value are placed at the end of the payload: copying a page is cheaper than a body of
its own."""
BYTES_ALONE_MIN: Final = HEAD_PAYLOAD_BYTES_MAX
"""Smallest `bytes`, as the one argument or the result, that goes beside the pickle, which would otherwise be a body and
be copied once more (64 KiB there and back: 5 % longer). Below it a place in the head saves either side the 20,000
instructions of a body."""
BYTES_BESIDE_MIN: Final = 131_072
"""Smallest `bytes` or `bytearray` among other arguments that goes beside the pickle. To separate them costs 60,000
instructions more than pickling all, about as much as copying so many bytes."""
HUGE_PAGES_BYTES_MIN: Final = 4 << 20
"""Smallest memory for arriving values that requests huge pages: below it most of a page would go to waste."""
ENCODER_KEEP_BYTES: Final = 1_024
"""Largest pickle after which the encoder keeps its pickler. After a larger one it makes a new one (1 us): clearing a
memo costs as much as its largest use did, so one long message would slow the short ones that follow (2.4 us instead of
1.1, measured)."""
REDUCER_CACHE_CLASSES: Final = 4_096
"""Classes whose reducer an encoder remembers; beyond it the table is emptied, so that classes made per call go."""
DEFINITIONS_MAX: Final = 65_536
"""Classes, functions and globals that one process sends by value. Each is kept for the life of both processes, so
classes made anew for every call must be reported before they fill the memory."""
DIAGNOSIS_OBJECTS: Final = 1_000
"""Objects that are tried one by one to name the part of a value that cannot be serialised."""
DIAGNOSIS_OVERFLOWS: Final = 20
"""Stack overflows that end the search of `DIAGNOSIS_OBJECTS`. In Python 3.14 C code fills the whole stack before it
fails: 43,000 nested lists, and 30 ms, each time."""
TRACEBACK_CHARS_MAX: Final = 65_536
"""Text of one remote traceback; the middle is left out beyond it."""
EXCEPTION_CHAIN_MAX: Final = 64
"""Links of one cause or context chain, and leaves of one group, that travel; a note counts the rest."""
EXCEPTION_RECORDS_MAX: Final = 512
"""Exceptions that travel together as one error, with causes, contexts and members: nested groups would multiply the
bounds of each."""
EXCEPTION_DEPTH_MAX: Final = 8
"""Nesting of exceptions that are values of exceptions: each is decoded by itself, from a copy."""
EXCEPTION_LEAVES_MAX: Final = 65_536
"""Exceptions in nested groups, counted as often as they are members: 500 that share them would be 2**500."""
EXCEPTION_PAYLOAD_BYTES_MAX: Final = 1 << 20
"""One pickled attribute of an exception; a larger one travels as its (shortened) repr."""
DIMENSIONS_MAX: Final = 64
"""Dimensions of an extent of a peer: numpy's bound, and the product of their sizes is computed again and again."""
REGION_POINTS_MAX: Final = 1 << 20
"""Points of a region of a peer, which needs 72 bytes for any number: a thousand times more processes than there are."""
NAME_CHARS_MAX: Final = 200
"""Name of a mesh; it is part of most messages to people, and of control frames."""

# ---- Buffers and transfers ----

GRANTS_MAX: Final = 8_192
"""Buffers of one process that others may reach: a row of 128 bytes each in a table that they all map, 1 MiB in all."""
BLOCKS_MAX: Final = 256
"""Pieces of allocated memory of one process: a descriptor each, and a shell often allows 1,024."""
BLOCK_BYTES_MAX: Final = 1 << 40
"""One piece of allocated memory: 1 TiB, more than a host has; a greater size is a mistake."""
BLOCK_IDLE_BYTES_MAX: Final = 1 << 29
"""Freed pieces of allocated memory that are kept for the next: new pages cost ten times the copy, and more would count
against a container's memory for nothing."""
ATTACHMENTS_MAX: Final = 1_024
"""Processes whose memory one process reaches: as many as it may have links."""
TRANSFERS_MAX: Final = 1_024
"""Transfers of one process under way; more wait for one of them to end."""
VIEWS_MAX: Final = 4_096
"""Open views of remote memory of one process: a mapping each, and the kernel allows 65,530 of those."""
INLINE_BYTES_MAX: Final = 1 << 17
"""Largest transfer done inside the call: 16 us by process_vm_readv, about the cost of waking a thread and back."""
EXPORT_BYTES_MAX: Final = 4_096
"""Part of a handle for readers with an RDMA adapter: 20 to 250 bytes for each adapter of a machine (at most 9)."""
DEVICE_REASON_CHARS: Final = 1_024
"""Part of a handle that explains why no adapter reaches memory of a device: as long as the native library's text."""
MOVER_SILENCE_MS: Final = 5_000
"""Silence on a transfer after which a live process is reported: longer than a lease, so that a stopped process is
reported as such where it is watched."""
TCP_STRANGERS_SHARE: Final = 8
"""Divisor of a process's descriptors (`ulimit -n`): connections by `tcp` that have shown no secret may hold that part
of them, as any user of the host can make them. The rest is for the program's own files."""

REVOKE_SECONDS: Final = 2.0
"""Wait for running transfers when a buffer is revoked (rule N4); they check after every MiB. After that a process is
stopped, or reads the memory in place: that memory is never used again."""
REVOKE_POLL_SECONDS: Final = 0.001
"""First interval of polling for the end of those transfers; it doubles each time, up to a twentieth of a second."""
TRANSFER_END_SECONDS: Final = 2.5
"""Wait of a transfer whose process has ended for the diagnosis: `EXIT_REPORT_SECONDS`, and half a second for processes
that learn it from the owner."""
BATCH_TRANSFERS_MAX: Final = 16_384
"""Transfers of one batch: a state dict has hundreds of tensors; each is kept until the block is left."""
BATCH_TASKS: Final = 32
"""Transfers of one batch under way: more take turns in the native thread and gain nothing."""
LINKED_PIECE_BYTES: Final = 1 << 20
"""One message of a transfer between hosts without a common carrier: the owner copies as much in a turn of its loop."""
LINKED_PIECES: Final = 8
"""Pieces of `LINKED_PIECE_BYTES` under way between two processes: they fill 1 ms at 8 GB/s, and bound the owner's
memory for each."""
KEPT_PIECE_BYTES: Final = 1 << 22
"""Bytes that the Trio thread copies between two checkpoints from a pinned version whose publisher has ended: 0.5 ms."""

# ---- Memory of CUDA devices ----

CUDA_PIECE_BYTES: Final = 1 << 22
"""One of the two pieces of pinned memory between a device and the host: 4 MiB take 0.2 ms over 16 lanes of PCIe, and
more in a carrier, which hides the cost of starting a copy and polling for its end. A batch pins 256 MiB."""
CUDA_COPY_BYTES: Final = 1 << 26
"""Piece of a copy between devices, then a check of the grant: 64 MiB take 0.05 ms in a device, 3 ms to another one."""
CUDA_TICKET_BYTES: Final = 512
"""Data in shared memory by which others open memory of a device: 128 bytes for the two handles of CUDA, at most 80 for
the name of the device, and four numbers."""
CUDA_TICKET_BLOCK_BYTES: Final = 1 << 16
"""Tickets that share one piece of allocated memory, of which a process has few: 128."""
CUDA_POLL_SECONDS: Final = 0.000_05
"""First interval of polling a device; it doubles each time."""
CUDA_POLL_SECONDS_MAX: Final = 0.001
"""Longest interval of polling a device; work of more than a few milliseconds is a computation of the user's."""
CUDA_THREADS: Final = 4
"""Threads in which one process opens and closes memory of devices, pins memory, and copies within it. They never wait,
and are apart from those of endpoints, which may all be waiting for a transfer."""
CUDA_END_SECONDS: Final = 2.0
"""Wait of a failed or cancelled transfer for pieces that are being copied, and for each memory of another process to be
closed: milliseconds, unless the device hangs. Memory of a copy that has not ended is kept."""

# ---- Processes ----

SPAWN_SECONDS: Final = 60.0
"""Time from the request for a process to its first message; importing torch on a busy laptop takes 10 to 20 s."""
SPAWNING_LOG_SECONDS: Final = 10.0
"""Time after which a spawn is logged once, with the state of each process that is not ready. Imports and small models
take less; a constructor that waits for a missing peer never ends."""
SPAWNING_LOG_LINES: Final = 30
"""Lines of that log: a screen. Processes in the same state share a line."""
GRACE_SECONDS: Final = 5.0
"""Default of `grace`: time for the clean-up of actors and processes."""
TERM_SECONDS: Final = 0.5
"""Time from SIGTERM to SIGKILL when a process is ended."""
SIGTERM_SECONDS: Final = 10.0
"""Time, besides the grace of all open blocks, from SIGTERM to a program until it ends at once: its own code unwinds.
With the default grace of a block it is half of the 30 s that Kubernetes and Slurm wait before SIGKILL."""
KILL_SECONDS: Final = 5.0
"""Time from SIGKILL until a process that is still there is given up as stuck in the kernel (rule Z08)."""
SPARED_EXIT_SECONDS: Final = 5.0
"""Time for the exit of a process that cleaned up in time while others used up the grace: interpreters with large
libraries take 1 s, several at once on few cores longer. A shorter grace bounds this, too."""
EXIT_SECONDS: Final = 10.0
"""Time for blocks that a script left open, at the exit of the interpreter: twice the grace, then their processes are
killed."""
EXIT_REPORT_SECONDS: Final = 2.0
"""Time from the loss of a link to the spawner's exit report, or to the answer of others about an end: 1 ms, but 1 s
where all cores are busy. After it the death is reported without a diagnosis."""
LINK_RETRIES_MAX: Final = 5
"""Tries for a link to a process that may live while this one lacks descriptors or memory for it, each after
`EXIT_REPORT_SECONDS`: ten seconds, in which other work gives some back."""
EXIT_REPORTS: Final = 1_024
"""Ended processes whose report the spawner and the controller remember for later requests: as many as one process can
have links, should all be lost together."""
STOPPING_LOG_SECONDS: Final = 2.0
"""Time after which a stopping block logs, once, what it waits for (rule M4)."""
LEAVING_SECONDS: Final = 1.0
"""Window in which blocks that are left end together: those of one program are left milliseconds apart."""
FINALIZE_SECONDS: Final = 1.0
"""Wait of an ending worker for the collection of reference cycles and their finalizers: a few milliseconds, since what
the spawner has imported is left out."""
THREAD_SHUTDOWN_SECONDS: Final = 2.0
"""Wait of an ending worker for threads that are no daemons; an idle pool ends in a millisecond."""
TRACKER_SECONDS: Final = 1.0
"""Time for a resource tracker of `multiprocessing` to unlink the family's leftovers; it takes some milliseconds."""
OOM_CLAIM_SECONDS: Final = 2.0
"""Longest time from an out-of-memory kill that the kernel counts to a SIGKILL that it explains."""
SIGNAL_SECONDS: Final = 0.05
"""Interval at which a function that blocks without `await` polls signals and links."""
FOREIGN_CONNECT_SECONDS: Final = 10.0
"""Time to link workers of two spawners through the controller: less than 1 ms, unless a spawner is stopped."""

SURVIVORS_TOLD: Final = 4
"""Errors of survivors in the note on a death; a mesh of a thousand gives the same one a thousand times."""
SURVIVOR_CHARS: Final = 300
"""Text of each error of a survivor in that note."""
SUPERVISION_LOG_LINES: Final = 20
"""Log lines a second on deaths, failures and restarts that are not raised: a mesh of a thousand may die at once."""
STDERR_TAIL_BYTES: Final = 4_096
"""Last output of a process that is kept for the error that reports its death."""
SPMD_STDERR_TAIL_BYTES: Final = 16_384
"""Last output of the program of a rank that is kept for its error; the traceback of a collective is several kB."""
SPMD_VERDICT_SECONDS: Final = 5.0
"""Time for the failure of a rank whose peers miss it in a collective to be known before they are ended with it; an
interpreter with torch takes some tenths of a second to end."""

BROKER_PACKET_BYTES_MAX: Final = 65_536
"""One packet on a broker socket (the default socket buffer takes three); larger records travel in a memfd."""
BROKER_RECORD_BYTES_MAX: Final = 1 << 26
"""One record on a broker socket: 64 MiB; arguments and environment together are far below it."""
BROKER_QUEUE_RECORDS_MAX: Final = 16_384
"""Answers waiting for one process that does not read them; beyond it the spawner drops the connection."""
FAULT_RULES_MAX: Final = 1_024
"""Faults planned at one time by a test for links of real processes: one for each direction of each link."""

# ---- Output of processes ----

OUTPUT_LINE_BYTES_MAX: Final = 8_192
"""One line of worker output; a longer one is cut into several."""
OUTPUT_BATCH_BYTES_MAX: Final = 32_768
"""Worker output in one record. Two may be on their way: an exit report never waits behind more than 64 KiB of text."""
OUTPUT_QUEUE_BYTES_MAX: Final = 1 << 20
"""Worker output waiting for a slow terminal; beyond it lines are dropped and counted, the worker never waits."""
OUTPUT_PROGRESS_SECONDS: Final = 2.0
"""Interval of lines for a progress bar of a worker, which overwrites itself many times a second."""
OUTPUT_SAME_SHOWN: Final = 8
"""Processes on other hosts whose identical lines are shown, each with its coordinates: the GPUs of a host. Lines of
more of them are counted."""
OUTPUT_SAME_SECONDS: Final = 1.0
"""Window after the first one in which a line counts as the same; its count is shown then."""
OUTPUT_SAME_KEPT: Final = 1_024
"""Different lines of that window that are compared: a traceback of 100 lines in ten forms. Others are shown as they
come. With the longest lines they are 8 MiB."""
OUTPUT_FLUSH_SECONDS: Final = 1.0
"""Wait of a block that is left for the last output: a millisecond unless the spawner is stopped."""

# ---- Connected programs ----

PUBLISHED_NAME_CHARS_MAX: Final = 64
"""Name under which handles are published: it is the name of a file."""
PROGRAM_CLIENTS_MAX: Final = 64
"""Programs connected to one publication: a descriptor each, and a link to each process that they call."""
PROGRAM_ANSWERS_MAX: Final = 1_024
"""Answers waiting for a program that does not read them, one for each link it may have; then it is cut off."""
JOIN_SECONDS: Final = 5.0
"""Time for two programs to check that they fit: three records of a socket; beyond it one of them has been stopped."""
JOIN_RETRY_SECONDS: Final = 0.01
"""Pause between two tries to connect while the backlog of the socket is full."""
PROGRAM_ACCEPT_PAUSE_SECONDS: Final = 0.1
"""Pause after an accept that failed for want of descriptors: no event reports when there are some again."""
LEAVING_CLIENTS_SECONDS: Final = 1.0
"""Time for connected programs to leave, beside the grace for their running calls: they do it in a millisecond."""
LEAVING_POLL_SECONDS: Final = 0.005
"""Interval at which a leaving program polls whether its calls have ended: nothing else waits for that."""

# ---- Publications ----

PUBLISHED_SLOTS_MAX: Final = 8
"""Versions of one publication that have memory at one time: each is as large as the model."""
PUBLISHED_READERS_MAX: Final = 1_024
"""Processes that read one publication, as many as one process can have links: 80 KiB of rows."""
PUBLISHED_TENSORS_MAX: Final = 65_536
"""Tensors of one version; state dicts have hundreds, of mixtures of experts tens of thousands."""
PUBLISHED_COPY_BYTES_MAX: Final = 1 << 16
"""Largest version that is copied with its layout when it is pinned, and largest range of neighbouring tensors that one
transfer reads: to copy so many bytes once more takes less time than a second transfer."""
PUBLISH_LOG_SECONDS: Final = 1.0
"""Wait of a `publish` for readers after which it is logged: a read of a large model takes half a second."""
UNPIN_SECONDS: Final = 1.0
"""Time for which a task tries to release a pin: a microsecond on one host, a round trip between two. Also the pause
between later tries, by its process."""
UNPIN_RETRY_SECONDS: Final = 0.05
"""Pause between two tries to release a pin: a refusal of the system, or a peer's silence, is seldom over sooner."""
UNREAD_SECONDS: Final = 30.0
"""Time after which versions that are overwritten unread are reported: a reader that has begun takes its first version
sooner, and people want to know within a minute."""

# ---- Pools, slots, replay buffers and stores ----

POOL_CONCURRENCY: Final = 16
"""Requests that one replica runs at once where `concurrency=` is left out."""
POOL_QUEUE: Final = 1_024
"""Requests that wait in a pool where `queue=` is left out; then callers wait to be let in."""
POOL_QUEUE_BYTES: Final = 1 << 28
"""Estimated bytes of the arguments of waiting requests of a pool, where `queue_bytes=` is left out."""
POOL_SESSIONS: Final = 4_096
"""Sessions that a pool remembers where `sessions=` is left out: 100 bytes each, and their names."""
POOL_TRIES: Final = 8
"""Replicas that one request is given to at most, as one after the other dies."""
POOL_LOOK_SECONDS: Final = 0.1
"""Interval of polling a replica that is down: an idle replica waits that much longer for work."""
POOL_LATENCIES: Final = 512
"""Latencies of the last requests of a pool that its percentiles are of: 25 lie above the 95th."""
POOL_LATENCY_SECONDS: Final = 60.0
"""Age of such a latency at most: older ones are of another load."""
POOL_BUDGET: Final = 0.2
"""Further attempts of a pool for each of its requests where `budget=` is left out: an outage adds a fifth of load."""
POOL_BUDGET_START: Final = 10.0
"""Further attempts that are saved up at most: a pool with few requests can retry them, too."""
POOL_HEDGE_SAMPLES: Final = 20
"""Requests of an endpoint after which their 95th percentile is computed, first and anew."""
AUTOSCALE_SECONDS: Final = 1.0
"""Interval at which `autoscale` samples the load where `every=` is left out."""
AUTOSCALE_GROW_SECONDS: Final = 3.0
"""Time for which a load must need more replicas where `grow_after=` is left out: longer than a burst."""
AUTOSCALE_SHRINK_SECONDS: Final = 60.0
"""Time for which it must need fewer where `shrink_after=` is left out: replicas of a model take as long to start."""
SERVICE_REMOTE_CALLS: Final = 1_024
"""Calls of other processes that a pool, slots or a replay buffer serve at once; more wait in their mailboxes."""
REPLAY_BYTES: Final = 1 << 30
"""Estimated bytes of the items of a replay buffer, where `capacity_bytes=` is left out."""
REPLAY_SPILL_BYTES: Final = 1 << 34
"""Bytes of the file of a replay buffer that was given a folder (`spill=`), where `spill_bytes=` is left out: 16 GiB."""
REPLAY_THREAD_BYTES: Final = 1 << 20
"""Smallest read or write of that file that is done in a thread: fewer bytes take less than half a millisecond."""
STORE_BYTES: Final = 1 << 32
"""Bytes of the versions that one shard of a store holds, where `capacity_bytes=` is left out."""
STORE_INLINE_BYTES: Final = 1 << 16
"""Smallest tensors, arrays and bytes that are copied straight into the memory of a store: a stream costs as much as
some 100 KiB in a message do."""
STORE_MAPPED_BYTES: Final = 1 << 20
"""Smallest memory of a store that other processes map: mapping one costs as much as copying some 100 KiB."""

# ---- Certificates and tokens of hosts ----

AUTHORITY_VALID_SECONDS: Final = 400 * 86_400.0
"""Authority of a mesh, which exists in the memory of its outermost block: longer than any run, shorter than what clocks
and tools take for endless."""
CERTIFICATE_VALID_SECONDS: Final = 30 * 86_400.0
"""Certificate of one incarnation: a run of weeks. Its key ends with its process, long before that."""
CLOCK_SKEW_SECONDS: Final = 3_600.0
"""Time before its making from which a certificate is valid: hosts without a common clock differ by minutes, an hour at
worst."""
CERTIFIED_MAX: Final = 65_536
"""Incarnations that one authority certifies, a number of 8 bytes each: 1,000 hosts, each replaced 64 times."""
KEY_REQUEST_BYTES_MAX: Final = 4_096
"""Request for a certificate: 400 bytes with a key on P-256."""
PKI_FILE_BYTES_MAX: Final = 1 << 20
"""File of certificates or a key: a few KiB; the store of a whole system is a mistake."""
JOIN_TOKEN_SECONDS: Final = 300.0
"""Validity of a token, 5 minutes: a person copies it to another terminal; a queued job gets it when it starts."""
JOIN_TOKENS_MAX: Final = 4_096
"""Unused tokens of one door: one for each host that is about to join, and a mesh has 1,000 of them."""

# ---- Multicast to the processes of other hosts ----

HOST_CAST_BYTES_MIN: Final = 262_144
"""Smallest total of multicast bodies that are sent once per host, into memory that its processes map; smaller ones are
sent to each process, which saves a round trip on the host."""
HOST_CAST_BYTES: Final = 1 << 29
"""Multicast bodies that one agent keeps until all processes of its host have mapped them: eight of 64 MiB. Further ones
go to each process by itself."""
HOST_CASTS_MAX: Final = 64
"""Multicasts whose bodies an agent keeps, a descriptor each."""
HOST_CAST_ALIGNMENT: Final = 64
"""Alignment of each body: a cache line, and at most what arrays need."""
HOST_CAST_READ_BYTES: Final = 1 << 18
"""Bytes of bodies that an agent reads at once: as many as the window of their channel holds."""
HOST_CAST_TREE_HOSTS_MIN: Final = 3
"""Hosts of one multicast from which on some are fed by others. With two the program sends one copy more than it would,
and needs no session between them."""
HOST_CAST_HOP_BYTES: Final = 1 << 22
"""Bytes that could be sent while the first piece of a body passes through a host: its agent wakes up twice and holds a
window of 256 KiB, some 1.5 ms, at 25 Gbit/s. The number decides how many hosts each one feeds."""
HOST_CAST_FEED_SECONDS: Final = 2.0
"""Wait of an agent for a direct connection to one that it is to feed: a dial, its handshake, and once more. Then the
program sends the bodies itself."""

# ---- Sessions between two hosts ----

HOST_FRAME_HEADER_BYTES: Final = 32
"""Fixed little-endian header of every frame of a session."""
HOST_FRAME_PAYLOAD_BYTES_MAX: Final = 65_536
"""Payload of one frame of a session: four TLS records. A longer one would delay a beat for longer than a slow line
takes for it."""
HOST_PURPOSE_BYTES_MAX: Final = 4_096
"""Purpose of a channel, in the frame that opens it: a record of 100 bytes."""
HOST_WINDOW_BYTES: Final = 262_144
"""Bytes under way in one direction of a channel that its reader has not taken: as many as a ring of a local link holds.
At 1 ms between two hosts one channel has 260 MB/s, and many share a connection."""
HOST_RESEND_BYTES: Final = 8 << 20
"""Frames of a session that are kept until the peer has them: 8 ms of a line of 10 Gbit/s. Full is backpressure."""
HOST_RESEND_RESERVE_BYTES: Final = 1 << 20
"""Reserve beyond that for windows and ends of channels, which must pass when data has filled it."""
HOST_QUANTUM_BYTES: Final = 16_384
"""Bytes of one channel's turn: a TLS record. 100 full channels delay a small message by at most 1 ms on a line of 10
Gbit/s."""
HOST_FOLD_BYTES: Final = 2_048
"""Pieces of channels up to this size, whose turns follow each other, share one frame: replies without arrays. A larger
one costs more to move than the header of a frame that it saves."""
HOST_ACK_BYTES: Final = 1 << 20
"""Received bytes after which an acknowledgement is sent: an eighth of what the peer may keep."""
HOST_ACK_FRAMES: Final = 64
"""Received frames after which an acknowledgement is sent."""
HOST_CHANNELS_MAX: Final = 16_384
"""Open channels of a session: each process of one host linked to each of 128 of another one."""

HOST_BEAT_SECONDS: Final = 0.5
"""Time after which a side that has sent nothing sends a beat: six fit the lease of an agent."""
AGENT_LEASE_SECONDS: Final = 3.0
"""Silence after which an agent ends, and everything on its host with it."""
HOST_LEASE_SECONDS: Final = 4.0
"""Silence after which a controller gives a host up: later than its agent, so that everything there has ended."""
HOST_UNHEARD_SECONDS: Final = 1.5
"""Time without an acknowledgement by the other machine after which a connection is dropped and dialled anew. TCP
retries at doubling intervals: after two short failures of a network its next try comes when the lease is over."""
HOST_DIAL_SECONDS: Final = 0.5
"""Time for one try of an agent to reconnect to the controller. A connection is begun in one round trip, and TCP sends a
lost SYN again only after 1 s, then after 2 s: a new try is faster."""
HOST_REDIAL_SECONDS: Final = 0.05
"""Pause between two such tries if the first was refused at once: a port that is not open yet."""
FAR_LINK_LEASE_SECONDS: Final = 6.0
"""Lease of a link to a process on another host: longer by four beats than its session may be without a connection, so
that data that arrives then counts. A link must never end while the session survives."""
DIRECT_LEASE_SECONDS: Final = 8.0
"""Lease of a session of two agents: ends after the controller would have given up either of them, as only the
controller decides which hosts are lost."""
DIRECT_DIAL_SECONDS: Final = 1.0
"""Time from the first dialled address of another agent until the route through the program's host is taken: two
addresses that do not answer. The first message to that host waits for so long."""
DIRECT_RETRY_SECONDS: Final = 2.0
"""First interval of dialling an agent that is reached only through the program's host; it doubles each time."""
DIRECT_RETRY_SECONDS_MAX: Final = 60.0
"""Longest interval of that dialling: a packet a minute for a route that a firewall will never allow."""
DIRECT_HALF_OPEN_MAX: Final = 32
"""Connections to an agent that have proved nothing yet: half of `TLS_HALF_OPEN_MAX`, so that others through the
program's host have room whatever strangers do."""
DIRECT_ADDRESSES_MAX: Final = 8
"""Addresses that one agent advertises to another one: networks of a machine."""
DIRECT_ADDRESS_CHARS_MAX: Final = 270
"""Length of one such address: a name of DNS has 253 characters, a port 5."""

# ---- Agents and doors ----

HOST_REACH_SECONDS: Final = 10.0
"""Time for which a host that waited for its token dials addresses where no process listens: a relay may be
started again there."""
HOST_JOIN_SECONDS: Final = 60.0
"""Time from an agent's start until its host can start processes: ssh, an interpreter, an import over NFS, a spawner."""
HOST_STOP_SECONDS: Final = 5.0
"""Time for a stopping agent to end everything on its host, by `KILL_SECONDS`, and itself; then it is killed."""
HOST_BYE_SECONDS: Final = 1.0
"""Wait of an ending agent until the controller has its last message: one round trip, and the queue before it."""
AGENT_EXIT_SECONDS: Final = 2.0
"""Time for the launcher to report why an agent said goodbye unasked: the message of a scheduler arrives on a connection
of its own. Much less than links to its processes take to give up."""
FAR_EXIT_REPORT_SECONDS: Final = HOST_LEASE_SECONDS + AGENT_EXIT_SECONDS + 1.0
"""Time from the end of a link to a process of another host to its exit report: the lease of the host,
`AGENT_EXIT_SECONDS` for the reason of a goodbye, and a second, so that the loss of the host is reported first."""
AGENT_WORDS_SECONDS: Final = 0.25
"""Time for the last lines of an ended agent: they are there at once, unless its children hold its standard error
longer. The loss of the host is reported after this, much sooner than its links give up."""
AGENT_LINES_KEPT: Final = 20
"""Last lines of an agent, reported with its end: the end of a traceback, a message of ssh."""
AGENT_LINE_BYTES_MAX: Final = 8_192
"""Length of one of those lines."""
AGENT_STATE_SECONDS: Final = 5.0
"""Interval at which an agent renews its state file; readers of it count minutes."""
DOOR_PATIENCE_SECONDS: Final = 0.5
"""Time after which a connection to a door that has proved nothing makes way for those that wait: a handshake takes two
round trips, so this is one with the other side of the world."""
DOOR_QUEUE_MAX: Final = 1_024
"""Connections to a door that wait for their handshake: all hosts of a job (`JOB_HOSTS_MAX`) may dial in one moment."""
DOOR_REFUSALS_KEPT: Final = 64
"""Latest refusals of an open door, kept for its program: a screen of them."""
JOB_HOSTS_MAX: Final = 1_024
"""Hosts of one job: one link of the controller each, at the least, and `LINKS_MAX` bounds those."""

assert HOST_QUANTUM_BYTES <= HOST_FRAME_PAYLOAD_BYTES_MAX
assert HOST_WINDOW_BYTES <= HOST_RESEND_BYTES
assert HOST_UNHEARD_SECONDS + 2 * HOST_DIAL_SECONDS < AGENT_LEASE_SECONDS
assert FAR_LINK_LEASE_SECONDS < DIRECT_LEASE_SECONDS
assert HOST_UNHEARD_SECONDS + 2 * DIRECT_DIAL_SECONDS < FAR_LINK_LEASE_SECONDS
assert HOST_BEAT_SECONDS * 4 < AGENT_LEASE_SECONDS < HOST_LEASE_SECONDS < FAR_LINK_LEASE_SECONDS
assert AGENT_EXIT_SECONDS < FAR_LINK_LEASE_SECONDS

# ---- Launchers: ssh, Slurm, Kubernetes ----

SSH_CONNECT_SECONDS: Final = 20
"""Time until a host answers ssh: a name server, a jump host and the host itself, each over a slow line."""
SSH_STARTS_AT_ONCE: Final = 32
"""Connections in the making: an ssh server begins to refuse at 10 (MaxStartups), but each host has its own; a shared
jump host is to be configured for it."""
SSH_JUMPS_MAX: Final = 8
"""Jump hosts in a row that are followed to find the first one."""
SSH_END_SECONDS: Final = 2.0
"""Time for an agent to end after its lifeline was closed; then it is killed over the same connection."""

RELAY_LEASE_SECONDS: Final = 1.5
"""Silence after which a relay on another host ends and frees its port: half of the lease of an agent, so that a new
relay listens there in time."""
RELAY_BEAT_SECONDS: Final = RELAY_LEASE_SECONDS / 6
"""Interval at which a program and its relay signal to each other that they live."""
RELAY_ALIVE_SECONDS: Final = 1
"""Interval at which ssh of a relay asks for a sign of its server, which it gives up after two: whole seconds are the
smallest that ssh takes."""
RELAY_RESTART_SECONDS: Final = 0.1
"""First pause before a relay that has ended is started again; it doubles each time until one has run for a while."""
RELAY_RESTART_SECONDS_MAX: Final = 2.0
"""Longest such pause: the hosts are lost by then, and further ones may join."""
RELAY_CONNECTIONS_MAX: Final = 4_096
"""Connections through a relay: one of each host, those of hosts that join, and as many of strangers again. Each costs
two descriptors there and a channel of ssh."""

SLURM_END_SECONDS: Final = 10.0
"""Time for salloc to return an allocation: one message to Slurm's controller, which may be busy for seconds."""
SLURM_QUEUE_LOOK_SECONDS: Final = 10.0
"""Polling interval of Slurm's queue, for people who wait there: its controller has to lock the queue for each."""
SLURM_NOTICE_SECONDS: Final = 60.0
"""Notice to the program before the time limit of a Slurm job: long enough to write tens of GB to a file system."""
SLURM_LEAVE_SECONDS: Final = 10.0
"""Time from the end of the grace of a block to the time limit of its Slurm job: agents end, and the job is returned."""
SLURM_LIMIT_LOOK_SECONDS: Final = 60.0
"""Polling interval of the time limit of a Slurm job, which operators change while it runs."""
SLURM_LIMIT_LOOK_SECONDS_MIN: Final = 0.25
"""Polling interval of that time limit when it is near, as Slurm counts in whole seconds."""

KUBERNETES_CALL_SECONDS: Final = 30.0
"""Time limit of one call to an API server: half of its own limit for a call."""
KUBERNETES_CALLS_AT_ONCE: Final = 16
"""Calls about many pods at once: an API server takes some hundred of all its clients."""
KUBERNETES_WATCH_SECONDS: Final = 300.0
"""Length of a watch, after which the API server ends it, as its own clients request: one that broke in silence ends,
too."""
KUBERNETES_RETRY_SECONDS: Final = 0.5
"""Pause between two tries to reach an API server that does not answer."""
KUBERNETES_LOOK_SECONDS: Final = 0.1
"""Polling interval for the end of the pods of a block that is left."""
KUBERNETES_SILENT_SECONDS: Final = 120.0
"""Tolerated outage of an API server while pods are awaited: an upgrade of its machine. A running job needs none."""
KUBERNETES_END_SECONDS: Final = 30.0
"""Time to delete the objects that a job applied: three times the grace of a pod. Remaining objects are logged."""
POD_HURRIES: Final = 5
"""Changes of a pod of others after its Secret has changed: the first may come before its kubelet can see the Secret."""
POD_HURRY_SECONDS: Final = 3.0
"""Interval at which a pod whose agent has not joined is notified of its token again: its kubelet may have read too
early."""
POD_WAIT_SECONDS: Final = 300.0
"""Time without a change of its token's folder after which an agent of a pod gives up: the program makes a change each
`POD_BEAT_SECONDS`, which reaches the pod within two minutes at worst."""
POD_BEAT_SECONDS: Final = 60.0
"""Interval of those changes for waiting pods: a request to the API server a minute."""
POD_RELAY_LEASE_SECONDS: Final = 300.0
"""Silence of its program after which a relay pod ends: a laptop that changes its network comes back sooner. The hosts
are lost long before, and others may follow them."""
POD_GRACE_SECONDS: Final = 10.0
"""Time from SIGTERM to SIGKILL of a pod, unless its template sets it: an agent ends its processes by `KILL_SECONDS`."""
POD_KEPT_SECONDS: Final = 600.0
"""Age at which finished objects that the program could not delete delete themselves: long enough to read their logs."""

assert POD_BEAT_SECONDS * 4 < POD_WAIT_SECONDS

# ---- Placements ----

PLACEMENT_CHECKS_MAX: Final = 200_000
"""Hosts that the search of one placement checks, counted once for each process that it tries: about a second. A
search that finds a placement without going back takes as many as it has processes and hosts that are full."""
PLACEMENT_PROCS_MAX: Final = 8_192
"""Processes of one placement: eight on each of as many hosts as a job may have."""
NVML_SECONDS: Final = 20.0
"""Wait for the GPU driver to list its GPUs: it loads in some seconds after the start of a machine, and hangs when a
GPU has failed. Then the host counts as one without GPUs."""
PLACEMENT_SHARES_MAX: Final = 1_000
"""Parts into which a GPU can be divided: `gpus=` is rounded to the nearest fraction with at most this denominator."""

# ---- Commands, shells and ports on hosts ----

COMMAND_BATCHES: Final = 2
"""Batches of lines, of `OUTPUT_BATCH_BYTES_MAX` each, that the command of a host may be ahead of the program: one shown
and one behind it. 1,000 hosts that all write have 64 MB under way."""
COMMAND_FLUSH_SECONDS: Final = 10.0
"""Wait for the last lines of a cancelled command that has ended: milliseconds, unless its host is overloaded."""
FORWARD_CHUNK_BYTES: Final = 65_536
"""Bytes read from a forwarded connection at once: a fragment of a link, four TLS records."""
FORWARD_CHUNKS: Final = 8
"""Chunks of one direction of a forwarded connection under way: 512 KiB let 1 ms between hosts have 500 MB/s. A reader
that stops holds so much, and no other connection."""
FORWARD_CONNECTIONS_MAX: Final = 256
"""Open connections of one forwarded port: a browser has ten, a load test a hundred; 256 that stand still hold 256 MB in
each process. More wait in the backlog of the system."""
FORWARD_CONNECT_SECONDS: Final = 10.0
"""Time until a service on the host, or near it, has accepted a connection; then the one at the program is reset."""
FORWARD_FAILURES_KEPT: Final = 16
"""Latest reasons for resets of connections of a forwarded port, kept for its program."""
FORWARD_ACCEPT_RETRY_SECONDS: Final = 0.1
"""Pause after an accept that failed for want of descriptors."""
TERMINAL_CELLS_MAX: Final = 4_096
"""Rows, and columns, of a terminal on a host: four times those of a wall of screens."""
TERMINAL_SILENCE_SECONDS: Final = 0.25
"""Silence after the end of a shell whose background job still holds the terminal: the shell's own output is read by
then."""

# ---- Code and packages on hosts ----

CODE_FILES_MAX: Final = 100_000
"""Files that are brought to hosts: ten times a large repository; each is a link on each host for each version."""
CODE_BYTES_MAX: Final = 2_147_483_648
"""Bytes of files that are brought to hosts, as code; data and weights have a store, or a network file system."""
CODE_PIECE_BYTES: Final = 4_194_304
"""Contents sent to hosts in one message: a thousand small files, and a bound of the memory that waits on each."""
CODE_SCANS_MAX: Final = 5
"""Scans of a tree in which a file changes while it is sent; then the sync is refused, as such a file is no code."""
CODE_KEPT_SECONDS: Final = 604_800.0
"""Time unused after which a tree is removed from a host, a week, and with it contents that no other tree has."""
CODE_TOUCH_SECONDS: Final = 3_600.0
"""Interval at which a host records that a tree is in use."""
CODE_LOCK_RETRY_SECONDS: Final = 0.02
"""Polling interval of the lock that another job of this user holds on the folder of trees of a host."""
CODE_DEBOUNCE_MS: Final = 100
"""Window in which changes become one version: an editor or git writes several files within it."""
CODE_WATCH_MS: Final = 1_000
"""Interval at which a thread that watches files checks whether it is still wanted."""
ENVIRONMENT_KEPT_SECONDS: Final = 28 * 86_400.0
"""Time unused after which an environment is removed from a host, four weeks: to make one takes minutes, and the next
phase of an experiment comes weeks later."""
ENVIRONMENT_LOCK_RETRY_SECONDS: Final = 0.1
"""Polling interval while another job of this user makes the environment: that takes seconds."""
REQUIREMENTS_BYTES_MAX: Final = 4 << 20
"""Size of a file of requirements, or a lock of uv, with all hashes: a large project has 1 MB."""
REQUIREMENT_FILES_MAX: Final = 64
"""Files of requirements that include each other: one for each part of a large project."""
UV_EXPORT_SECONDS: Final = 60.0
"""Time for uv to read a lock: it takes 1 s; on a network file system that stands still it is given up."""
INSTALL_WORDS_MAX: Final = 80
"""Characters of a line of uv or pip that are shown: one line of a terminal."""

# ---- Kept jobs ----

KEPT_LEASE_SECONDS_MAX: Final = 28 * 86_400.0
"""Longest lease of a kept job, four weeks: the certificates of its hosts are valid for 30 days."""
KEPT_NAME_CHARS_MAX: Final = 64
"""Length of the name of a kept job: it is a part of the name of a file, and of a line of `trimesh job list`."""
KEPT_FILE_BYTES_MAX: Final = 1 << 20
"""Size of a state file, which has the names of all hosts: 64 KiB with 1,000 of them."""
KEPT_LINE_BYTES_MAX: Final = 1 << 20
"""One record between a keeper and its client, which may have the names of all hosts, too."""
KEPT_CLIENTS_MAX: Final = 64
"""Connections to a keeper that wait to be accepted: scripts that all attach in one moment; one of them gets it."""
KEPT_ANSWER_SECONDS: Final = 5.0
"""Time for a keeper to answer: it takes milliseconds; one that takes so long is stopped, or its machine swaps."""
KEPT_LOOK_SECONDS: Final = 5.0
"""Interval of reading the clock that also counts while the machine sleeps: a lease ends at most so late after such a
sleep."""
KEPT_PATIENCE_SECONDS: Final = 0.5
"""Time before an attach is refused because another program has the hosts: that program may have been killed at this
moment, and the kernel is still reaping it."""
KEPT_CLEAN_SECONDS: Final = 15.0
"""Wait of an attach until the hosts are clean of the program before: an agent ends what runs there by `KILL_SECONDS`,
and is killed after that."""
KEPT_PREPARE_SECONDS: Final = 1.0
"""Time from the hand-over of an agent to a program until the agent for the next one starts: by then the program has
started its processes there, and does not share its processor with an interpreter that loads modules."""
KEPT_NOTICE_SECONDS: Final = 60.0
"""Notice to the attached program before the lease ends, as for a Slurm job; of a short lease at most half the rest."""
KEPT_LEAVE_SECONDS: Final = 5.0
"""Time from the end of the grace of an attached program to the end of the lease: agents end meanwhile."""
KEPT_REPLACE_SECONDS: Final = 75.0
"""Time for a keeper to replace a machine, by `HOST_JOIN_SECONDS`, or to report why not."""
KEPT_END_SECONDS: Final = 60.0
"""Time from the end of a lease until nothing is left: schedulers take 30 s of it. Then the keeper and everything that
it holds end by force, as after a program that was killed."""

assert KEPT_LOOK_SECONDS < KEPT_CLEAN_SECONDS < KEPT_END_SECONDS
assert HOST_JOIN_SECONDS < KEPT_REPLACE_SECONDS

# ---- Snapshots, progress and the control socket ----

OBSERVE_SECONDS: Final = 1.5
"""Time for the processes of a run to report their state. A free loop answers in 1 ms; the rest is for processes below
the first ones, and for signals to those that do not answer."""
OBSERVE_LOOP_SECONDS: Final = 0.3
"""Time for a Trio loop to receive a request before it counts as one that does not run: a turn takes a millisecond."""
OBSERVE_STATE_SECONDS: Final = 0.5
"""Time for a host to report the kernel's view of a silent process: agents answer in milliseconds, and an observer
waits."""
MACHINE_SECONDS: Final = 0.25
"""Time to read the figures of a machine: files of the kernel take a millisecond, NVML 20. A slow driver's arrive with
the next answer; the time is below `OBSERVE_STATE_SECONDS`, after which an agent counts as silent."""
OBSERVED_CALLS: Final = 1_024
"""Calls that one process reports, oldest first; the rest is counted."""
OBSERVED_EVENTS: Final = 1_024
"""Events that one process keeps for later readers, newest last: some 300 kB."""
OBSERVED_TEXT_CHARS: Final = 500
"""Text of one event: the beginning of an error."""
OBSERVED_CAUSES: Final = 8
"""Errors behind the error of one event that are reported, `OBSERVED_TEXT_CHARS` each: a chain is rarely longer."""
OBSERVED_BYTES_MAX: Final = 64 << 20
"""One answer of a control socket: 4,096 processes with ten calls each make 20 MB."""
OBSERVED_ROWS: Final = 10_000
"""Rows of one table of a snapshot: 4,096 processes are shown whole, and drawn in less than a second."""
OBSERVED_RECORDS: Final = 64
"""Flight records read for one snapshot, of processes that do not answer: a fifth of a second. Where more are silent,
the first ones show what the others do, too."""
OBSERVED_OUTPUT_BYTES: Final = 1 << 20
"""Newest output that a controller keeps for observers: some ten thousand lines."""
OBSERVED_OUTPUT_LINES: Final = 10_000
"""Lines of output in one answer of a controller."""
CONTROL_CLIENTS_MAX: Final = 16
"""Connections to one control socket at a time: people with terminals, and a page."""
CONTROL_REQUEST_BYTES_MAX: Final = 65_536
"""Size of one request to a control socket."""
CONTROL_SECONDS: Final = 10.0
"""Time for one client to send its request, or to take a part of an answer; a client that hangs keeps one thread so
long."""
PROGRESS_SECONDS: Final = 2.0
"""Time after which work shows its progress: people wonder after two seconds."""
PROGRESS_DRAW_SECONDS: Final = 0.2
"""Interval of drawing a line in a terminal or a notebook: it moves, at no visible cost."""
PROGRESS_LOG_SECONDS: Final = 10.0
"""Interval of progress lines in a log, where they were requested: each of them stays."""
LIVE_SECONDS: Final = 1.0
"""Interval of drawing the overview of a run in a notebook: faster than a person reads it."""
LIVE_SHARE: Final = 0.1
"""Greatest share of time that drawing the overview takes: the interval grows with the run."""
LIVE_LAST_SECONDS: Final = 0.5
"""Time for the last query of an overview, when its block is left: processes that run answer in milliseconds."""
RATE_SECONDS: Final = 0.5
"""Shortest interval of a rate that an overview or a curve shows: below it, one call more or less is a spike."""
LIVE_CURVES: Final = 8
"""Curves of an overview; other metrics are counted."""
LIVE_LINES: Final = 5
"""Lines of an overview on what is wrong, and on the newest events: it fits on a screen."""

# ---- Flight records, traces, top, autopsy ----

RECORD_ROWS: Final = 8_192
"""Newest calls of one process in its flight record, 64 bytes each: those of half a second at full speed."""
RECORD_NAMES_BYTES: Final = 65_536
"""Names of endpoints of actors in one flight record: some thousand. Calls of others are kept without a name."""
RECORD_HALF_BYTES: Final = 1 << 18
"""Size of each half of the log of one flight record: the states of a process for some minutes, and its events."""
RECORD_FILE_BYTES_MAX: Final = 1 << 26
"""Largest file that is read as a flight record; those that are written have a megabyte."""
RECORD_SECONDS: Final = 1.0
"""Interval at which a process records its state: a state 1 s old is known when everything is killed."""
RECORD_SHARE: Final = 0.005
"""Share of a process's time for recording its state: where one takes long, the next one is later."""
RECORD_CALLS: Final = 64
"""Calls under way in one recorded state, oldest first: a call that hangs is among them."""
RECORD_METRICS: Final = 32
"""Newest values of metrics in one recorded state."""
RECORD_STACK_CHARS: Final = 4_096
"""Stack of a stalled process: its innermost frames."""
RECORD_ERRORS_PER_SECOND: Final = 10
"""Error texts of calls that one process keeps: a program that raises all the time keeps the rest of its record."""
RECORD_RUNS_MAX: Final = 16
"""Newest folders of ended runs that are kept for one user: 16 MB for 16 processes each."""
RECORD_AGE_SECONDS: Final = 7 * 86_400.0
"""Age up to which folders of ended runs are kept."""
RECORD_ENDED_MAX: Final = 256
"""Files of ended processes in the folder of a running run; the oldest are removed."""
RECORD_FILES_MAX: Final = 8_192
"""Flight records of one run that are read, a megabyte each."""

# ---- Metrics and history ----

LATENCY_BOUNDS: Final = tuple(digit * 10.0**power for power in range(-5, 4) for digit in (1, 2, 5))
"""Bounds of buckets of durations, in seconds: steps of 1, 2 and 5 from 10 us, less than a call, to 5,000 s."""
METRIC_SAMPLES: Final = 4_096
"""Calls of `log` that one process keeps until they are collected, once a second: a training step takes longer than a
millisecond. Further ones replace the oldest."""
METRIC_VALUES: Final = 256
"""Values in one call of `log`: a screen of curves. Arrays belong into files."""
METRIC_SERIES: Final = 1_024
"""Series of one process, a value or some 30 buckets each. A name with a changing part makes any number of them."""
METRIC_NAME_CHARS: Final = 128
"""Length of the name of a metric."""
METRIC_BOUNDS: Final = 64
"""Bounds of one histogram: ten powers of ten in steps of 1, 2 and 5 are 30."""
METRIC_SAMPLES_COLLECTED: Final = 65_536
"""Newest samples that a controller keeps for readers: those of 1,000 ranks that log once a second, for a minute."""
METRIC_SAMPLES_ANSWERED: Final = 20_000
"""Samples in one answer of a controller, the newest: a page asks once a second."""
METRIC_ENDED: Final = 1_024
"""Ended processes whose last totals wait for a reader: all ranks of a large mesh."""
SAMPLING_SECONDS: Final = 1.0
"""Interval at which a controller collects samples: a curve moves, at no visible cost."""
SAMPLING_SHARE: Final = 0.01
"""Share of the time of a controller's loop for that: where a collection takes long, the next one is later."""
SAMPLING_READER_SECONDS: Final = 10.0
"""Time after the last request of a reader for which samples are collected: a page asks once a second."""
SAMPLING_BATCHES: Final = 8
"""Batches that wait for a slow disk, a second of samples each."""
SAMPLING_END_SECONDS: Final = 5.0
"""Time for writing the last batches when a block is left: a disk that is slower has failed."""
GPU_SECONDS: Final = 5.0
"""Interval at which a process reads its use of GPUs: a read loads and initializes NVML, some 20 ms in a thread."""
TENSORBOARD_MEMBERS: Final = 64
"""Members with a run of their own in TensorBoard, a file and a queue each: more curves are not told apart."""
HISTORY_BEGIN_SECONDS: Final = 2.0
"""Age of a run at which its history begins: shorter ones pay nothing."""
HISTORY_SECONDS: Final = 3_600.0
"""Time for which the history keeps rows of what has ended, samples and events: an hour, to find out why a run died."""
HISTORY_SAMPLES: Final = 500_000
"""Newest samples in the history: those of 64 ranks that log two values a second, for an hour; some 15 MB."""
HISTORY_TABLE_ROWS: Final = 50_000
"""Rows of each other table of the history, the newest; some 10 MB each at most."""
HISTORY_BYTES: Final = 64 << 20
"""Size of the history: beyond it the oldest samples and events are removed."""
HISTORY_SERIES: Final = 50_000
"""Series whose numbers the writer of the history remembers; others it looks up."""
HISTORY_USAGE_SECONDS: Final = 10.0
"""Interval of rows about processor and memory."""
HISTORY_PRUNE_SECONDS: Final = 30.0
"""Interval at which old rows are removed from the history."""
HISTORY_END_SECONDS: Final = 5.0
"""Time for the last transaction when a run ends, some milliseconds: a disk that hangs must not keep a program alive."""
HISTORY_QUERY_SECONDS: Final = 30.0
"""Time limit of one query of a history: a full scan takes less than a second."""
HISTORY_QUERY_ROWS: Final = 100_000
"""Rows of one result: more is for a program that reads the file itself."""

# ---- Traces ----

TRACE_SECONDS: Final = 0.25
"""Interval of reading flight records for a trace: half of the time in which the rows of a record are overwritten."""
TRACE_CALLS_MAX: Final = 500_000
"""Calls in one trace, some 100 MB; the rest is counted."""
TRACE_CONTEXT_CHARS_MAX: Final = 1_024
"""Trace context of one call or item: 55 characters of a traceparent, and a tracestate, of which W3C wants 512 passed
on."""
PROPAGATED_BYTES_MAX: Final = 4_096
"""Values of all propagated context variables of one call, encoded: ids, names, seeds; data belongs in arguments."""
TRACE_LINKS_MAX: Final = 1_024
"""Senders of items linked to one span: they are remembered while it lives; the SDK keeps 128 unless configured."""
PS_SECONDS: Final = 0.25
"""Time between the two snapshots of `trimesh ps`: the use of processors is counted between them, to 1 %."""
TOP_SECONDS_MIN: Final = 0.1
"""Shortest interval of `trimesh top`: each snapshot queries every process."""
TOP_ROWS_MAX: Final = 500
"""Rows of its screen, which are drawn anew each time; a filter shows others."""
AUTOPSY_CALLS: Final = 5
"""Last calls of each process that an autopsy lists, besides those that ran."""

# ---- Debugger ----

DEBUG_WAIT_SECONDS: Final = 600.0
"""Time for a terminal to attach to a held thread: enough to see the message and log in; then an unattended run goes
on."""
DEBUG_PAUSE_SECONDS: Final = 0.05
"""Interval of finding calls that wait for a thread that is held: a deadline that is nearer may pass."""
DEBUG_TURN_SECONDS: Final = 0.25
"""Interval at which a main thread that is held stops waiting for messages to check whether it is still wanted."""
DEBUG_TEXT_CHARS: Final = 16_384
"""Output of a debugger in one message: it goes by the control lane of no link, but must not hold up others."""
DEBUG_TERMINAL_CHARS_MAX: Final = 1 << 22
"""Output waiting for one terminal: one that takes nothing (Ctrl-Z) is detached beyond it."""
DEBUG_HOLDS_MAX: Final = 16_384
"""Threads of one run that are held at a time: four for each of 4,096 ranks."""

# ---- Dashboard ----

PAGE_SECONDS: Final = 1.0
"""Interval of snapshots while a browser has the page open: each queries every process."""
PAGE_CLIENTS_MAX: Final = 8
"""Browsers that follow the page at a time: the tabs of a few people."""
PAGE_RUNS_MAX: Final = 32
"""Runs that one page has open: the records of dead runs that are kept, and as many living ones."""
PAGE_REQUEST_BYTES_MAX: Final = 4_096
"""Body of one request to the page: the name of a process or call."""
PAGE_HISTORY: Final = 1_000
"""Points of the charts of sums: the hour that the history has, and ten minutes of snapshots."""
PAGE_CURVES: Final = 48
"""Curves of metrics on the page: more than a screen of them is found by its filter."""
PAGE_CURVE_POINTS: Final = 300
"""Points of one curve: as many as a chart has columns of two pixels. Neighbours are merged."""
PAGE_CELLS_MAX: Final = 65_536
"""Cells of one mesh that the page draws: more have no pixel."""
PAGE_PANELS_MAX: Final = 128
"""Cells of a mesh up to which the page shows endpoint and resources of each: more have no room for words."""
PAGE_MESHES_MAX: Final = 64
"""Meshes that the page draws; those with failures first."""
PAGE_PROBLEMS_MAX: Final = 100
"""Problems listed, the most urgent first; the rest is counted."""
PAGE_RESOLVED_SECONDS: Final = 60.0
"""Age up to which a failure stays among the problems after its members were restarted; then it is in the events."""
PAGE_ROWS_MAX: Final = 200
"""Rows of a table of the page: calls that differ in more than their member, links, events. Filters find others."""
PAGE_HOSTS_MAX: Final = 24
"""Hosts of which the page shows all figures: with 200 processes below them, a frame of 20 ms, the longest of 40."""
PAGE_NODES_MAX: Final = 150
"""Boxes in the picture of the wait graph; calls that differ in their member only are one."""
PAGE_LINES_MAX: Final = 2_000
"""Lines of output that one answer has, and that the page keeps."""
PAGE_TASK_PROCS: Final = 32
"""Rows of one answer of the time line: each is a flight record that is read, in some 10 ms."""
PAGE_TASK_SECONDS: Final = 600.0
"""Length of the longest time line; a process keeps its newest calls only."""
PAGE_TASK_BARS: Final = 400
"""Parts of a time line; short calls within one are joined, so that a row has no more bars."""
PAGE_LATENCY_PROCS: Final = 4
"""Busiest processes whose newest calls give the latency of a snapshot."""

# ---- Tensors: commands and memory ----

TENSOR_BATCH_COMMANDS: Final = 16
"""Smallest batch of commands while a task goes on issuing: a message costs some 20 us, a command 3."""
TENSOR_BATCH_COMMANDS_MAX: Final = 128
"""Largest batch: one of more than `TENSOR_BATCH_COMMANDS` ends where its operations decide, after some 60 more, so that
a program that issues the same again sends the same batches."""
TENSOR_COMMANDS_AHEAD: Final = 16_384
"""Commands by which a team's slowest rank may be behind before issuing waits: seconds of work, megabytes queued."""
TENSOR_PLANS: Final = 16_384
"""Operations, with the metadata of their arguments, that a controller remembers: a large model has a few thousand."""
TENSOR_RUN_FUNCTIONS: Final = 256
"""Functions that `ProcMesh.run` remembers, so that a repeated one is not sent again: more than a program has."""
TENSOR_TRIED_BYTES_MAX: Final = 1 << 20
"""Largest total size of the tensors of an operation that runs on zeros when it fails without data: milliseconds."""
TENSOR_FAILURES: Final = 1_000
"""Failed commands of a team whose lines are kept for later fetches: more are the same mistake in a loop."""
TENSOR_PLOTTED_RANKS: Final = 64
"""Ranks whose values one figure shows: eight rows of eight images, which still fit a screen."""
TENSOR_INLINE_BYTES: Final = 32_768
"""Largest tensor that moves between ranks inside a message, which costs less than a read of its memory."""
TENSOR_LENT_BYTES_MIN: Final = 1 << 20
"""Smallest tensor that moves between controller and ranks by memory that the other side reads; a smaller one goes in a
message, which waits for nothing and needs no second copy."""
TENSOR_MOVE_BYTES: Final = 2**30
"""Copies of tensors that a process keeps for others to read; the next waits for room, a larger one for all others."""
TENSOR_SUMMED_BYTES: Final = 32 << 20
"""Partial sums that one collective adds up. The wait for the other ranks is paid once for all of them, and is small
beside the time to send as much; the collective copies them for a moment."""
TENSOR_STUCK_SECONDS_MAX: Final = 1.0
"""Longest interval at which a rank that waits for an actor beside it checks whether that actor waits for one of the
controller, which may wait for the rank. The first interval is `SIGNAL_SECONDS`; a check costs as one for deadlocks."""
TENSOR_DRAIN_SECONDS: Final = 10.0
"""Time without progress of any rank after which leaving a block logs their state: a step takes less, and a collective
that only some ranks have called takes `COLLECTIVE_SECONDS`."""
SAFETENSORS_HEADER_BYTES: Final = 100_000_000
"""Header of a file of safetensors: the bound of the format's own library."""

# ---- Tensors: recordings and sequences ----

RECORDED_DATA_MAX: Final = 1_000
"""Numbers and texts around a recorded function that are compared before each replay, 0.1 ms of it; of further
containers only the length is compared."""
TENSOR_REPLAYS_LEARNT: Final = 8
"""Replays of a recording that a rank learns from: one for each layout of its inputs. Each takes as long as two by the
rules, and costs some hundred bytes for each operator."""
TENSOR_SEQUENCE_COMMANDS_MIN: Final = 8
"""Shortest sequence of commands that a rank recognises: to recognise one costs as much as two commands."""
TENSOR_SEQUENCES_SEEN: Final = 65_536
"""Sequences of commands of a team that a rank remembers to have seen once, by a number each: some megabytes."""
TENSOR_SEQUENCES_KEPT: Final = 1_024
"""Repeated sequences of commands of a team that a rank keeps before it forgets all of them. A step of a large model has
some hundred, of ten to a hundred kilobytes each."""
TENSOR_LAYOUTS_LEARNT: Final = 64
"""Layouts of tensors for which a rank remembers how one operator with its arguments runs before it forgets all of them.
A program has few of each, and one costs some hundred bytes."""
TENSOR_OPERANDS_LEARNT: Final = 8
"""Tensors of an operator whose execution a rank remembers. Operators on lists have more, and are few."""
TENSOR_TRACE_EVENTS_MAX: Final = 1_000_000
"""Operators and collectives that a trace of a simulation, or of a profile, keeps: some 200 MB of file."""
TENSOR_PROFILE_EVENTS_MAX: Final = 200_000
"""Operations and collectives that a process keeps for a profile: a minute of a busy rank, and some 20 MB there."""

# ---- Process groups and published weights ----

COLLECTIVE_SECONDS: Final = 1_800.0
"""Wait of a rank for the others of its process group: torch's own bound. A rank that failed or died frees them at once;
this is for one that computes for half an hour, or is stuck and answers."""
COLLECTIVE_POLL_SECONDS: Final = 0.000_05
"""Interval at which a rank polls its device for the end of a collective: the time of one across a link of devices."""
GROUP_CONNECT_SECONDS: Final = 30.0
"""Wait of a member of an elastic group for the connections of the others, all of which have joined: the owner notices
one that dies meanwhile and frees the caller at once, but not its thread."""
GROUP_CAUSE_SECONDS: Final = 10.0
"""Wait of a failed collective of an elastic group for the news that the group has ended: an owner learns of a death in
milliseconds; this is for one that is busy."""
GROUP_KEYS: Final = 65_536
"""Keys of a team's store: a process group of n ranks takes n, and a thousand ranks may have tens of groups."""
GROUP_LEAVES: Final = 16_384
"""Remembered commands by which ranks left a process group: no rank is `TENSOR_COMMANDS_AHEAD` behind."""
RESHARD_PLANS: Final = 16
"""Kept plans of a process that reads published weights: one for each set of tensors and layout that it requests. A loop
of RL reads two or three models."""
RESHARD_CHUNK_BYTES: Final = 1 << 26
"""Bytes copied out of remote memory in one piece, in a thread: a cancel waits for that, some 20 ms."""
RESHARD_STREAM_BYTES_MIN: Final = 8 << 20
"""Smallest copy out of remote memory that is stored past the caches, which would not hold it."""
RESHARD_ROW_BYTES_MIN: Final = 64
"""Shortest rows, a cache line, that are copied here: shorter ones are left to torch, which copies single elements in
the order that suits them."""

# ---- Streams of data ----

DATA_MIXED_ROWS: Final = 65_536
"""Rows of a stream of data that are mixed with each other where `mixed_rows=` is left out: some hundred megabytes of
sequences of a thousand numbers, and as many chunks of a file as are read for one batch to come from all over it."""
DATA_PREFETCH: Final = 2
"""Batches that a stream has ready where `prefetch=` is left out: one that is trained on next, one on its way."""
DATA_HELD_BATCHES_MAX: Final = 1_024
"""Pieces of batches that a loader keeps until the ranks have read them: far more than `prefetch=` requests."""
DATA_TRIES: Final = 8
"""Tries to read a batch as one loader after the other dies: more deaths are no accident."""
DATA_RETRY_SECONDS: Final = 0.05
"""Pause before a loader that has died is called again: about what its restart takes."""

# ---- Test kit ----

LINEARIZATION_STATES_MAX: Final = 500_000
"""Pairs of operations done and state that one check of a history visits: some ten seconds, and 100 MB. It grows with
the operations under way at one time and the outcomes that are unknown, not with the length of the history."""
HISTORY_ROWS: Final = 60
"""Last events of a history that a report shows: the failure is at the end."""
HISTORY_CELL_CHARS: Final = 32
"""Width of a column of that table; the rest of an argument or a result is cut off."""
