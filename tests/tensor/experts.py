"""A layer of experts, small, as plain torch: each token goes to one of them, as far as they have room."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """All experts: their dimension is the first one of everything here."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / width**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Take and return tokens: experts, groups, places, features."""
        hidden = nn.functional.silu(tokens.flatten(1, 2) @ self.up)
        return (hidden @ self.down).view(tokens.size())


class MixtureOfExperts(nn.Module):
    """Takes and returns groups of tokens: groups, tokens, features; what an expert has no room for stays as it is."""

    places: Tensor

    def __init__(self, count: int, width: int, room: int) -> None:
        super().__init__()
        self.count, self.room = count, room
        self.router = nn.Linear(width, count, bias=False)
        self.experts = Experts(count, width)
        self.register_buffer("places", torch.arange(room))

    def forward(self, tokens: Tensor) -> Tensor:
        groups, _, width = tokens.size()
        weight, chosen = self.router(tokens).softmax(-1).max(-1, keepdim=True)
        own = torch.zeros_like(self.router(tokens)).scatter(-1, chosen, 1.0)
        place = (own.cumsum(1) * own).sum(-1, keepdim=True) - 1
        sent = (own[..., None] * (place[..., None] == self.places)).flatten(2)  # groups, tokens, experts * places
        come = (sent.transpose(1, 2) @ tokens).view(groups, self.count, self.room, width).transpose(0, 1)
        made = self.experts(come).transpose(0, 1).reshape(groups, self.count * self.room, width)
        out: Tensor = tokens + weight * (sent @ made)
        return out
