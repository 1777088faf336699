"""A GPT, small: tied embeddings, rotary positions, causal attention, SwiGLU; and a training of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 32, 16, 4, 4, 8


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of elements by an angle that grows with the place."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class SwiGLU(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width) for _ in range(2))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


def dropout_of(share: float) -> nn.Module:
    return nn.Dropout(share) if share else nn.Identity()


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.dropout = dropout_of(dropout)
        self.attention, self.mlp = Attention(width), SwiGLU(width)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        out: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class GPT(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        layers: int = LAYERS,
        dropout: float = 0.0,
        *,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.dropout = dropout_of(dropout)
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(dropout, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        half = width // HEADS // 2
        angles = torch.arange(length)[:, None] * 100.0 ** -(torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, text: Tensor) -> Tensor:
        x = self.dropout(self.embed(text))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Stage(nn.Module):
    """Some blocks of a GPT; the first stage has the embeddings, too, the last one the head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, gpt: GPT, index: int, stages: int) -> None:
        super().__init__()
        each = len(gpt.blocks) // stages
        self.blocks = nn.ModuleList(list(gpt.blocks)[index * each : (index + 1) * each])
        self.embed = gpt.embed if index == 0 else None
        self.norm, self.head = (gpt.norm, gpt.head) if index == stages - 1 else (None, None)
        self.register_buffer("cos", gpt.cos.clone())
        self.register_buffer("sin", gpt.sin.clone())

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only."""
    matrices = [one for one in model.parameters() if one.ndim > 1]
    vectors = [one for one in model.parameters() if one.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3
    )


def trained(model: nn.Module, batches: list[tuple[Any, Any]], put: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Train, two batches for each step, and return the loss of each batch and the norm of each step's gradient."""
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    seen: list[Tensor] = []
    for number, (text, goal) in enumerate(batches):
        logits = model(put(text))
        loss: Any = nn.functional.cross_entropy(logits.flatten(0, 1), put(goal).flatten()) / 2
        loss.backward()
        seen.append(loss.detach())
        if number % 2:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return seen
