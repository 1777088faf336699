"""A GPT of four layers in plain torch, its optimizer and its loss, for both sides of `gpt_step`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 256, 128, 4, 4, 64
ROWS = 16
"""Of one batch, over all ranks."""


class Block(nn.Module):
    """Causal attention with rotary positions, and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what follows for each place."""
        normed = self.norm1(x)
        q, k, v = (one(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        out: Tensor = x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class GPT(nn.Module):
    """With tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        half = WIDTH // HEADS // 2
        angles = torch.arange(LENGTH)[:, None] * 100.0 ** -(torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each place."""
        x = self.embed(text)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def made() -> GPT:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    return GPT()


def batch() -> tuple[Tensor, Tensor]:
    """Return a text and what follows in it, for all ranks."""
    text = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Training:
    """A model and its optimizer.

    Args:
        model: The GPT, or what stands for it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, fused=True
        )  # counts its steps in tensors: it can be recorded

    def step(self, text: Any, goal: Any) -> Any:
        """Train by one batch; return the loss."""
        loss = nn.functional.cross_entropy(self.model(text).flatten(0, 1), goal.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
