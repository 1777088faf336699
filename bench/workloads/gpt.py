"""The GPT of the tests, larger, with an optimizer and a loss, for both sides of `gpt_step`."""

from __future__ import annotations

from typing import Any

import torch
from tests.tensor.gpt import GPT
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 256, 128, 64
ROWS = 16
"""Of one batch, over all ranks."""


def made() -> GPT:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, width=WIDTH, length=LENGTH)


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
