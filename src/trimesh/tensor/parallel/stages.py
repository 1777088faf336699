"""What a pipeline does: which share of the time its ranks wait, what they keep, what stages send each other."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from trimesh.errors import ShapeError
from trimesh.tensor.parallel.explanation import Explanation
from trimesh.tensor.parallel.plan import ParallelPlan
from trimesh.tensor.parallel.schedule import Schedule, idle_share, issue_order, kept_most

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
