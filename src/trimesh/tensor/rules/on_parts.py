"""`OnParts`: code that computes with global tensors, as torch's decompositions do, runs by the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Operators(Protocol):
    """What an operator that is taken into others asks of the engine that runs it."""

    def run(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        ...

    def by_table(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator that is composed of others as it is."""
        ...

    def settle(self, *values: DTensor) -> None:
        """Add up what is in parts."""
        ...

    def whole(self, value: DTensor) -> torch.Tensor:
        """Return all of a tensor; what is in parts is added up for good."""
        ...


class OnParts(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Lets code that computes with global tensors, as torch's decompositions do, run by the table."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        del types
        return self._operators.run(func, args, kwargs or {})
