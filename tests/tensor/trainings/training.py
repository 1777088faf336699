"""A random training as data: model, optimizer, and the meshes and plans that it runs under one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import msgspec
import msgspec.structs

PARTS: Final = (
    "linear", "linear no bias", "mlp", "mlp", "swiglu", "attention", "causal attention",
    "masked attention", "layer norm",
    "rms norm", "dropout", "experts", "convolution", "batch norm", "group norm", "weight norm", "twice", "scale",
)  # fmt: skip
AROUND: Final = ("", "", "residual ", "residual ", "residual ", "checkpointed ", "frozen ")
LOSSES: Final = ("mse", "mse sum", "l1", "huber", "squares", "cross entropy", "smoothed", "some ignored", "of rows")
OF_CLASSES: Final = ("cross entropy", "smoothed", "some ignored", "of rows")
OPTIMIZERS: Final = (
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.02, "momentum": 0.5, "foreach": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "foreach": True}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.05}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    ("Adadelta", {"lr": 0.5}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("ASGD", {"lr": 0.02}),
    ("Adafactor", {"lr": 0.02}),
)
EVENTS: Final = ("evaluate", "fail", "write", "write data", "reload", "skip", "keep zeros", "ask", "look")
MESHES: Final = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2})
OF_BATCH: Final = ("data", "sharded", "optimizer", "gradients", "experts")
CUT_LINEAR: Final = ("mlp", "swiglu", "attention")
"""Ends of parts that plans of columns and rows fit."""
PLACES: Final = 2
"""Of a pipeline; with more stages these are interleaved."""


class Step(msgspec.Struct, frozen=True):
    """One step: gradients of some passes, then something besides."""

    passes: int
    event: str


class Phase(msgspec.Struct, frozen=True):
    """Some steps on one mesh; what comes next goes on from a checkpoint.

    Attributes:
        kinds: By label of the mesh, of what is left beside stages.
        extent: Of that.
        stages: How many, along "pp"; 0 for no pipeline.
        schedule: Of the pipeline.
    """

    extent: dict[str, int]
    kinds: dict[str, str]
    stages: int
    schedule: str
    steps: tuple[Step, ...]

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of all dimensions."""
        return {"pp": PLACES, **self.extent} if self.stages else self.extent

    @property
    def batch_labels(self) -> tuple[str, ...]:
        """Labels that batches are cut along."""
        return tuple(label for label, kind in self.kinds.items() if kind in OF_BATCH)

    @property
    def placements(self) -> list[tuple[str, ...] | None]:
        """How batches lie: their first two dimensions."""
        context = tuple(label for label, kind in self.kinds.items() if kind == "context")
        return [self.batch_labels or None, context or None]


class Training(msgspec.Struct, frozen=True):
    """All of it; the same each time for a seed."""

    seed: int
    batch: int
    length: int
    width: int
    takes_text: bool
    is_tied: bool
    parts: tuple[str, ...]
    loss: str
    optimizer: int
    has_groups: bool
    has_schedule: bool
    has_average: bool
    clip: float
    microbatches: int
    phases: tuple[Phase, ...]

    @property
    def has_classes(self) -> bool:
        """Whether the goal is a class for each place."""
        return self.loss in OF_CLASSES

    def text(self) -> str:
        """Return it in words."""
        name, options = OPTIMIZERS[self.optimizer]
        lines = [
            f"seed {self.seed}: {'text, ' if self.takes_text else ''}{', '.join(self.parts)}"
            f"{', tied head' if self.is_tied else ''}; {self.loss}; {name} {options}; batch {self.batch}"
            f" x {self.length} x {self.width}; clip {self.clip}, groups {self.has_groups}, schedule"
            f" {self.has_schedule}, average {self.has_average}"
        ]
        for phase in self.phases:
            steps = ", ".join(f"{one.passes} {one.event}".strip() for one in phase.steps)
            order = f" by {phase.schedule}, {self.microbatches} micro-batches" if phase.stages else ""
            lines.append(f"  on {phase.mesh}{order}: {phase.kinds}; steps: {steps}")
        return "\n".join(lines)


def generate(seed: int) -> Training:
    """Return the training of a seed."""
    draw = random.Random(seed)
    stages = draw.choice([0, 0, 0, 0, 0, 2, 2, 4])
    parts = [_part(draw, staged=bool(stages)) for _ in range(draw.randint(max(1, stages), 5))]
    if not stages and not any(one.endswith(CUT_LINEAR) for one in parts):
        parts[draw.randrange(len(parts))] = "residual " + draw.choice(CUT_LINEAR)
    each = len(parts) // max(1, stages)
    for first in range(0, each * stages, max(1, each)):
        if not any(_learns(one) for one in parts[first : first + each]):
            parts[first] = "residual mlp"  # a stage has something to train
    microbatches = draw.choice([1, 2, 3]) if stages else 1
    batch = microbatches * draw.choice([2, 4]) if stages else draw.choice([1, 3, 4, 6, 8])
    if any(one.endswith("batch norm") for one in parts):
        batch = max(2, batch)  # torch refuses to train on one row
    takes_text = draw.random() < 0.5
    losses = [one for one in LOSSES if not (stages and one in {"mse sum", "squares", "some ignored"})]
    loss = draw.choice(losses)
    phases = tuple(_phase(draw, parts, stages) for _ in range(draw.choice([1, 1, 2])))
    if phases[0].steps[-1].event == "skip":  # gradients are not in a checkpoint
        steps = (*phases[0].steps[:-1], Step(1, ""))
        phases = (msgspec.structs.replace(phases[0], steps=steps), *phases[1:])
    return Training(
        seed=seed,
        batch=batch,
        length=draw.choice([1, 3, 4, 6]),
        width=draw.choice([4, 6, 8]),
        takes_text=takes_text,
        is_tied=takes_text and loss in OF_CLASSES and draw.random() < 0.5,
        parts=tuple(parts),
        loss=loss,
        optimizer=draw.randrange(len(OPTIMIZERS)),
        has_groups=draw.random() < 0.4,
        has_schedule=draw.random() < 0.4,
        has_average=draw.random() < 0.3,
        clip=draw.choice([0.0, 0.1, 1.0]),
        microbatches=microbatches,
        phases=phases,
    )


def _part(draw: random.Random, *, staged: bool) -> str:
    of_the_whole_batch = ("dropout", "batch norm")  # these see one micro-batch at a time in a pipeline
    kinds = [one for one in PARTS if not (staged and one in of_the_whole_batch)]
    around = [one for one in AROUND if not (staged and one == "frozen ")]
    return draw.choice(around) + draw.choice(kinds)


def _learns(part: str) -> bool:
    return not part.startswith("frozen ") and not part.endswith("dropout")


def _phase(draw: random.Random, parts: Sequence[str], stages: int) -> Phase:
    extent = {"a": draw.choice([1, 2])} if stages else dict(draw.choice(MESHES))
    kinds: list[str] = ["whole", "data", "data", "sharded", "sharded", "optimizer", "optimizer", "gradients"]
    kinds += ["context"] * (4 if any("attention" in one for one in parts) else 1)
    if not stages:
        if any(one.endswith(CUT_LINEAR) for one in parts):
            kinds += ["tensor", "tensor", "tensor", "sequence", "sequence"]
        if any(one.endswith("experts") for one in parts):
            kinds += ["experts"] * 4
    chosen: dict[str, str] = {}
    for label in extent:
        left = [one for one in kinds if one not in chosen.values() and not _both(one, chosen)]
        chosen[label] = draw.choice(left)
    steps = tuple(
        Step(draw.choice([1, 1, 2, 3]), draw.choice(EVENTS) if draw.random() < 0.5 else "")
        for _ in range(draw.randint(1, 3))
    )
    return Phase(extent, chosen, stages, draw.choice(["1f1b", "gpipe"] if stages == PLACES else ["interleaved"]), steps)


def _both(kind: str, chosen: dict[str, str]) -> bool:
    """Whether a plan of the same layers is there along another label."""
    return kind in {"tensor", "sequence"} and bool({"tensor", "sequence"} & set(chosen.values()))
