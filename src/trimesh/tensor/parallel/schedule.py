"""In which order the stages of a pipeline compute: pure."""

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


def turns_of_ranks(schedule: Schedule, rank: int, ranks: int, stages: int, batches: int) -> Iterator[Turn]:
    """Yield what the ranks of one place along the pipeline do, in order.

    By "interleaved" they have every stage whose number is theirs modulo `ranks`. Micro-batches go in groups of as many
    as there are ranks: a group goes through the first stage of each, then through the second, and back in the other
    order. Before the first backward pass as many forward passes are done as keep the last stage busy from then on; then
    it is a forward and a backward pass in turn.
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
    """Return what all stages do, so that nothing comes before what it needs, and ranks keep their own order.

    Args:
        schedule: See `turns_of_ranks`.
        stages: How many.
        batches: How many micro-batches.
        ranks: How many places the pipeline has; None for one a stage.

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
    """Return which share of the time the ranks wait, if stages take equally long, and backward passes twice as long.

    Sending takes no time.
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
    """Return whether an order goes on where each rank keeps one copy for others at most, and waits with the next.

    It then goes on wherever ranks keep more. Where one would wait for ever, as interleaved stages do, ranks must not
    wait at all: the schedule bounds what they keep.
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
    """Return the turn of another stage that comes before; of the last stage its own forward pass."""
    if turn.is_forward:
        return Turn(turn.stage - 1, turn.batch, is_forward=True) if turn.stage else None
    if turn.stage == stages - 1:
        return Turn(turn.stage, turn.batch, is_forward=True)
    return Turn(turn.stage + 1, turn.batch, is_forward=False)


def _is_ready(turn: Turn, done: set[Turn], stages: int) -> bool:
    before = _needed(turn, stages)
    return before is None or before in done


def kept_most(turns: Sequence[Turn]) -> int:
    """Return of how many forward passes ranks keep what they have left, at most."""
    kept = most = 0
    for turn in turns:
        kept += 1 if turn.is_forward else -1
        most = max(most, kept)
    return most


# ---- stages ----------------------------------------------------------------------------------------------------------

# What a pipeline does: which share of the time its ranks wait, what they keep, what stages send each other.

Plans = ParallelPlan | Sequence[ParallelPlan | None] | None


@attrs.frozen
class PipelineExplanation:
    """What `Pipeline.explain` has found; `str` makes a text of it.

    Attributes:
        stages: Of each the explanation of its plan. What it counts for a pass is for one micro-batch.
        microbatches: How many a step has.
        kept: By place along the pipeline: of how many forward passes, each of one micro-batch through one stage, the
            ranks keep what the backward passes need, at most.
        idle: The share of a step in which ranks wait, if all stages take equally long, backward passes twice as long as
            forward passes, and sending no time.
        crossing: By stage but the last: bytes of activations, whole, that all micro-batches of a step bring to the next
            one; as many gradients come back. None without an example.
    """

    stages: tuple[Explanation, ...]
    microbatches: int
    kept: tuple[int, ...]
    idle: float
    crossing: tuple[int, ...] | None

    def __str__(self) -> str:
        """Say it in lines."""
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
            lines.append("what stages send each other is not counted")
        return "\n".join(lines)


def places_of(stages: int, extent: Mapping[str, int], label: str, schedule: Schedule) -> int:
    """Return how many places a pipeline has.

    Raises:
        ShapeError: Its stages do not fit the mesh.
    """
    size = extent.get(label)
    if size is None or (stages % size if schedule == "interleaved" else stages != size):
        fits = "that divides that" if schedule == "interleaved" else "of that size"
        raise ShapeError(f"a pipeline of {stages} stages needs a dimension {label!r} {fits}, got {dict(extent)}")
    return size


def plans_of(plan: Plans, stages: int) -> list[ParallelPlan | None]:
    """Return the plan of each stage.

    Raises:
        ValueError: There are not as many.
    """
    plans = [plan] * stages if plan is None or isinstance(plan, ParallelPlan) else list(plan)
    if len(plans) != stages:
        raise ValueError(f"a pipeline takes a plan for all stages or one for each, got {len(plans)} for {stages}")
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
            raise ValueError(f"{len(example)} rows cannot be cut into {microbatches} equal micro-batches")
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
