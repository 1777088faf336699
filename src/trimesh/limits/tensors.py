"""Bounds of the tensor engine."""

from __future__ import annotations

from typing import Final

TENSOR_BATCH_COMMANDS: Final = 16
"""Commands that are sent together at least while a task goes on issuing: a message costs some 20 us, a command 3."""

TENSOR_BATCH_COMMANDS_MAX: Final = 128
"""Commands that are sent together at most: a batch of more than TENSOR_BATCH_COMMANDS ends where its operations say so,
after some 60 more, so that a program that issues the same again sends the same batches."""

TENSOR_COMMANDS_AHEAD: Final = 16_384
"""Commands of a team that its slowest rank may be behind before issuing waits: seconds of work, megabytes queued."""

TENSOR_PLANS: Final = 16_384
"""Operations, with the metadata of their arguments, that a controller remembers: a large model has a few thousand."""

TENSOR_RUN_FUNCTIONS: Final = 256
"""Functions that `ProcMesh.run` remembers, so that one which runs again is not sent again: more than a program has."""

TENSOR_TRIED_BYTES_MAX: Final = 1 << 20
"""An operation that fails without data runs on zeros if its tensors have at most so many bytes: milliseconds."""

TENSOR_FAILURES: Final = 1_000
"""Failed commands of a team whose lines are kept for whoever fetches: more are the same mistake in a loop."""

RECORDED_DATA_MAX: Final = 1_000
"""Numbers and texts around a recorded function that are compared before each replay, 0.1 ms of it; of containers beyond
that only the length is."""

TENSOR_PLOTTED_RANKS: Final = 64
"""Ranks whose values one figure shows: eight rows of eight images, which still fit a screen."""

COLLECTIVE_SECONDS: Final = 1_800.0
"""A rank waits this long for the others of its process group: torch's own bound. A rank that has failed or died frees
them at once; this is for one that computes for half an hour, or is stuck and answers."""

TENSOR_DRAIN_SECONDS: Final = 10.0
"""Leaving a block says what its ranks are at when none has told of progress for so long: a step takes less, and a
collective that only some ranks have called takes COLLECTIVE_SECONDS."""

RESHARD_PLANS: Final = 16
"""Plans of a process that reads published weights that are kept: one for each set of tensors that it asks for, and
layout. A loop of RL reads two or three models."""

RESHARD_CHUNK_BYTES: Final = 1 << 26
"""Copied out of the memory of others in one piece, in a thread: a cancel waits for that, some 20 ms."""

RESHARD_STREAM_BYTES_MIN: Final = 8 << 20
"""A reader that copies as much out of the memory of others stores past the caches, which would not hold it."""

RESHARD_ROW_BYTES_MIN: Final = 64
"""Shorter rows, a cache line, are left to torch, which copies single elements in the order that suits them."""

GROUP_CONNECT_SECONDS: Final = 30.0
"""A member of an elastic group waits this long for the connections of the others, all of which have joined: one that
dies meanwhile is noticed by its owner, and frees the caller at once, but not its thread."""

GROUP_CAUSE_SECONDS: Final = 10.0
"""A collective of an elastic group that fails waits this long to learn that the group has ended: an owner hears of a
death in milliseconds; this is for one that is busy."""

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
smaller one in a message, which waits for nothing and needs no second copy."""

TENSOR_MOVE_BYTES: Final = 2**30
"""Copies of tensors that a process keeps for others to read; the next waits for room, a larger one for all others."""

SIGNAL_SECONDS: Final = 0.05
"""How often a function that waits without `await` looks at signals and links."""

TENSOR_REPLAYS_LEARNT: Final = 8
"""Replays of a recording that a rank learns from: one for each way in which what it reads may lie. Each takes as long
as two by the rules, and what was learnt has some hundred bytes for each operator."""

TENSOR_SEQUENCE_COMMANDS_MIN: Final = 8
"""A rank knows no shorter sequences of commands again: to know one costs as much as two commands."""

TENSOR_SEQUENCES_SEEN: Final = 65_536
"""Sequences of commands of a team that a rank remembers to have seen once, by a number each: some megabytes."""

TENSOR_SEQUENCES_KEPT: Final = 1_024
"""Sequences of commands of a team that a rank keeps because they came again; then it forgets all of them. A step of a
large model has some hundred, of ten to a hundred kilobytes each."""

TENSOR_LAYOUTS_LEARNT: Final = 64
"""Layouts of tensors for which a rank remembers how one operator with its arguments runs; then it forgets all of them.
A program has few of each, and what is remembered has some hundred bytes."""

TENSOR_OPERANDS_LEARNT: Final = 8
"""Tensors of an operator of which a rank remembers how it runs. Those on lists have more, and are few."""

TENSOR_SUMMED_BYTES: Final = 32 << 20
"""Of tensors in parts of sums that one collective adds up. The wait for the other ranks is paid once for all of them,
and is small beside the time to send as much; the collective copies them for a moment."""

TENSOR_STUCK_SECONDS_MAX: Final = 1.0
"""How often at least a rank that waits for an actor beside it looks whether that waits for an actor of the controller,
which may be waiting for the rank; it begins with SIGNAL_SECONDS, and each look costs as one for deadlocks."""

SAFETENSORS_HEADER_BYTES: Final = 100_000_000
"""The header of a file of safetensors has at most so many bytes: the bound of the format's own library."""

DATA_MIXED_ROWS: Final = 65_536
"""Rows of a stream of data that are mixed with each other where `mixed_rows=` is left out: some hundred megabytes of
sequences of a thousand numbers, and as many chunks of a file as are read for one batch to come from all over it."""

DATA_PREFETCH: Final = 2
"""Batches that a stream has ready where `prefetch=` is left out: one that is trained on next, one on its way."""

DATA_HELD_BATCHES_MAX: Final = 1_024
"""Pieces of batches that a loader keeps at most until the ranks have read them: far more than `prefetch=` asks for."""

DATA_TRIES: Final = 8
"""How often a batch is read as one loader after the other dies: more is no accident."""

DATA_RETRY_SECONDS: Final = 0.05
"""A loader that has died is asked again after so long: about what its restart takes."""

TENSOR_TRACE_EVENTS_MAX: Final = 1_000_000
"""Operators and collectives that a trace of a simulation, or of a profile, keeps: some 200 MB of file."""

TENSOR_PROFILE_EVENTS_MAX: Final = 200_000
"""Operations and collectives that a process keeps for a profile: a minute of a busy rank, and some 20 MB there."""
