"""The modules of a random training, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from tests.tensor.experts import MixtureOfExperts
from tests.tensor.trainings.training import Training
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY: Final = 7
HEADS: Final = 2


class Attention(nn.Module):
    """Causal, or with a mask of its own: of each row and the one before it."""

    mask: Tensor | None

    def __init__(self, width: int, *, is_causal: bool = False, length: int = 0) -> None:
        super().__init__()
        self.is_causal = is_causal
        places = torch.arange(length)
        apart = places[:, None] - places
        self.register_buffer("mask", (apart >= 0) & (apart < 2) if length else None)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.is_causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, width: int, *, is_gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, 2 * width) if is_gated else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = nn.functional.gelu(hidden) if self.gate is None else nn.functional.silu(self.gate(x)) * hidden
        out: Tensor = self.down(hidden)
        return out


class OfRows(nn.Module):
    """A module of torch that takes something else than batch, sequence, features."""

    def __init__(self, inner: nn.Module, *, is_flat: bool) -> None:
        super().__init__()
        self.inner, self.is_flat = inner, is_flat

    def forward(self, x: Tensor) -> Tensor:
        if self.is_flat:
            flat: Tensor = self.inner(x.flatten(0, 1))
            return flat.view(x.size())
        channels: Tensor = self.inner(x.transpose(1, 2))
        return channels.transpose(1, 2)


class Twice(nn.Module):
    """One module that runs twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.inner(x).tanh())
        return out


class Scale(nn.Module):
    """Parameters of odd shapes, one of no dimension, one without use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.by, self.of_all = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by + self.of_all


class Around(nn.Module):
    """A part with what is around it."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind
        if kind == "frozen":
            inner.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "residual":
            return x + self.inner(x)
        made: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.kind == "checkpointed" else self.inner(x)
        return made


def part_of(name: str, width: int, length: int) -> nn.Module:
    """Return the module of a part."""
    for kind in ("residual", "checkpointed", "frozen"):
        if name.startswith(kind + " "):
            return Around(part_of(name.removeprefix(kind + " "), width, length), kind)
    if name == "experts":
        return MixtureOfExperts(4, width, room=max(1, length // 2))
    if name == "masked attention":
        return Attention(width, length=length)
    return _PARTS[name](width)


_PARTS: Final[dict[str, Callable[[int], nn.Module]]] = {
    "linear": lambda width: nn.Linear(width, width),
    "linear no bias": lambda width: nn.Linear(width, width, bias=False),
    "mlp": lambda width: MLP(width, is_gated=False),
    "swiglu": lambda width: MLP(width, is_gated=True),
    "attention": Attention,
    "causal attention": lambda width: Attention(width, is_causal=True),
    "layer norm": nn.LayerNorm,
    "rms norm": nn.RMSNorm,
    "dropout": lambda _: nn.Dropout(0.3),
    "convolution": lambda width: OfRows(nn.Conv1d(width, width, 3, padding=1), is_flat=False),
    "batch norm": lambda width: OfRows(nn.BatchNorm1d(width), is_flat=True),
    "group norm": lambda width: OfRows(nn.GroupNorm(2, width), is_flat=False),
    "weight norm": lambda width: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
    "twice": Twice,
    "scale": Scale,
}


class Model(nn.Module):
    """Parts by number, some of them, so that a stage has the names of the whole."""

    def __init__(self, training: Training, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


class Head(nn.Linear):
    """Classes of each place."""


def made(training: Training) -> Model:
    """Return the model of a training, the same each time."""
    torch.manual_seed(training.seed)
    parts: dict[str, nn.Module] = {}
    if training.takes_text:
        parts["embed"] = nn.Embedding(VOCABULARY, training.width)
    for number, name in enumerate(training.parts):
        parts[str(number)] = part_of(name, training.width, training.length)
    if training.has_classes:
        parts["head"] = Head(training.width, VOCABULARY, bias=not training.is_tied)
    if training.is_tied:
        embed: Any = parts["embed"]
        parts["head"].weight = embed.weight
    model: Model = Model(training, parts).double()
    return model


def stages_of(training: Training, model: Model, stages: int) -> list[nn.Module]:
    """Return a model in stages, which have its modules."""
    each = len(training.parts) // stages
    found: list[dict[str, nn.Module]] = [{} for _ in range(stages)]
    for name, part in model.parts.items():
        index = 0 if name == "embed" else stages - 1 if name == "head" else min(int(name) // each, stages - 1)
        found[index][name] = part
    return [Model(training, one) for one in found]


def loss_of(training: Training, made: Tensor, goal: Tensor) -> Tensor:
    """Return the loss of what a model has made."""
    return _LOSSES[training.loss](made, goal)


def _of_classes(made: Tensor, goal: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(made.flatten(0, 1), goal.flatten(), **options)


_LOSSES: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "mse": nn.functional.mse_loss,
    "mse sum": lambda made, goal: nn.functional.mse_loss(made, goal, reduction="sum") / 8,
    "l1": nn.functional.l1_loss,
    "huber": nn.functional.smooth_l1_loss,
    "squares": lambda made, goal: (made - goal).square().sum((1, 2)).mean() / 4,
    "cross entropy": _of_classes,
    "smoothed": partial(_of_classes, label_smoothing=0.1),
    "some ignored": partial(_of_classes, ignore_index=1),
    "of rows": lambda made, goal: nn.functional.cross_entropy(made.transpose(1, 2), goal),
}


def batch_of(training: Training, step: int, passed: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and the goal of a pass."""
    generator = torch.Generator().manual_seed(training.seed * 1009 + step * 17 + passed)
    size = (training.batch, training.length)

    def numbers() -> Tensor:
        return torch.randn(*size, training.width, generator=generator, dtype=torch.float64)

    def classes() -> Tensor:
        return torch.randint(0, VOCABULARY, size, generator=generator)

    return classes() if training.takes_text else numbers(), classes() if training.has_classes else numbers()
