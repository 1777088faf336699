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

# ---- casts to the processes of another host -------------------------------------------------------------------

HOST_CAST_BYTES_MIN: Final = 262_144
"""Bodies of a cast from so many bytes on enter a host once, in memory that its processes map; smaller ones are sent to
each, since that takes one way less there and back."""

HOST_CAST_BYTES: Final = 1 << 29
"""Bodies of casts that one agent keeps until all processes of its host have mapped them: eight of 64 MiB. What is
beyond goes to each process by itself."""

HOST_CASTS_MAX: Final = 64
"""Casts whose bodies an agent keeps, a descriptor each."""

HOST_CAST_ALIGNMENT: Final = 64
"""Each body begins at a multiple of so many bytes: a cache line, and what arrays want at most."""

HOST_CAST_READ_BYTES: Final = 1 << 18
"""What an agent takes of bodies at once: as much as the window of their channel holds."""

HOST_CAST_TREE_HOSTS_MIN: Final = 3
"""Hosts of one cast from which on some are fed by others. With two the program sends one copy more than it would, and
needs no session between them."""

HOST_CAST_HOP_BYTES: Final = 1 << 22
"""What could be sent while the first piece of a body passes through a host: its agent has to wake up twice and holds a
window of 256 KiB, some 1.5 ms, at 25 Gbit/s. By it the number of hosts that each one feeds is chosen."""

HOST_CAST_FEED_SECONDS: Final = 2.0
"""How long an agent waits for a direct connection to one that it is to feed: a dial, its handshake, and once more. Then
the program sends the bodies itself."""

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

HOST_FOLD_BYTES: Final = 2_048
"""Pieces of channels up to so many bytes, whose turns follow each other, go in one frame: replies without arrays. A
larger one costs more to move than the header of a frame that it spares."""

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

HOST_UNHEARD_SECONDS: Final = 1.5
"""A connection on which the other machine acknowledges nothing for so long is dropped, and another one is dialled. TCP
tries again at doubling distances: after two short failures of a network its next try comes when the lease is over."""

HOST_DIAL_SECONDS: Final = 0.5
"""One try of an agent to connect to the controller again, for the same reason: a lost SYN is sent again after 1 s, then
after 2 s. A connection is begun in one round trip."""

HOST_REDIAL_SECONDS: Final = 0.05
"""Between two tries of an agent to connect, of which the first was refused at once: a port that is not open yet."""

FAR_LINK_LEASE_SECONDS: Final = 6.0
"""A link to a process on another host is silent for as long as its session may be without a connection. Four beats
more, so that what then comes counts: it must never be a link that ends what the session survives."""

DIRECT_LEASE_SECONDS: Final = 8.0
"""A session of two agents that has heard nothing for so long is over: after the controller would have given up either
of them, as it is the controller that says which hosts are lost."""

DIRECT_DIAL_SECONDS: Final = 1.0
"""From the first address of another agent that is dialled until the way through the program's host is taken: two
addresses that do not answer. The first message to that host waits for so long."""

DIRECT_RETRY_SECONDS: Final = 2.0
"""An agent that is reached through the program's host only is dialled again after so long, then after twice as long
each time."""

DIRECT_RETRY_SECONDS_MAX: Final = 60.0
"""And at least so often: a packet a minute for what a firewall will never let pass."""

DIRECT_HALF_OPEN_MAX: Final = 32
"""Connections to an agent that have shown nothing yet: half of `TLS_HALF_OPEN_MAX`, so that others through the
program's host have room whatever strangers do."""

DIRECT_ADDRESSES_MAX: Final = 8
"""Addresses at which one agent tells another one to dial: networks of a machine."""

DIRECT_ADDRESS_CHARS_MAX: Final = 270
"""Of one of them: a name of DNS has 253, a port 5."""

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

DOOR_PATIENCE_SECONDS: Final = 0.5
"""A connection to a door that has shown nothing for so long makes way, where others wait: a handshake takes two round
trips, so this is one with the other side of the world."""

DOOR_QUEUE_MAX: Final = 1_024
"""Connections to a door that wait for their handshake: all hosts of a job (`JOB_HOSTS_MAX`) may dial in one moment."""

assert HOST_QUANTUM_BYTES <= HOST_FRAME_PAYLOAD_BYTES_MAX
assert HOST_WINDOW_BYTES <= HOST_RESEND_BYTES
assert HOST_UNHEARD_SECONDS + 2 * HOST_DIAL_SECONDS < AGENT_LEASE_SECONDS
assert FAR_LINK_LEASE_SECONDS < DIRECT_LEASE_SECONDS
assert HOST_UNHEARD_SECONDS + 2 * DIRECT_DIAL_SECONDS < FAR_LINK_LEASE_SECONDS
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

SLURM_QUEUE_LOOK_SECONDS: Final = 10.0
"""Between two looks at the queue of Slurm, for people who wait there: its controller has to lock the queue for each."""

SLURM_NOTICE_SECONDS: Final = 60.0
"""Before the limit of time of a Slurm job, its program is told: long enough to write tens of GB to a file system."""

SLURM_LEAVE_SECONDS: Final = 10.0
"""From the end of the grace of a block to the limit of time of its Slurm job: agents end, and the job is given back."""

SLURM_LIMIT_LOOK_SECONDS: Final = 60.0
"""Between two looks at the limit of time of a Slurm job, which operators change while it runs."""

SLURM_LIMIT_LOOK_SECONDS_MIN: Final = 0.25
"""Between two such looks when the limit is near, as Slurm counts in whole seconds."""

AGENT_EXIT_SECONDS: Final = 2.0
"""An agent that says goodbye without being told to has ended for a reason, which its launcher is asked for so long: the
words of a scheduler, which come by a connection of their own. Much sooner than links to its processes give up."""

KUBERNETES_CALL_SECONDS: Final = 30.0
"""One call to an API server: half of what it gives a call itself."""

KUBERNETES_WATCH_SECONDS: Final = 300.0
"""The API server ends a watch after so long, as its own clients ask it to: one that has broken in silence ends, too."""

KUBERNETES_RETRY_SECONDS: Final = 0.5
"""Between two tries to reach an API server that does not answer."""

KUBERNETES_LOOK_SECONDS: Final = 0.1
"""Between two looks whether the pods of a block that is left are gone."""

KUBERNETES_SILENT_SECONDS: Final = 120.0
"""An API server may be away for so long while pods are waited for: an upgrade of its machine. The hosts of a job that
runs need none."""

KUBERNETES_END_SECONDS: Final = 30.0
"""Until what a job has applied is deleted: three times the grace of a pod. What is left then is said."""

KUBERNETES_CALLS_AT_ONCE: Final = 16
"""Calls about many pods at once: an API server takes some hundred of all its clients."""

POD_HURRY_SECONDS: Final = 3.0
"""A pod whose agent has not joined is told again to look for its token: its kubelet may have looked too early."""

POD_WAIT_SECONDS: Final = 300.0
"""An agent of a pod waits for its token until nothing has changed in the folder of it for so long: the program says by
a change each `POD_BEAT_SECONDS` that it lives, which comes to the pod within two minutes at worst."""

POD_BEAT_SECONDS: Final = 60.0
"""So often the program says to pods that wait that it lives: a request to the API server a minute."""

POD_GRACE_SECONDS: Final = 10.0
"""Between SIGTERM and SIGKILL of a pod, where its template says nothing: an agent ends what runs there by
`KILL_SECONDS`, and itself."""

POD_KEPT_SECONDS: Final = 600.0
"""What has finished deletes itself after that, where the program could not do it: long enough to read its logs."""

AGENT_STATE_SECONDS: Final = 5.0
"""An agent with a file of its state says there so often that it runs; who looks at it counts minutes."""

FAR_EXIT_REPORT_SECONDS: Final = HOST_LEASE_SECONDS + AGENT_EXIT_SECONDS + 1.0
"""From the end of a link to a process of another host to its exit report: its agent may be unheard for the lease of the
host, and why it said goodbye may come later; a second more, so that the loss of the host is told first."""

assert AGENT_EXIT_SECONDS < FAR_LINK_LEASE_SECONDS
assert POD_BEAT_SECONDS * 4 < POD_WAIT_SECONDS

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

TERMINAL_CELLS_MAX: Final = 4_096
"""Rows, and columns, of a terminal on a host: four times what a wall of screens has."""

TERMINAL_SILENCE_SECONDS: Final = 0.25
"""After the end of a shell, while a job that it has left in the background holds the terminal: what the shell itself
has written is read by then."""

CODE_FILES_MAX: Final = 100_000
"""Files that are brought to hosts: ten times a large repository; each is a link on each host for each version."""

CODE_BYTES_MAX: Final = 2_147_483_648
"""Bytes of files that are brought to hosts, as code; data and weights have a store, or a file system of the network."""

CODE_PIECE_BYTES: Final = 4_194_304
"""Of contents sent to hosts in one message: a thousand small files, and a bound of what waits in the memory of each."""

CODE_SCANS_MAX: Final = 5
"""Times that a tree is read again because a file has changed while it was sent; then that file is no code."""

CODE_KEPT_SECONDS: Final = 604_800.0
"""Trees that nothing has used for a week are removed from a host, and contents that no tree has with them."""

CODE_TOUCH_SECONDS: Final = 3_600.0
"""A host notes so often that a tree is in use."""

CODE_LOCK_RETRY_SECONDS: Final = 0.02
"""Until it is looked again whether another job of this user still writes to the folder of trees of a host."""

ENVIRONMENT_KEPT_SECONDS: Final = 28 * 86_400.0
"""Environments that nothing has used for four weeks are removed from a host: to make one takes minutes, and the next
phase of an experiment comes weeks later."""

ENVIRONMENT_LOCK_RETRY_SECONDS: Final = 0.1
"""Until it is looked again whether another job of this user still makes the environment: that takes seconds."""

REQUIREMENTS_BYTES_MAX: Final = 4 << 20
"""A file of requirements, or a lock of uv, with all hashes: a large project has 1 MB."""

REQUIREMENT_FILES_MAX: Final = 64
"""Files of requirements that take each other in: one for each part of a large project."""

UV_EXPORT_SECONDS: Final = 60.0
"""uv reads a lock within a second; on a file system of a network that stands still it is given up."""

INSTALL_WORDS_MAX: Final = 80
"""Characters of a line of uv or pip that are shown: one line of a terminal."""

CODE_DEBOUNCE_MS: Final = 100
"""An editor or git writes several files within this; they become one version."""

CODE_WATCH_MS: Final = 1_000
"""A thread that waits for changes of files looks so often whether it is still wanted."""

# ---- jobs that are kept -------------------------------------------------------------------------------------

KEPT_LEASE_SECONDS_MAX: Final = 28 * 86_400.0
"""A lease of a kept job: four weeks. The certificates of its hosts count for 30 days."""

KEPT_NAME_CHARS_MAX: Final = 64
"""The name of a kept job: it is a part of the name of a file, and of a line of `trimesh job list`."""

KEPT_FILE_BYTES_MAX: Final = 1 << 20
"""A state file, which has the names of all hosts: 64 KiB with 1,000 of them."""

KEPT_LINE_BYTES_MAX: Final = 1 << 20
"""One record between a keeper and who asks it, which may have the names of all hosts, too."""

KEPT_CLIENTS_MAX: Final = 64
"""Connections to a keeper that wait to be taken: scripts that all attach in one moment; one of them gets it."""

KEPT_ANSWER_SECONDS: Final = 5.0
"""A keeper that lives answers within milliseconds; after so long it is stopped, or its machine swaps."""

KEPT_LOOK_SECONDS: Final = 5.0
"""Between two looks at the clock that also counts while the machine sleeps: so late a lease ends after such a sleep."""

KEPT_PATIENCE_SECONDS: Final = 0.5
"""Before an attach is refused because another program has the hosts: that may have been killed at this moment, and the
kernel still takes it apart."""

KEPT_CLEAN_SECONDS: Final = 15.0
"""An attach waits for so long until the hosts are clean of the program before: an agent ends what runs there by
`KILL_SECONDS`, and is killed after that."""

KEPT_PREPARE_SECONDS: Final = 1.0
"""After a program has got an agent of a kept host, until the agent for the next one is started: then the program has
started what it runs there, and does not share its processor with an interpreter that loads modules."""

KEPT_NOTICE_SECONDS: Final = 60.0
"""Before the end of the lease of a kept job, the program that is attached is told, as before that of a Slurm job; of a
short lease not more than half of what is left."""

KEPT_LEAVE_SECONDS: Final = 5.0
"""From the end of the grace of an attached program to the end of the lease: agents end meanwhile."""

KEPT_REPLACE_SECONDS: Final = 75.0
"""A keeper has another machine in the place of one by `HOST_JOIN_SECONDS`, or says why not."""

KEPT_END_SECONDS: Final = 60.0
"""After the end of a lease, until nothing is left: schedulers take 30 s of it. Then the keeper ends by force, and what
it holds with it, as that of a program that was killed."""

assert KEPT_LOOK_SECONDS < KEPT_CLEAN_SECONDS < KEPT_END_SECONDS
assert HOST_JOIN_SECONDS < KEPT_REPLACE_SECONDS
