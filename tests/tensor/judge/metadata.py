"""The metadata of what operators return, beside that of torch's kernels on real tensors; no process is needed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tests.tensor.judge.interpreter import PlainRun
from tests.tensor.judge.program import Program
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trimesh.tensor.protocol.tracing import DATA_DEPENDENT, traced


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """Return the mode, made on first use: it imports `torch._dynamo`, which each collection would pay for."""
    return FakeTensorMode()


class Beside(TorchDispatchMode):
    """Runs each operator, and finds its metadata.

    Attributes:
        found: How they differ, by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._fake = _fake_mode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        shown = f"{func} of {[(tuple(one.size()), one.stride(), one.dtype) for one in given]}"
        metas = [(one.size(), one.stride(), one.dtype, one.device) for one in given]

        def filled(fakes: Any) -> Any:
            places = iter(fakes)
            return pytree.tree_map_only(torch.Tensor, lambda _: next(places), (args, kwargs))

        error: Exception | None = None
        made = None
        try:
            made, _ = traced(func, metas, filled, self._fake)
        except DATA_DEPENDENT:
            return func(*args, **kwargs)
        except Exception as raised:  # noqa: BLE001 - of any kind: it is compared
            error = raised
        try:
            result = func(*args, **kwargs)
        except Exception as raised:
            if error is not None and type(error) is not type(raised):
                self.found[str(func)] = f"{shown}: {error!r}, should be {raised!r}"
            raise
        if error is not None:
            self.found[str(func)] = f"{shown}: {error!r}, should be no error"
            return result
        for here, there in zip(pytree.tree_leaves(result), pytree.tree_leaves(made), strict=True):
            if isinstance(here, torch.Tensor) and _seen(here) != _seen(there):
                self.found[str(func)] = f"{shown}: {_seen(there)}, should be {_seen(here)}"
        return result


def _seen(value: torch.Tensor) -> tuple[Any, ...]:
    """Return what a program sees of the metadata of a tensor."""
    pairs = zip(value.size(), value.stride(), strict=True)
    steps = [stride for size, stride in pairs if size > 1] if value.numel() else []
    return tuple(value.size()), steps, value.dtype


def wrong_metadata(program: Program) -> dict[str, str]:
    """Run a program on plain tensors; return which metadata that was found without data differs, by operator."""
    run = PlainRun(program)
    with Beside() as beside:
        run.run()
    return beside.found
