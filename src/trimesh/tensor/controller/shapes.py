"""What is known at the controller of a tensor on the ranks, and what an operation makes of it.

Shapes and dtypes come from torch itself, by fake tensors, the first time an operation is seen with such arguments; a
`Plan` remembers them. Numbers that cannot change a shape are operands of the command rather than part of what is
remembered, so that a loop with a new learning rate each step finds its plans again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trimesh import limits
from trimesh.tensor.controller.plan import Meta, Plan
from trimesh.tensor.controller.recording import Recorder
from trimesh.tensor.protocol.tracing import quiet


@attrs.define(eq=False)
class Shapes:
    """The plans and metadata of one process.

    Attributes:
        recorder: Listens to all commands while a function is being recorded.
        fake: Makes the fake tensors.
        plans: By operation and metadata of its arguments.
        generation: How often they have been forgotten.
        refs: The first of the numbers of tensors on ranks that no mesh of this process has used.
    """

    recorder: Recorder | None = None
    fake: FakeTensorMode = attrs.field(factory=FakeTensorMode)
    plans: dict[tuple[Any, ...], Plan] = attrs.field(factory=dict[tuple[Any, ...], Plan])
    generation: int = 0
    refs: int = 1
    _numbers: int = 0
    _metas: dict[tuple[Any, ...], Meta] = attrs.field(factory=dict[tuple[Any, ...], Meta])

    def new_number(self) -> int:
        """Return a number for a plan, a team, a request; none is used twice in this process."""
        self._numbers += 1
        return self._numbers

    def new_numbers(self, count: int) -> int:
        """Return the first of as many."""
        first = self._numbers + 1
        self._numbers += count
        return first

    def meta(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_global: bool = False,
    ) -> Meta:
        """Return the one object for this metadata."""
        key = (tuple(size), tuple(stride), dtype, device, is_global)
        found = self._metas.get(key)
        if found is None:
            found = self._metas[key] = Meta(*key)
        return found

    def meta_of(self, tensor: torch.Tensor, *, is_global: bool = False) -> Meta:
        """Return the metadata of a tensor, fake or not."""
        return self.meta(tensor.size(), tensor.stride(), tensor.dtype, tensor.device, is_global=is_global)

    def example(self, meta: Meta) -> torch.Tensor:
        """Return a fake tensor with this metadata."""
        with self.fake:
            return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=meta.device)

    def remember(self, key: tuple[Any, ...], plan: Plan) -> None:
        """Keep a plan; when there are too many, all are forgotten here, and by the ranks with their next commands."""
        if len(self.plans) >= limits.TENSOR_PLANS:
            self.plans.clear()
            self.generation += 1
        self.plans[key] = plan

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation on fake tensors."""
        with quiet(), self.fake, torch.no_grad():
            return function(*args, **kwargs)
