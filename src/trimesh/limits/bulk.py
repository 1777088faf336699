"""Bounds of bulk data: memory that others reach, transfers, and memory of CUDA devices."""

from __future__ import annotations

from typing import Final

# ---- what becomes of transfers ------------------------------------------------------------------------------

REVOKE_SECONDS: Final = 2.0
"""Wait for transfers that run when a buffer is revoked (rule N4); they look after every MiB. A process that is still at
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

# ---- transfers by messages ----------------------------------------------------------------------------------

LINKED_PIECE_BYTES: Final = 1 << 20
"""Of a transfer between hosts that no carrier connects, one message: the owner copies as much in a turn of its loop."""

LINKED_PIECES: Final = 8
"""Such pieces that one process asks of another at one time: what is on its way at 1 ms and 8 GB/s, and what the owner
may be made to hold by each."""

# ---- bulk data ----------------------------------------------------------------------------------------------

GRANTS_MAX: Final = 8_192
"""Buffers of one process that others may reach at one time: a row of 128 bytes each in a table that they all map."""

BLOCKS_MAX: Final = 256
"""Pieces of allocated memory of one process: a descriptor each, and a shell often allows 1,024."""

BLOCK_BYTES_MAX: Final = 1 << 40
"""One piece of allocated memory: 1 TiB, more than a host has; a size above it is a mistake."""

BLOCK_IDLE_BYTES_MAX: Final = 1 << 29
"""Allocated memory that was given back and is kept for the next: making pages anew costs ten times the copy, and more
than this would count against a container's memory for nothing."""

ATTACHMENTS_MAX: Final = 1_024
"""Processes whose memory one process reaches at one time: as many as it may have links."""

TRANSFERS_MAX: Final = 1_024
"""Transfers of one process that are under way; more wait for one of them to end."""

VIEWS_MAX: Final = 4_096
"""Views of others' memory that one process has open: a mapping each, and the kernel allows 65,530 of those."""

KEPT_PIECE_BYTES: Final = 1 << 22
"""Of a pinned version whose publisher has ended, what the Trio thread copies between two checkpoints: half a
millisecond."""

INLINE_BYTES_MAX: Final = 1 << 17
"""A transfer up to this size is done at once: 16 us in the slowest case, about what waking a thread and back costs."""

EXPORT_BYTES_MAX: Final = 4_096
"""What a handle says to readers with an RDMA adapter: 20 to 250 bytes for each adapter of a machine (at most 9)."""

DEVICE_REASON_CHARS: Final = 1_024
"""What a handle says about why no adapter reaches memory of a device: as much as the native library says."""

MOVER_SILENCE_MS: Final = 5_000
"""A process that lives and does not answer a transfer for this long is called silent: longer than a lease, so that a
stopped process is reported as such where it is watched."""

TCP_STRANGERS_SHARE: Final = 8
"""Of the descriptors that a process may have (`ulimit -n`), connections by `tcp` that have shown no secret take one in
so many at most: any user of the host can make them, and the rest is for the program's own files."""

SIGNED_LINE_BYTES_MAX: Final = 1 << 16
"""What one side of the self-test of adapters tells the other at a time: two handles for adapters, a dozen texts."""

SELF_TEST_SECONDS: Final = 300.0
"""The self-test of adapters as a whole, a dozen transfers of 64 MiB each way: seconds, unless something hangs."""

# ---- memory of CUDA devices ---------------------------------------------------------------------------------

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
"""Threads in which one process opens and closes memory of devices, pins memory, and copies within it. They never
wait, and are apart from those of endpoints, which may all be waiting for a transfer."""

CUDA_END_SECONDS: Final = 2.0
"""A transfer that fails or is cancelled waits this long for the pieces that are being copied, and each for memory of
another process to be closed: milliseconds, unless the device hangs. Memory of a copy that has not ended is kept."""
