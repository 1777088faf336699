"""Bounds of hosts that join a mesh: certificates and tokens, and the sessions between hosts."""

from __future__ import annotations

from typing import Final

AUTHORITY_VALID_SECONDS: Final = 400 * 86_400.0
"""The authority of a mesh lives in the memory of its outermost block: longer than any run, shorter than what clocks and
tools take for endless."""

CERTIFICATE_VALID_SECONDS: Final = 30 * 86_400.0
"""A certificate of one incarnation: a run of weeks. Its key ends with its process, long before that."""

CLOCK_SKEW_SECONDS: Final = 3_600.0
"""Certificates count from so long ago: clocks of hosts without a common one differ by minutes, an hour at worst."""

CERTIFIED_MAX: Final = 65_536
"""Incarnations that one authority certifies, a number of 8 bytes each: 1,000 hosts, each replaced 64 times."""

KEY_REQUEST_BYTES_MAX: Final = 4_096
"""A request for a certificate: 400 bytes with a key on P-256."""

JOIN_TOKEN_SECONDS: Final = 300.0
"""A token is worth something for 5 minutes: a person copies it to another terminal; a job that waits in a queue gets it
when it starts."""

JOIN_TOKENS_MAX: Final = 4_096
"""Tokens of one door that have not been used: one for each host that is about to join, and a mesh has 1,000 of them."""

DOOR_REFUSALS_KEPT: Final = 64
"""The last reasons why hosts were not let in at an open door, for its program: a screen of them."""

PKI_FILE_BYTES_MAX: Final = 1 << 20
"""A file of certificates or a key: a few KiB; the store of a whole system is a mistake."""

# ---- sessions between two hosts -----------------------------------------------------------------------------

HOST_FRAME_HEADER_BYTES: Final = 32
"""Fixed little-endian header of every frame of a session."""

HOST_FRAME_PAYLOAD_BYTES_MAX: Final = 65_536
"""One frame: four TLS records. A longer one would keep a beat waiting for longer than a slow line takes for it."""

HOST_PURPOSE_BYTES_MAX: Final = 4_096
"""What a channel is for, in the frame that opens it: a record of 100 bytes."""

HOST_WINDOW_BYTES: Final = 262_144
"""What may be under way in one direction of a channel before its reader has taken any: as much as a ring of a local
link holds. At 1 ms between two hosts it lets one channel have 260 MB/s, and many share a connection."""

HOST_RESEND_BYTES: Final = 8 << 20
"""Frames of a session that are kept until the peer has them: 8 ms of a line of 10 Gbit/s. Full is backpressure."""

HOST_RESEND_RESERVE_BYTES: Final = 1 << 20
"""Beyond that, for windows and ends of channels, which must pass when data has filled it."""

HOST_QUANTUM_BYTES: Final = 16_384
"""What one channel sends in its turn: a TLS record. 100 channels that are full delay a small message by 1 ms at most on
a line of 10 Gbit/s."""

HOST_ACK_BYTES: Final = 1 << 20
"""So much received data is acknowledged at once: an eighth of what the peer may keep."""

HOST_ACK_FRAMES: Final = 64
"""So many frames, too."""

HOST_CHANNELS_MAX: Final = 16_384
"""Open channels of a session: each process of one host linked to each of 128 of another one."""

HOST_BEAT_SECONDS: Final = 0.5
"""A side that has sent nothing for so long sends a beat: six fit the lease of an agent."""

AGENT_LEASE_SECONDS: Final = 3.0
"""An agent that has heard nothing for so long ends, and everything on its host with it."""

HOST_LEASE_SECONDS: Final = 4.0
"""A controller that has heard nothing for so long gives a host up: later than its agent has, so that what is given up
has ended."""

FAR_LINK_LEASE_SECONDS: Final = 6.0
"""A link to a process on another host is silent for as long as its session may be without a connection. Four beats
more, so that what then comes counts: it must never be a link that ends what the session survives."""

AGENT_WORDS_SECONDS: Final = 0.25
"""The last lines of an agent that has ended are there at once, unless what it has started holds its standard error for
longer. The loss of the host is told after this, much sooner than its links give up."""

HOST_STOP_SECONDS: Final = 5.0
"""An agent that was told to stop ends what is left on its host, by `KILL_SECONDS`, and itself; then it is killed."""

HOST_BYE_SECONDS: Final = 1.0
"""An agent that ends waits for so long until the controller has its last word: one round trip, and what was queued."""

HOST_JOIN_SECONDS: Final = 60.0
"""From the start of an agent until processes can be started on its host: an interpreter over ssh, an import from a file
system of a network, a spawner."""

assert HOST_QUANTUM_BYTES <= HOST_FRAME_PAYLOAD_BYTES_MAX
assert HOST_WINDOW_BYTES <= HOST_RESEND_BYTES
assert HOST_BEAT_SECONDS * 4 < AGENT_LEASE_SECONDS < HOST_LEASE_SECONDS < FAR_LINK_LEASE_SECONDS

AGENT_LINES_KEPT: Final = 20
"""The last lines of an agent, told with its end: a traceback's ends, a message of ssh."""

AGENT_LINE_BYTES_MAX: Final = 8_192
"""Of one of them."""

SSH_CONNECT_SECONDS: Final = 20
"""Until a host answers ssh: a name server, a jump host and the host itself, each over a slow line."""

SSH_STARTS_AT_ONCE: Final = 32
"""Connections that are being made: an ssh server begins to refuse at 10 (MaxStartups), but each host has its own; a
jump host that all share is to be configured for it."""

SSH_JUMPS_MAX: Final = 8
"""Jump hosts in a row, which are followed to find the first one."""

SSH_END_SECONDS: Final = 2.0
"""An agent whose lifeline was closed has so long to end by itself; then it is killed over the same connection."""

SLURM_END_SECONDS: Final = 10.0
"""salloc gives an allocation back by one message to the controller of Slurm, which may be busy for seconds."""

JOB_HOSTS_MAX: Final = 1_024
"""Hosts of one job: one link of the controller each, at the least, and `LINKS_MAX` bounds those."""

COMMAND_BATCHES: Final = 2
"""Batches of lines, of `OUTPUT_BATCH_BYTES_MAX` each, that the command of a host may be ahead of the program: one that
is shown and one behind it. 1,000 hosts that all write have 64 MB under way."""

FORWARD_CHUNK_BYTES: Final = 65_536
"""Read from a forwarded connection at once: a fragment of a link, four TLS records."""

FORWARD_CHUNKS: Final = 8
"""Chunks of one direction of a forwarded connection that may be under way: 512 KiB let 1 ms between hosts have
500 MB/s. A reader that stops holds so much, and no other connection."""

FORWARD_CONNECTIONS_MAX: Final = 256
"""Open connections of one forwarded port: a browser has ten, a load test a hundred; 256 that stand still hold 256 MB in
each process. More wait in the backlog of the system."""

FORWARD_CONNECT_SECONDS: Final = 10.0
"""Until a service on the host, or near it, has taken a connection; then the one at the program is reset."""

FORWARD_FAILURES_KEPT: Final = 16
"""The last reasons why connections of a forwarded port were reset, for its program."""

FORWARD_ACCEPT_RETRY_SECONDS: Final = 0.1
"""Until a connection is taken again when there was no descriptor left for one."""
