"""Pipeline schedules: the order in which stages compute micro-batches. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import nn

from trimesh.errors import ShapeError
from trimesh.tensor.parallel.explanation import Explanation
from trimesh.tensor.parallel.plan import ParallelPlan

Schedule = Literal["1f1b", "gpipe", "interleaved"]


@attrs.frozen
class Turn:
    """One pass of one micro-batch through one stage, forward or backward."""

    stage: int
    batch: int
    is_forward: bool


def turns_of_stage(schedule: Schedule, stage: int, stages: int, batches: int) -> Iterator[Turn]:
    """Yield the turns of one stage, in order.

    "gpipe": all forward passes, then all backward passes, the last one first. "1f1b": as many forward passes as there
    are stages after it, then forward and backward passes alternate. The stage then keeps activations of at most
    `stages - stage` forward passes, however many micro-batches there are.
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


def turns_of_ranks(schedule: Schedule, rank: int, ranks: int, stages: int, batches: int) -> Iterator[Turn]:
    """Yield the turns of the ranks at one index along the pipeline, in order.

    "interleaved": a rank has every stage with its index modulo `ranks`. Micro-batches go in groups as large as the
    number of ranks: a group passes the first stage of each rank, then the second, and returns in reverse order. Forward
    passes come first, as many as keep the last stage busy from then on; then forward and backward passes alternate.
    """
    if schedule != "interleaved":
        yield from turns_of_stage(schedule, rank, stages, batches)
        return
    groups = [range(first, min(first + ranks, batches)) for first in range(0, batches, ranks)]
    own = range(rank, stages, ranks)
    forward = [Turn(stage, batch, is_forward=True) for group in groups for stage in own for batch in group]
    backward = [Turn(stage, batch, is_forward=False) for group in groups for stage in reversed(own) for batch in group]
    ahead = min(2 * (ranks - rank - 1) + (len(own) - 1) * ranks, len(forward))
    yield from forward[:ahead]
    for turn, back in zip(forward[ahead:], backward, strict=False):
        yield turn
        yield back
    yield from backward[len(forward) - ahead :]


def issue_order(schedule: Schedule, stages: int, batches: int, ranks: int | None = None) -> list[Turn]:
    """Return the turns of all stages in an order that respects dependencies and the own order of each rank.

    Args:
        schedule: See `turns_of_ranks`.
        stages: Number of stages.
        batches: Number of micro-batches.
        ranks: Number of ranks along the pipeline; None for one for each stage.

    Raises:
        ValueError: There is no such order.
    """
    places = stages if ranks is None else ranks
    left = [list(turns_of_ranks(schedule, rank, places, stages, batches)) for rank in range(places)]
    done: set[Turn] = set()
    order: list[Turn] = []
    while any(left):
        ready = [turns for turns in left if turns and _is_ready(turns[0], done, stages)]
        if not ready:
            raise ValueError(
                f"{stages} interleaved stages on {places} ranks take micro-batches in groups of {places}, got "
                f"{batches}: choose a multiple"
            )
        for turns in ready:
            done.add(turns[0])
            order.append(turns.pop(0))
    return order


def idle_share(order: Sequence[Turn], stages: int, ranks: int) -> float:
    """Return the share of time that ranks wait (pipeline bubble).

    Assumes stages of equal time, backward passes twice as long as forward passes, and free communication.
    """
    free = [0] * ranks
    end: dict[Turn, int] = {}
    busy = 0
    for turn in order:
        place, took = turn.stage % ranks, 1 if turn.is_forward else 2
        before = _needed(turn, stages)
        end[turn] = free[place] = max(free[place], 0 if before is None else end[before]) + took
        busy += took
    return 1 - busy / (ranks * max(free))


def needs_one_place(order: Sequence[Turn], stages: int, ranks: int) -> bool:
    """Return whether an order completes if each rank keeps at most one copy for others and waits with the next.

    It then also completes if ranks keep more. Orders that would deadlock, as those of interleaved stages, must run
    without such waits; there the schedule bounds the number of copies.
    """
    own = [[turn for turn in order if turn.stage % ranks == rank] for rank in range(ranks)]
    sent: set[Turn] = set()
    unread: list[Turn | None] = [None] * ranks
    computed: set[Turn] = set()
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, turns in enumerate(own):
            while turns:
                turn = turns[0]
                before = _needed(turn, stages)
                if before is not None and before.stage != turn.stage and turn not in computed:
                    if before not in sent:
                        break
                    if unread[before.stage % ranks] == before:
                        unread[before.stage % ranks] = None
                computed.add(turn)
                reader = turn.stage + (1 if turn.is_forward else -1)
                if 0 <= reader < stages and reader % ranks != rank:
                    if unread[rank] is not None:
                        break
                    unread[rank] = turn
                sent.add(turn)
                turns.pop(0)
                is_moving = True
    return not any(own)


def _needed(turn: Turn, stages: int) -> Turn | None:
    """Return the turn that a turn depends on: of a neighbour stage, or the last stage's own forward pass."""
    if turn.is_forward:
        return Turn(turn.stage - 1, turn.batch, is_forward=True) if turn.stage else None
    if turn.stage == stages - 1:
        return Turn(turn.stage, turn.batch, is_forward=True)
    return Turn(turn.stage + 1, turn.batch, is_forward=False)


def _is_ready(turn: Turn, done: set[Turn], stages: int) -> bool:
    before = _needed(turn, stages)
    return before is None or before in done


def kept_most(turns: Sequence[Turn]) -> int:
    """Return the maximal number of forward passes whose activations a rank keeps at a time."""
    kept = most = 0
    for turn in turns:
        kept += 1 if turn.is_forward else -1
        most = max(most, kept)
    return most


# ---- stages ----------------------------------------------------------------------------------------------------------

# Explanation of a pipeline: idle time, kept activations, and bytes between stages.

Plans = ParallelPlan | Sequence[ParallelPlan | None] | None


@attrs.frozen
class PipelineExplanation:
    """Result of `Pipeline.explain`; `str` formats it as text.

    Attributes:
        stages: Explanation of each stage's plan. Counts for a pass are for one micro-batch.
        microbatches: Number of micro-batches in a step.
        kept: For each index along the pipeline, the maximal number of forward passes (one micro-batch through one
            stage) whose activations ranks keep for the backward pass.
        idle: Share of a step in which ranks wait; assumes stages of equal time, backward passes twice as long as
            forward passes, and free communication.
        crossing: For each stage but the last, bytes of whole activations that a step sends to the next stage; the
            gradients that return are as large. None without an example.
    """

    stages: tuple[Explanation, ...]
    microbatches: int
    kept: tuple[int, ...]
    idle: float
    crossing: tuple[int, ...] | None

    def __str__(self) -> str:
        """Format it in lines."""
        lines = [
            f"{len(self.stages)} stages on {len(self.kept)} places, {self.microbatches} micro-batches: ranks wait for "
            f"{self.idle:.1%} of a step, and keep {', '.join(map(str, self.kept))} forward passes at most"
        ]
        for number, stage in enumerate(self.stages):
            lines.append(f"stage {number}: a rank holds {stage.bytes_on_rank:,} bytes of {stage.bytes_whole:,}")
            for label, moved in stage.moved.items():
                lines.append(
                    f"  along {label!r}: {moved.gathered + moved.scattered + moved.activations:,} bytes sent for each "
                    f"micro-batch, {moved.reduced:,} for each step"
                )
            if self.crossing is not None and number < len(self.crossing):
                lines.append(f"  to stage {number + 1}: {self.crossing[number]:,} bytes a step, and as many back")
        if self.crossing is None:
            lines.append("bytes between stages are not counted")
        return "\n".join(lines)


def places_of(stages: int, extent: Mapping[str, int], label: str, schedule: Schedule) -> int:
    """Return the number of ranks along a pipeline.

    Raises:
        ShapeError: Its stages do not fit the mesh.
    """
    size = extent.get(label)
    if size is None or (stages % size if schedule == "interleaved" else stages != size):
        fits = "whose size divides that" if schedule == "interleaved" else "of that size"
        raise ShapeError(f"a pipeline of {stages} stages needs a dimension {label!r} {fits}, got {dict(extent)}")
    return size


def plans_of(plan: Plans, stages: int) -> list[ParallelPlan | None]:
    """Return the plan of each stage.

    Raises:
        ValueError: The number of plans differs from the number of stages.
    """
    plans = [plan] * stages if plan is None or isinstance(plan, ParallelPlan) else list(plan)
    if len(plans) != stages:
        raise ValueError(f"a pipeline takes one plan for all stages or one for each, got {len(plans)} for {stages}")
    return plans


def explained(
    stages: Sequence[nn.Module],
    extent: Mapping[str, int],
    label: str,
    *,
    microbatches: int,
    schedule: Schedule,
    plan: Plans,
    example: torch.Tensor | None,
) -> PipelineExplanation:
    """Explain a pipeline: see `Pipeline.explain`."""
    count = len(stages)
    places = places_of(count, extent, label, schedule)
    order = issue_order(schedule, count, microbatches, places)
    rest = {one: size for one, size in extent.items() if one != label}
    plans = plans_of(plan, count)
    found: list[Explanation] = []
    crossing: list[int] = []
    given: Any = None
    if example is not None:
        if len(example) % microbatches:
            raise ValueError(
                f"rows of the example must make {microbatches} equal micro-batches, got {len(example)} rows"
            )
        given = torch.empty_like(example[: len(example) // microbatches], device="meta")
    for number, (stage, own) in enumerate(zip(stages, plans, strict=True)):
        found.append((own or ParallelPlan()).explain(stage, rest, None if given is None else [given]))
        if given is not None:
            made = copy.deepcopy(stage).to("meta")(given)
            if number < count - 1:
                crossing.append(made.numel() * made.element_size() * microbatches)
            given = made.detach().requires_grad_()
    return PipelineExplanation(
        tuple(found),
        microbatches,
        tuple(kept_most([turn for turn in order if turn.stage % places == place]) for place in range(places)),
        idle_share(order, count, places),
        None if example is None else tuple(crossing),
    )
