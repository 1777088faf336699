"""`Pipeline`: a model in stages, each on a part of the mesh, trained by micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch
from torch import nn

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import MeshError
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.ops.global_tensor import distribute
from trimesh.tensor.ops.modules import module_to_mesh
from trimesh.tensor.ops.movement import send_to_mesh, tensor_to_mesh
from trimesh.tensor.parallel.schedule import (
    PipelineExplanation,
    Plans,
    Schedule,
    explained,
    issue_order,
    needs_one_place,
    places_of,
    plans_of,
)
from trimesh.tensor.protocol.placement import Cut

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


Batch = torch.Tensor | Sequence[torch.Tensor]
"""Rows to be cut into micro-batches, or the micro-batches."""

_Coming = Callable[[], torch.Tensor]
"""Receives, on the ranks of a stage, a tensor that was sent to them."""


@attrs.define(eq=False)
class _Passed:
    """Tensors kept from the forward pass of one micro-batch at one stage, for its backward pass."""

    given: torch.Tensor
    made: torch.Tensor


@attrs.frozen
class _Shared:
    """A parameter shared by several stages: a copy on each of their meshes, all with the same gradient.

    Attributes:
        copies: Copies by number of the stage, in order.
    """

    copies: dict[int, nn.Parameter]


class Pipeline:
    """A model whose stages are on different ranks; a step runs several micro-batches through it.

    Stage `i` is moved onto `mesh.slice(**{label: i})`, in place. With the interleaved schedule there are several times
    as many stages as ranks along `label`, and the slice is `i` modulo their number. Stages compute at the same time, on
    different micro-batches: each rank executes its commands in the order of the schedule, sends results as soon as they
    exist, and waits only for tensors from other stages. A parameter shared by several stages, such as tied embeddings,
    has a copy on each, with the same gradient, so that optimizers keep the copies equal.

    Args:
        stages: Modules; each takes the tensor that the previous stage returned, and returns one.
        mesh: The processes.
        label: Dimension of the mesh for the stages. Its size is the number of stages; interleaved, it divides that.
        microbatches: Number of equal parts that a batch is cut into, by rows.
        schedule: "1f1b": a stage keeps activations of at most as many micro-batches as there are stages; "gpipe": of
            all. "interleaved": ranks have several stages, wait less, and keep more; see `explain`.
        plan: Plan of all stages, or one for each, on the remaining dimensions of the mesh.
        inputs: Placements of the first dimensions of inputs and goals on a stage; other dimensions are not cut.

    Attributes:
        stages: The modules. Make an optimizer for each: `[AdamW(one.parameters()) for one in pipeline.stages]`.
        meshes: The mesh of each stage.
        waits: Whether ranks wait while too much that they have sent is unread: see `needs_one_place`.

    Raises:
        ShapeError: The number of stages does not fit the dimension, or see `module_to_mesh`.
        ValueError: The interleaved schedule has no order for this number of micro-batches.
        RuntimeError: See `ProcMesh.activate`.

    Example:
        >>> pipeline = trimesh.tensor.Pipeline([first, second], procs, "pp", microbatches=4)
        >>> loss = pipeline.step(text, goal, cross_entropy)
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: ProcMesh,
        label: str,
        *,
        microbatches: int,
        schedule: Schedule = "1f1b",
        plan: Plans = None,
        inputs: Sequence[Cut] = (),
    ) -> None:
        places = places_of(len(stages), mesh.extent, label, schedule)
        if microbatches < 1:
            raise ValueError(f"a batch must be cut into at least one micro-batch, got {microbatches}")
        self._order = issue_order(schedule, len(stages), microbatches, places)
        self.waits = needs_one_place(self._order, len(stages), places)
        self._count, self._inputs = microbatches, list(inputs)
        named = [dict(stage.named_parameters()) for stage in stages]
        plans = plans_of(plan, len(stages))
        views = [mesh.slice(**{label: place}) for place in range(places)]
        self.meshes = [views[index % places] for index in range(len(stages))]
        placed = zip(stages, self.meshes, plans, strict=True)
        self.stages = [module_to_mesh(stage, view, own) for stage, view, own in placed]
        self._shared = _shared(named, self.stages)

    @staticmethod
    def explain(
        stages: Sequence[nn.Module],
        mesh: ProcMesh | Mapping[str, int],
        label: str,
        *,
        microbatches: int,
        schedule: Schedule = "1f1b",
        plan: Plans = None,
        example: torch.Tensor | None = None,
    ) -> PipelineExplanation:
        """Return idle time, memory and traffic of a pipeline, before its stages are moved.

        Args:
            stages: See `Pipeline`, also for the other arguments; only sizes of their tensors are used.
            mesh: The processes, or sizes of dimensions, for which no processes are needed.
            label: Dimension of the stages.
            microbatches: Number of parts that a batch is cut into.
            schedule: The schedule.
            plan: Plan of all stages, or one for each.
            example: A batch, to count traffic between stages and exchanges of activations.

        Returns:
            The explanation; `str` formats it as text.

        Raises:
            ShapeError, ValueError: As for the pipeline.

        Blocking: no checkpoint.

        Example:
            >>> print(Pipeline.explain(stages, {"pp": 4}, "pp", microbatches=8, schedule="interleaved"))
        """
        extent = dict(mesh if isinstance(mesh, Mapping) else mesh.extent)
        return explained(
            stages, extent, label, microbatches=microbatches, schedule=schedule, plan=plan, example=example
        )

    def step(self, batch: Batch, goal: Batch, loss: Loss) -> torch.Tensor:
        """Run the forward and the backward pass of a batch; gradients accumulate in the parameters.

        Args:
            batch: Input of the first stage: a tensor of this process, or its micro-batches on the first stage's mesh,
                as `put` returns them. Under `trimesh.compile`, pass micro-batches as arguments of the function.
            goal: The same for the last stage, as an argument of `loss`.
            loss: Takes the output of the last stage and the goal, and returns the mean over rows.

        Returns:
            The loss of the batch, a number on the mesh of the last stage, detached.

        Raises:
            ValueError: The rows cannot be cut into equal micro-batches, or their number is wrong.
            TypeError: Micro-batches with a whole batch of goals, or the other way round.

        Blocking: no checkpoint, and no wait.
        """
        step = _Step(self, *self._cut(batch, goal), loss)
        try:
            for turn in self._order:
                if turn.is_forward:
                    step.forward(turn.stage, turn.batch)
                else:
                    step.backward(turn.stage, turn.batch)
        except BaseException:
            step.abandon()
            raise
        self._add_shared(step.before)
        return torch.stack(step.losses).sum()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all stages so that their norm, as of one vector, is at most `max_norm`.

        A shared parameter counts once, as in `torch.nn.utils.clip_grad_norm_` of the whole model.

        Returns:
            The norm before, a number on the mesh of the last stage.

        Blocking: no checkpoint.
        """
        last = self.meshes[-1]
        again = {id(copy) for one in self._shared for stage, copy in one.copies.items() if stage != min(one.copies)}
        norms: list[Any] = []
        for stage in self.stages:
            grads = [one.grad for one in stage.parameters() if one.grad is not None and id(one) not in again]
            if grads:
                norms.append(_at(torch.nn.utils.get_total_norm(grads), last))
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for stage, mesh in zip(self.stages, self.meshes, strict=True):
            own = _at(factor, mesh)
            for parameter in stage.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(own)
        return total

    def _cut(self, batch: Batch, goal: Batch) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        count = self._count
        if not isinstance(batch, torch.Tensor) and not isinstance(goal, torch.Tensor):
            if not len(batch) == len(goal) == count:
                raise ValueError(
                    f"a step takes {count} micro-batches and as many goals, got {len(batch)} and {len(goal)}"
                )
            return batch, goal
        if not isinstance(batch, torch.Tensor) or not isinstance(goal, torch.Tensor):
            raise TypeError("a step takes a batch and its goals, or micro-batches and theirs, got one of each")
        if len(batch) % count or len(goal) != len(batch):
            raise ValueError(f"rows must make {count} equal micro-batches, got {len(batch)} rows and {len(goal)} goals")
        return batch.chunk(count), goal.chunk(count)

    def put(self, stage: int, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor of this process onto the mesh of a stage, cut as inputs are; return a mesh tensor unchanged."""
        if isinstance(tensor, MeshTensor):
            return tensor
        cuts = [*self._inputs, *[None] * tensor.ndim][: tensor.ndim]
        return distribute(tensor, self.meshes[stage], cuts)

    def _add_shared(self, before: dict[int, torch.Tensor | None]) -> None:
        """Give all copies of a shared parameter the sum of their gradients from this step."""
        for one in self._shared:
            found: list[Any] = []
            for parameter in one.copies.values():
                grad, kept = parameter.grad, before[id(parameter)]
                if grad is not None:
                    found.append(grad if kept is None else grad - kept)
            if not found:
                continue
            first, *_ = one.copies
            total = torch.stack([_at(grad, self.meshes[first]) for grad in found]).sum(0)
            for stage, parameter in one.copies.items():
                kept, own = before[id(parameter)], _at(total, self.meshes[stage])
                parameter.grad = own if kept is None else kept + own

    def grads_before(self) -> dict[int, torch.Tensor | None]:
        """Return the gradients of shared parameters from earlier steps; those of copies are equal."""
        return {
            id(copy): None if copy.grad is None else copy.grad.clone()
            for one in self._shared
            for copy in one.copies.values()
        }


class _Step:
    """The execution of one batch."""

    def __init__(
        self, pipeline: Pipeline, batches: Sequence[torch.Tensor], goals: Sequence[torch.Tensor], loss: Loss
    ) -> None:
        self._pipeline, self._batches, self._goals, self._loss = pipeline, batches, goals, loss
        self._last = len(pipeline.stages) - 1
        self._passed: dict[tuple[int, int], _Passed] = {}
        self._coming: dict[tuple[int, int, bool], _Coming] = {}
        self.losses: list[torch.Tensor] = []
        self.before = pipeline.grads_before()

    def forward(self, stage: int, batch: int) -> None:
        """Run one micro-batch through one stage, and send the output to the next."""
        pipeline = self._pipeline
        if stage == 0:
            given = pipeline.put(0, self._batches[batch])
        else:
            given = self._coming.pop((stage, batch, True))().requires_grad_()
        made = pipeline.stages[stage](given)
        if stage == self._last:
            made = self._loss(made, pipeline.put(stage, self._goals[batch])) / len(self._batches)
            self.losses.append(made.detach())
        else:
            self._send(made, stage + 1, batch, is_forward=True)
        self._passed[stage, batch] = _Passed(given, made)

    def backward(self, stage: int, batch: int) -> None:
        """Run the backward pass of one micro-batch at one stage, and send the gradient to the previous one."""
        passed = self._passed.pop((stage, batch))
        grad = None if stage == self._last else self._coming.pop((stage, batch, False))()
        torch.autograd.backward(passed.made, grad)
        if stage > 0:
            assert passed.given.grad is not None
            self._send(passed.given.grad, stage - 1, batch, is_forward=False)

    def abandon(self) -> None:
        """Receive all tensors still in transit, so that their senders can free them."""
        for receive in self._coming.values():
            with suppress(MeshError):  # ended processes keep nothing
                receive()

    def _send(self, tensor: torch.Tensor, stage: int, batch: int, *, is_forward: bool) -> None:
        """Send a tensor to a stage now, before the sending ranks compute anything else."""
        pipeline = self._pipeline
        self._coming[stage, batch, is_forward] = send_to_mesh(tensor, pipeline.meshes[stage], waits=pipeline.waits)


def _at(tensor: Any, mesh: ProcMesh) -> torch.Tensor:
    moved: torch.Tensor = tensor_to_mesh(tensor, mesh)
    return moved


def _shared(named: Sequence[dict[str, nn.Parameter]], stages: Sequence[nn.Module]) -> list[_Shared]:
    """Return the parameters that several stages had before they were moved."""
    places: dict[int, dict[int, str]] = {}
    for index, parameters in enumerate(named):
        for name, parameter in parameters.items():
            places.setdefault(id(parameter), {}).setdefault(index, name)
    return [
        _Shared({index: stages[index].get_parameter(name) for index, name in where.items()})
        for where in places.values()
        if len(where) > 1
    ]
