"""Bounds of pools, slots, replay buffers and stores."""

from __future__ import annotations

from typing import Final

POOL_CONCURRENCY: Final = 16
"""Requests that one replica runs at once where `concurrency=` is left out."""

POOL_QUEUE: Final = 1_024
"""Requests that wait in a pool where `queue=` is left out; then callers wait to be let in."""

POOL_QUEUE_BYTES: Final = 1 << 28
"""Bytes of the arguments of those, as estimated, where `queue_bytes=` is left out."""

POOL_SESSIONS: Final = 4_096
"""Sessions that a pool remembers where `sessions=` is left out: 100 bytes each, and their names."""

POOL_TRIES: Final = 8
"""Replicas that one request is given to at most, as one after the other dies."""

POOL_LOOK_SECONDS: Final = 0.1
"""Between two looks whether a replica that is down has come back: an idle replica waits that much longer for work."""

SERVICE_REMOTE_CALLS: Final = 1_024
"""Calls of other processes that a pool, slots or a replay buffer serve at once; more wait in their mailboxes."""

REPLAY_BYTES: Final = 1 << 30
"""Bytes of the items of a replay buffer, as estimated, where `capacity_bytes=` is left out."""

REPLAY_SPILL_BYTES: Final = 1 << 34
"""Bytes of the file of a replay buffer that was given a folder (`spill=`), where `spill_bytes=` is left out: 16 GiB."""

REPLAY_THREAD_BYTES: Final = 1 << 20
"""From so many bytes on a file is read and written in a thread: fewer take less than half a millisecond."""

STORE_BYTES: Final = 1 << 32
"""Bytes of the versions that one shard of a store holds, where `capacity_bytes=` is left out."""

STORE_INLINE_BYTES: Final = 1 << 16
"""From so many bytes on tensors, arrays and bytes are copied straight into the memory of a store: a stream costs as
much as some 100 KiB in a message do."""

STORE_MAPPED_BYTES: Final = 1 << 20
"""From so many bytes on that memory is what other processes map: mapping one costs as much as copying some 100 KiB."""
