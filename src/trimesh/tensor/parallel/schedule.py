"""In which order the stages of a pipeline compute: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

Schedule = Literal["1f1b", "gpipe"]


@attrs.frozen
class Turn:
    """A stage computes one micro-batch, forward or backward."""

    stage: int
    batch: int
    is_forward: bool


def turns_of_stage(schedule: Schedule, stage: int, stages: int, batches: int) -> Iterator[Turn]:
    """Yield what one stage does, in order.

    By "gpipe" all forward passes, then all backward passes, the last one first. By "1f1b" as many forward passes as
    there are stages after it, then a forward and a backward pass in turn: it keeps what at most `stages - stage`
    forward passes have left, however many micro-batches there are.
    """
    ahead = batches if schedule == "gpipe" else min(stages - stage - 1, batches)
    for batch in range(ahead):
        yield Turn(stage, batch, is_forward=True)
    for batch in range(ahead, batches):
        yield Turn(stage, batch, is_forward=True)
        yield Turn(stage, batch - ahead, is_forward=False)
    rest = range(batches - ahead, batches)
    for batch in reversed(rest) if schedule == "gpipe" else rest:
        yield Turn(stage, batch, is_forward=False)


def issue_order(schedule: Schedule, stages: int, batches: int) -> list[Turn]:
    """Return what all stages do, so that nothing comes before what it needs, and each stage keeps its own order."""
    left = [list(turns_of_stage(schedule, stage, stages, batches)) for stage in range(stages)]
    done: set[Turn] = set()
    order: list[Turn] = []
    while any(left):
        ready = [turns for turns in left if turns and _is_ready(turns[0], done, stages)]
        assert ready, "a schedule whose stages wait for each other"
        for turns in ready:
            done.add(turns[0])
            order.append(turns.pop(0))
    return order


def _is_ready(turn: Turn, done: set[Turn], stages: int) -> bool:
    if turn.is_forward:
        return turn.stage == 0 or Turn(turn.stage - 1, turn.batch, is_forward=True) in done
    if turn.stage == stages - 1:
        return Turn(turn.stage, turn.batch, is_forward=True) in done
    return Turn(turn.stage + 1, turn.batch, is_forward=False) in done


def kept_most(turns: Sequence[Turn]) -> int:
    """Return of how many forward passes one stage keeps what they have left, at most."""
    kept = most = 0
    for turn in turns:
        kept += 1 if turn.is_forward else -1
        most = max(most, kept)
    return most
