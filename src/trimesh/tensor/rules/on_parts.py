"""`OnParts`: code that computes with global tensors, as torch's decompositions do, runs by the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from trimesh.tensor.rules.engine import RuleEngine


class OnParts(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Lets code that computes with global tensors, as torch's decompositions do, run by the table."""

    def __init__(self, operators: RuleEngine) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return self._operators.run(func, args, kwargs or {})
