"""Bounds of frames, links, and liveness of peers."""

from __future__ import annotations

from typing import Final

# ---- frames and links ---------------------------------------------------------------------------------------

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
"""Part of a ring that data may not use, so that cancels and credits still fit when data has filled it."""

SPIN_SECONDS: Final = 500e-6
"""The longest time that a process spins on its links before it sleeps, when it expects something soon. How long it does
is measured (`native/src/links/spin_bound.zig`): at most four times what a wake costs, which is 12 to 30 us on most
machines and up to 100 on slow virtual ones, and at most an eighth of all time in vain."""

WAIT_HERE_SECONDS: Final = 1e-3
"""The longest time that a task waits for a message itself, in place of the loop: ten times what an answer takes that is
expected soon."""

WAITS_HERE_MAX: Final = 16
"""So many waits a task does itself before the loop has its turn again: a sixteenth of the cost of a turn is left, and
sockets and signals, which a wait that is over at once does not look at, are looked at within a millisecond."""

TURNS_LEFT_OUT: Final = 4
"""After a task has waited itself in vain, so many turns of the loop pass before one does again: where answers are slow,
a fifth of what the attempt costs is paid for each."""

SPIN_US_MAX: Final = 10_000
"""Longest time that the native library may be asked to spin: Trio's own grain of time is a thousandth of a second."""

SPIN_CORES_MIN: Final = 2
"""With fewer cores, by affinity or by quota, spinning takes the core from who is waited for."""

LINKS_MAX: Final = 1_024
"""Links of one process: a controller of the largest single host (several hundred workers) with room."""

SEGMENT_BYTES_MIN: Final = 1 << 17
"""Smallest pooled segment: nearly twice the size up to which a body is copied inline."""

SEGMENT_BYTES_MAX: Final = 1 << 27
"""Largest pooled segment; a larger body travels in chunks. Nothing else runs in the sender's loop while it copies:
7 ms for 128 MiB, 90 ms when the pages are new."""

SEGMENT_IDLE_BYTES_MAX: Final = 1 << 28
"""Shared memory of segments that are not held, kept for the next bodies: two of the largest. Making pages anew costs
ten times the copy; more than this would count against a container's memory for nothing."""

SEGMENTS_MAX: Final = 128
"""Pooled segments of one process: one descriptor each at the sender, one mapping each at every receiver."""

SEGMENT_FLIGHT_BYTES_MAX: Final = 1 << 24
"""Bytes in segments sent to one peer that has not looked at them; beyond it messages wait, but one alone."""

CHUNK_FLIGHT_BYTES_MAX: Final = 1 << 22
"""The same of chunks of larger messages: one that overtakes them waits for what is under way, some 0.3 ms a MiB."""

CHUNK_BYTES: Final = 1 << 20
"""One chunk of a large message to a process of this host. Copying it takes the loop of either side 0.2 ms; smaller ones
cost more turns of the loop, larger ones are slower for a core's cache."""

STREAM_CHUNK_BYTES: Final = 1 << 17
"""The same between hosts: what a small message may find before it in the ring of the link, half of that."""

CHUNKED_BYTES_MIN: Final = 2 << 20
"""From this size on messages go in chunks between hosts, and to processes of this host if most of it is `bytes`. Those
are copied out of shared memory anyway: in chunks, while the sender is still copying in."""

CHUNKED_MAX: Final = 16
"""Large messages of one link under way in chunks at one time; more wait for their turn."""

KEPT_BYTES_MIN: Final = 32 << 20
"""Size from which on the memory of `bytes` that have come in chunks is kept for others of the same size: glibc gives it
back to the system each time, of smaller ones it keeps it."""

KEPT_BYTES_MAX: Final = 1 << 27
"""So much one process keeps: two of 64 MiB. New pages cost as much as the copy into them; what is kept counts against a
container's memory."""

KEPT_BYTES_SECONDS: Final = 5.0
"""What was not used again for this long, and at most for twice that, goes back to the system: longer than most programs
take from one large message to the next."""

KEPT_SIZES_MAX: Final = 8
"""Sizes of large `bytes` that came lately, and are waited for to come again, before the memory of one is kept."""

SEGMENT_POOL_BYTES_MAX: Final = 1 << 31
"""Shared memory that one process may hold for bodies on their way: 2 GiB; beyond it bodies travel as fragments."""

# ---- liveness -----------------------------------------------------------------------------------------------

BEAT_SECONDS: Final = 0.5
"""Heartbeat of a native thread: six beats fit one lease, so five may be late."""

LEASE_SECONDS: Final = 3.0
"""Silence after which a peer counts as stopped: a stopped process is known within 4 s."""

STALL_SECONDS: Final = 5.0
"""A Trio loop that has not run for this long while its native thread answers is reported as stalled."""

STALL_AGAIN_SECONDS: Final = 30.0
"""A process that goes on stalling is reported once in this time: its stack is 16 KiB of a log."""

assert HEAD_PAYLOAD_BYTES_MAX < HEAD_BYTES_MAX < FRAME_PAYLOAD_BYTES_MAX
assert RING_BYTES >= 4 * (FRAME_PAYLOAD_BYTES_MAX // 2 + FRAME_HEADER_BYTES)
assert RING_CONTROL_RESERVE_BYTES * 8 <= RING_BYTES
assert LEASE_SECONDS >= 4 * BEAT_SECONDS
assert FRAME_PAYLOAD_BYTES_MAX < SEGMENT_BYTES_MIN <= SEGMENT_BYTES_MAX <= SEGMENT_POOL_BYTES_MAX

# ---- TLS between hosts --------------------------------------------------------------------------------------

TLS_HALF_OPEN_BYTES: Final = 1 << 16
"""What a peer that is not admitted yet may send: a handshake with a long chain of certificates takes a tenth of it."""

TLS_HALF_OPEN_MS: Final = 5_000
"""From the first byte of a link until its peer is admitted: a handshake takes 2 ms on one host, and hosts may be far
away."""

TLS_HALF_OPEN_MAX: Final = 64
"""Peers of one door that are not admitted yet: 100 KiB each, and as many hosts may dial in the same moment."""

TLS_HELLO_BYTES: Final = 256
"""The first thing that either side says inside TLS; fixed, so that nothing is parsed to find its end."""
