"""What an operator makes of tensors of certain looks, found out without their data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

aten = torch.ops.aten

DATA_DEPENDENT: Final = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise for an operation whose result has a shape, or a value, that only the data says."""

Looks = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]
"""Size, stride, dtype and device of a tensor."""

Filled = Callable[[Sequence[torch.Tensor]], tuple[Sequence[Any], dict[str, Any]]]
"""Puts tensors into the places that they have in the arguments of a call."""


def traced(
    operator: Any, looks: Sequence[Looks], filled: Filled, fake: FakeTensorMode
) -> tuple[Any, Sequence[torch.Tensor]]:
    """Run an operator on tensors that have looks and no data.

    Most operators run on torch's device "meta", which says the same as fake tensors in a tenth of the time. Fake
    tensors take the others, and whatever fails.

    Args:
        operator: An `OpOverload`.
        looks: Of the tensors among its arguments, in order.
        filled: Puts tensors in their places.
        fake: Makes fake tensors.

    Returns:
        What it returns, and the tensors that it was given. Devices say nothing where all arguments are on one.

    Raises:
        Exception: What fake tensors raise.
    """
    run: Callable[..., Any] = _MENDED.get(operator) or operator
    if looks and operator not in _FOR_FAKES and all(one[3] == looks[0][3] for one in looks):
        given = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype, _ in looks]
        args, kwargs = filled(given)
        if not any(_is_placed(one) for one in (*args, *kwargs.values())):
            try:
                with torch.no_grad():
                    return run(*args, **kwargs), given
            except Exception:  # noqa: BLE001 - fake tensors say it in the words that torch has for it
                args, kwargs = (), {}
    with quiet(), fake, torch.no_grad():
        given = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in looks]
        args, kwargs = filled(given)
        return run(*args, **kwargs), given


@contextmanager
def quiet() -> Generator[None]:
    """Keep torch from logging twenty lines, with a traceback of its own, of an error that is raised as well."""
    _FAKE_LOG.addFilter(_drop)
    try:
        yield
    finally:
        _FAKE_LOG.removeFilter(_drop)


_FAKE_LOG: Final = logging.getLogger("torch._subclasses.fake_tensor")


def _drop(_: logging.LogRecord) -> bool:
    return False


def _is_placed(value: Any) -> bool:
    """Whether an argument is a device, or a tensor of this process."""
    if isinstance(value, list | tuple):
        return any(map(_is_placed, value))
    return isinstance(value, torch.device) or (isinstance(value, torch.Tensor) and value.device.type != "meta")


_ALIKE: Final = frozenset(
    (
        "view", "_unsafe_view", "select", "slice", "slice_scatter", "diagonal_scatter", "copy_", "zeros_like",
        "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
        "new_full", "new_empty", "new_empty_strided",
    )
)  # fmt: skip
"""Those of which fake tensors know more only where sizes are symbols, or a device is named."""

_FOR_FAKES: Final = frozenset(one for one in op_implementations_dict if str(one).split(".")[1] not in _ALIKE)
"""Operators of which fake tensors know more than torch's device "meta"."""


# ---- where torch's own operators make something else of tensors than its fake ones ----------------------------------


def _power(base: Any, exponent: torch.Tensor) -> torch.Tensor:
    """Torch's result is contiguous, whatever the exponent is."""
    made: torch.Tensor = aten.pow.Scalar(base, exponent)
    return made.contiguous()


def _view(value: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Torch raises another class of error."""
    try:
        made: torch.Tensor = aten.view.default(value, size)
    except ValueError as error:
        raise RuntimeError(
            "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
            "contiguous subspaces). Use .reshape(...) instead."
        ) from error
    return made


def _slice(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Torch raises another class of error."""
    if not value.dim():
        raise IndexError("slice() cannot be applied to a 0-dim tensor.")
    made: torch.Tensor = aten.slice.Tensor(value, *args, **kwargs)
    return made


def _kth_value(value: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's
    """Torch raises another class of error."""
    if value.dim() and -value.dim() <= dim < value.dim() and not value.size(dim):
        raise IndexError(f"kthvalue(): Expected reduction dim {dim % value.dim()} to have non-zero size.")
    return aten.kthvalue.default(value, k, dim, keepdim)


def _extreme(operator: Any) -> Callable[..., Any]:
    """Torch raises another class of error where there is nothing to choose from."""

    def run(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return operator(value, *args, **kwargs)
        except RuntimeError as error:
            if value.numel():
                raise
            raise IndexError(str(error)) from error

    return run


def _paired(operator: Any) -> Callable[..., torch.Tensor]:
    """Torch lays out what it makes of two tensors as other operators do."""

    def run(one: torch.Tensor, other: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = operator(one, other, **kwargs)
        if not isinstance(other, torch.Tensor):
            return made
        like = aten.eq.Tensor(one, other)
        return torch.empty_strided(made.size(), like.stride(), dtype=made.dtype, device=made.device)

    return run


def _vector_norm(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Torch takes the largest of rows that are not empty, even where there are no rows."""
    given = {**dict(zip(("ord", "dim", "keepdim"), args, strict=False)), **kwargs}
    order, dims = given.get("ord", 2), given.get("dim")
    if isinstance(order, int | float) and math.isinf(order) and dims and not value.numel():
        each = [dims] if isinstance(dims, int) else dims
        if all(value.size(dim) for dim in each):
            given["ord"] = 2
    made: torch.Tensor = aten.linalg_vector_norm.default(value, **given)
    return made


def _batch_norm(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Torch's result is contiguous, or has channels last."""
    made, *rest = aten.native_batch_norm.default(value, *args, **kwargs)
    return made.contiguous(memory_format=suggest_memory_format(value)), *rest


_MENDED: Final[dict[Any, Callable[..., Any]]] = {
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.kthvalue.default: _kth_value,
    aten.pow.Scalar: _power,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.native_batch_norm.default: _batch_norm,
    **{one: _extreme(one) for one in (aten.amax.default, aten.amin.default, aten.aminmax.default, aten.argmax.default,
                                      aten.argmin.default)},
    **{
        one: _paired(one)
        for one in (
            aten.floor_divide.default, aten.div.Tensor_mode, aten.copysign.Tensor, aten.logaddexp.default,
            aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default,
        )
    },
}  # fmt: skip
"""In the place of an operator."""
