"""Rules of the ranks, falsified on purpose one at a time: the judge must find each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import msgspec

PROGRAMS_MOST: Final = 2_000
"""Programs within which each must be found."""

Damage = Callable[[Callable[..., Any], str, tuple[Any, ...], dict[str, Any]], Any]
"""Takes what the rank would run, its name and its arguments; returns a wrong result."""


class Falsified(msgspec.Struct, frozen=True):
    """A rule that is wrong.

    Attributes:
        operators: Names of operators of torch, without overload; a lone underscore stands for all that write.
        damage: What is done in their place.
        lines: A pattern of lines of the table of operations that use them.
    """

    operators: tuple[str, ...]
    damage: Damage
    lines: str


def _globals(value: Any) -> Iterator[Any]:
    if hasattr(value, "_local_tensor"):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _globals(one)


def _is_first(value: Any) -> bool:
    return not any(value.device_mesh.get_coordinate())


def _forgets_ranks(run: Callable[..., Any], _name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What each rank has of a sum is taken for all of it."""
    from torch.distributed.tensor import DTensor, Replicate

    made = run(*args, **kwargs)
    if not hasattr(made, "_local_tensor"):
        return made
    places = [Replicate() if one.is_partial() else one for one in made.placements]
    return DTensor.from_local(
        made._local_tensor, made.device_mesh, places, run_check=False, shape=made.shape, stride=made.stride()
    )


def _loses_nan(run: Callable[..., Any], _name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = run(*args, **kwargs)
    for one in _globals(made):
        if one._local_tensor.is_floating_point():
            one._local_tensor.nan_to_num_(1.0)
    return made


def _copies(run: Callable[..., Any], _name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view has memory of its own."""
    made = run(*args, **kwargs)
    for one in _globals(made):
        one._local_tensor = one._local_tensor.clone()
    return made


def _forgets_writes(run: Callable[..., Any], _name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ranks but the first write nothing."""
    target = next(_globals(args), None)
    if target is None or _is_first(target):
        return run(*args, **kwargs)
    before = target._local_tensor.clone()
    made = run(*args, **kwargs)
    if target._local_tensor.shape == before.shape:
        target._local_tensor.copy_(before)
    return made


_numbers: dict[Any, Any] = {}


def _reuses_numbers(run: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A cache whose key has the sizes, and not the number."""
    if len(args) > 2 or len(args) < 2 or not isinstance(args[1], int | float) or not hasattr(args[0], "_local_tensor"):
        return run(*args, **kwargs)
    number = _numbers.setdefault((name, tuple(args[0].shape), args[0].dtype), args[1])
    return run(args[0], number, **kwargs)


def _swaps(run: Callable[..., Any], _name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ranks but the first have their first and last row swapped."""
    made = run(*args, **kwargs)
    for one in _globals(made):
        if not _is_first(one) and one._local_tensor.ndim:
            one._local_tensor = one._local_tensor.flip(0)
    return made


def _halves(run: Callable[..., Any], _name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = run(*args, **kwargs)
    for one in _globals(made):
        if one._local_tensor.is_floating_point():
            one._local_tensor.mul_(0.5)
    return made


FALSIFIED: Final[dict[str, Falsified]] = {
    "a sum of each rank's own rows": Falsified(("sum",), _forgets_ranks, r"sum\("),
    "a product of each rank's own columns": Falsified(("mm", "addmm", "bmm"), _forgets_ranks, r"@|mm|linear"),
    "a maximum that loses NaN": Falsified(("max", "amax", "maximum"), _loses_nan, r"max"),
    "a view that is a copy": Falsified(("view", "transpose", "t", "select", "slice"), _copies, r"view|_\("),
    "writes that some ranks leave out": Falsified(("_",), _forgets_writes, r"\{w\}"),
    "a cached key short of the number": Falsified(("add", "sub", "mul", "div"), _reuses_numbers, r"\{s\}"),
    "random numbers of each rank's own": Falsified(("rand_like", "native_dropout", "randn_like"), _swaps, r"rand|drop"),
    "a softmax of rows in another order": Falsified(("_softmax", "_log_softmax"), _swaps, r"softm"),
    "a gather of other rows": Falsified(("gather", "index_select", "index"), _swaps, r"gather|index|ix"),
    "half a gradient": Falsified(
        ("tanh_backward", "threshold_backward", "sigmoid_backward", "gelu_backward", "mse_loss_backward"),
        _halves, r"tanh|relu|sigmoid|gelu|mse|grad\(",
    ),
    "a cumulative sum of another order": Falsified(("cumsum", "cumprod", "logcumsumexp"), _swaps, r"cum"),
}  # fmt: skip
"""By what is wrong."""


def plant(name: str) -> None:
    """Falsify a rule in this process, which is a rank."""
    from trimesh.tensor.kernels.table import KERNELS
    from trimesh.tensor.rank.kernel import Kernel

    wrong = FALSIFIED[name]
    right = KERNELS.families["global"]

    def made(called: str, operator: Callable[..., Any]) -> Kernel:
        kernel = right(called, operator)
        base = called.partition("::")[2].partition(".")[0]
        writes = base.endswith("_") and not base.endswith("__")
        if base not in wrong.operators and not (writes and "_" in wrong.operators):
            return kernel

        def run(rank: Any, team: Any, *args: Any, **kwargs: Any) -> Any:
            return wrong.damage(partial(kernel.function, rank, team), base, args, kwargs)

        return Kernel(kernel.name, run, takes_poison=kernel.takes_poison, operator=kernel.operator)

    KERNELS.families["global"] = made
