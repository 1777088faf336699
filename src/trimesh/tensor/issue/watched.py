"""What a recorded function has read of modules and optimizers: a replay runs no Python, so it must be so still."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimesh.tensor.protocol.errors import RecordingError


class Watched:
    """The modules that were called while a function was recorded, and the optimizers that have stepped.

    WD-1 A replay runs only while each of them has the flag `training`, and the numbers of its groups, that it had.
    """

    def __init__(self) -> None:
        self._modules: dict[int, tuple[torch.nn.Module, bool]] = {}
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = {}

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Learn of all that is called meanwhile."""
        handles = [
            register_module_forward_pre_hook(self._called),
            register_optimizer_step_pre_hook(self._stepped),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, module: torch.nn.Module, _args: Any) -> None:
        self._modules.setdefault(id(module), (module, module.training))

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizers.setdefault(id(optimizer), (optimizer, _settings(optimizer)))

    def check(self, name: str) -> None:
        """Refuse a replay that would not do what the function does.

        Raises:
            RecordingError: A module is in another mode, or a number of an optimizer is another.
        """
        for module, training in self._modules.values():
            if module.training is not training:
                mode = "train()" if training else "eval()"
                raise RecordingError(
                    f"{name} was recorded with a {type(module).__name__} in {mode}, and it is in the other mode now: "
                    f"write {name}.reset() before it, or give each mode a trimesh.compile of its own"
                )
        for optimizer, recorded in self._optimizers.values():
            for then, now in zip(recorded, _settings(optimizer), strict=False):
                changed = next((key for key in then if not _is_same(then[key], now.get(key))), None)
                if changed is not None:
                    raise RecordingError(
                        f"{name} was recorded with {changed}={then[changed]!r} of {type(optimizer).__name__}, and it "
                        f"is {now.get(changed)!r} now: a number that changes must be a tensor on the mesh, as lr= of a "
                        f"fused optimizer may be; or write {name}.reset() before it"
                    )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other  # its value is read on the ranks
    return bool(one == other)
