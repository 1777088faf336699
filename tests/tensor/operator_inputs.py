"""Inputs for the table of operators: the same numbers as local tensors and as mesh tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch


def values() -> dict[str, torch.Tensor]:
    """Return all inputs by name; the same ones each time."""
    made = torch.Generator().manual_seed(7)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=made)

    def whole(high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, generator=made)

    square = normal(5, 5)
    return {
        "a": normal(4, 5),
        "b": normal(4, 5),
        "c": normal(4, 5),
        "row": normal(5),
        "other_row": normal(5),
        "column": normal(4, 1),
        "scalar": normal(1).squeeze(),
        "positive": torch.rand(4, 5, generator=made) + 0.5,
        "inside": torch.rand(4, 5, generator=made) * 1.6 - 0.8,  # between -1 and 1, not at the ends
        "share": torch.rand(4, 5, generator=made) * 0.8 + 0.1,  # between 0 and 1, not at the ends
        "long": normal(5, 3),
        "square": square,
        "definite": square @ square.T + 5 * torch.eye(5),
        "batch": normal(2, 3, 4),
        "batch2": normal(2, 4, 5),
        "image": normal(2, 4, 8, 8),
        "volume": normal(1, 2, 4, 4, 4),
        "signal": normal(2, 4, 10),
        "filters1": normal(6, 4, 3),
        "filters": normal(6, 4, 3, 3),
        "filters3": normal(3, 2, 2, 2, 2),
        "up_filters": normal(4, 3, 2, 2),
        "bias6": normal(6),
        "channel": normal(4),
        "query": normal(2, 2, 6, 8),
        "key": normal(2, 2, 6, 8),
        "value": normal(2, 2, 6, 8),
        "table": normal(11, 6),
        "logits": normal(6, 5),
        "complex": torch.complex(normal(4, 5), normal(4, 5)),
        "mask": torch.rand(4, 5, generator=made) > 0.5,
        "other_mask": torch.rand(4, 5, generator=made) > 0.5,
        "whole": whole(9, 4, 5) + 1,
        "other_whole": whole(4, 4, 5) + 1,
        "places": whole(5, 4, 5),
        "rows": torch.tensor([0, 2, 3]),
        "words": whole(11, 3, 4),
        "classes": whole(5, 6),
        "bytes": whole(255, 4, 5).to(torch.uint8),
    }


class Inputs:
    """The inputs of one case: each made when it is asked for first, as a leaf where it can have a gradient."""

    def __init__(self, put: Callable[[torch.Tensor], torch.Tensor], found: dict[str, torch.Tensor]) -> None:
        self._put = put
        self._found = found
        self.used: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> torch.Tensor:
        tensor = self._put(self._found[name])
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.requires_grad_()
        self.used.append(tensor)
        setattr(self, name, tensor)
        return tensor
