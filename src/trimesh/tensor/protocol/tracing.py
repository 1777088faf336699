"""What an operator makes of tensors of certain metadata, found out without their data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from trimesh import limits
from trimesh.tensor.protocol.mended import MENDED, iterated_strides

DATA_DEPENDENT: Final = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise for an operation whose result has a shape, or a value, that only the data says."""

Metadata = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]
"""Size, stride, dtype and device of a tensor."""

Filled = Callable[[Sequence[torch.Tensor]], tuple[Sequence[Any], dict[str, Any]]]
"""Puts tensors into the places that they have in the arguments of a call."""


def traced(
    operator: Any, metas: Sequence[Metadata], filled: Filled, fake: FakeTensorMode
) -> tuple[Any, Sequence[torch.Tensor]]:
    """Run an operator on tensors that have metadata and no data.

    Most operators run on torch's device "meta", which says the same as fake tensors in a tenth of the time. Fake
    tensors take the others, and whatever fails; what fails there runs on a few zeros, for torch's kernels decide which
    error it is, and whether it is one.

    Args:
        operator: An `OpOverload`.
        metas: Of the tensors among its arguments, in order.
        filled: Puts tensors in their places.
        fake: Makes fake tensors.

    Returns:
        What it returns, and the tensors that it was given. Devices say nothing where all arguments are on one.

    Raises:
        Exception: What torch's kernels raise; of large tensors, what fake ones do.
    """
    result, given = _traced(operator, metas, filled, fake)
    if any(dtype in _NARROW and 0 in stride for _, stride, dtype, _ in metas):
        # Without data, torch computes on copies of these in another dtype, and lays the result out as they lie then.
        wide = [(size, stride, _NARROW.get(dtype, dtype), device) for size, stride, dtype, device in metas]
        likes, _ = _traced(operator, wide, filled, fake)
        result = pytree.tree_map(partial(_laid_out, given), result, likes)
    return result, given


_NARROW: Final = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def _laid_out(given: Sequence[torch.Tensor], made: Any, like: Any) -> Any:
    is_right = not isinstance(made, torch.Tensor) or any(made is one for one in given) or made.stride() == like.stride()
    return made if is_right else torch.empty_strided(made.size(), like.stride(), dtype=made.dtype, device=made.device)


def _iterated(operator: Any, given: Sequence[torch.Tensor], made: Any) -> Any:
    """Lay out the result of an operator on each element as torch's kernels do where an argument lacks a dimension."""
    if operator in MENDED or torch.Tag.pointwise not in operator.tags:
        return made
    if not isinstance(made, torch.Tensor) or any(made is one for one in given):
        return made
    size = made.size()
    if not any(1 in size[: made.ndim - one.ndim] for one in given):
        return made
    return torch.empty_strided(size, iterated_strides(given, size), dtype=made.dtype, device=made.device)


def _traced(
    operator: Any, metas: Sequence[Metadata], filled: Filled, fake: FakeTensorMode
) -> tuple[Any, Sequence[torch.Tensor]]:
    run: Callable[..., Any] = MENDED.get(operator) or operator
    if metas and operator not in _FOR_FAKES and all(one[3] == metas[0][3] for one in metas):
        given = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype, _ in metas]
        args, kwargs = filled(given)
        if not any(_is_placed(one) for one in (*args, *kwargs.values())):
            try:
                with torch.no_grad():
                    return _iterated(operator, given, run(*args, **kwargs)), given
            except Exception:  # noqa: BLE001 - fake tensors say it in the words that torch has for it
                args, kwargs = (), {}
    try:
        with quiet(), fake, torch.no_grad():
            given = [
                torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in metas
            ]
            args, kwargs = filled(given)
            return run(*args, **kwargs), given
    except DATA_DEPENDENT:
        raise
    except Exception:
        if not _is_small(operator, metas):
            raise
    return _tried(operator, metas, filled)


def _is_small(operator: Any, metas: Sequence[Metadata]) -> bool:
    """Whether an operator may be run on zeros of this process to find out what it raises."""
    size = sum(math.prod(size) * dtype.itemsize for size, _, dtype, _ in metas)
    on_host = all(device.type == "cpu" for *_, device in metas)
    return (
        bool(metas)
        and on_host
        and size <= limits.TENSOR_TRIED_BYTES_MAX
        and torch.Tag.nondeterministic_seeded not in operator.tags
    )


def _tried(operator: Any, metas: Sequence[Metadata], filled: Filled) -> tuple[Any, Sequence[torch.Tensor]]:
    """Run an operator on zeros."""
    with no_dispatch(), torch.no_grad():
        given = [torch.empty_strided(size, stride, dtype=dtype).zero_() for size, stride, dtype, _ in metas]
        args, kwargs = filled(given)
        return operator(*args, **kwargs), given


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
