"""Shape inference: runs operators on tensors that have metadata and no data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from trimesh import limits

DATA_DEPENDENT: Final = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised by fake tensors for an operation whose result has a shape, or a value, that depends on the data."""

Metadata = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]
"""Size, stride, dtype and device of a tensor."""

Filled = Callable[[Sequence[torch.Tensor]], tuple[Sequence[Any], dict[str, Any]]]
"""Returns the arguments of a call with these tensors in their places."""


def traced(
    operator: Any, metas: Sequence[Metadata], filled: Filled, fake: FakeTensorMode
) -> tuple[Any, Sequence[torch.Tensor]]:
    """Run an operator on tensors that have metadata and no data.

    Most operators run on torch's device "meta", which gives the same result as fake tensors in a tenth of the time.
    The others, and calls that fail there, run on fake tensors. Calls that fail on these run on a few zeros, because
    torch's kernels decide whether it is an error, and which.

    Args:
        operator: An `OpOverload`.
        metas: Metadata of the tensors among its arguments, in order.
        filled: Puts tensors in their places.
        fake: Makes fake tensors.

    Returns:
        The result, and the tensors that were passed. Their devices are meaningless if all arguments are on one device.

    Raises:
        Exception: As torch's kernels raise it; for large tensors, as fake tensors do.
    """
    result, given = _traced(operator, metas, filled, fake)
    if any(dtype in _NARROW and 0 in stride for _, stride, dtype, _ in metas):
        # Without data, torch computes on copies in another dtype, and the result takes the layout of these copies.
        wide = [(size, stride, _NARROW.get(dtype, dtype), device) for size, stride, dtype, device in metas]
        likes, _ = _traced(operator, wide, filled, fake)
        result = pytree.tree_map(partial(_laid_out, given), result, likes)
    return result, given


_NARROW: Final = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def _laid_out(given: Sequence[torch.Tensor], made: Any, like: Any) -> Any:
    is_right = not isinstance(made, torch.Tensor) or any(made is one for one in given) or made.stride() == like.stride()
    return made if is_right else torch.empty_strided(made.size(), like.stride(), dtype=made.dtype, device=made.device)


def _iterated(operator: Any, given: Sequence[torch.Tensor], made: Any) -> Any:
    """Lay out an elementwise result as torch's kernels do when an argument lacks a dimension."""
    if operator in CORRECTED or torch.Tag.pointwise not in operator.tags:
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
    run: Callable[..., Any] = CORRECTED.get(operator) or operator
    if metas and operator not in _FOR_FAKES and all(one[3] == metas[0][3] for one in metas):
        given = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype, _ in metas]
        args, kwargs = filled(given)
        if not any(_is_placed(one) for one in (*args, *kwargs.values())):
            try:
                with torch.no_grad():
                    return _iterated(operator, given, run(*args, **kwargs)), given
            except Exception:  # noqa: BLE001 - retried on fake tensors, which raise torch's own message
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
    """Return whether an operator may run on zeros in this process to find its error."""
    size = sum(math.prod(size) * dtype.itemsize for size, _, dtype, _ in metas)
    on_host = all(device.type == "cpu" for *_, device in metas)
    return (
        bool(metas)
        and on_host
        and size <= limits.TENSOR_TRIED_BYTES_MAX
        and torch.Tag.nondeterministic_seeded not in operator.tags
    )


def _tried(operator: Any, metas: Sequence[Metadata], filled: Filled) -> tuple[Any, Sequence[torch.Tensor]]:
    """Run an operator on zeros of this process."""
    with no_dispatch(), torch.no_grad():
        given = [torch.empty_strided(size, stride, dtype=dtype).zero_() for size, stride, dtype, _ in metas]
        args, kwargs = filled(given)
        return operator(*args, **kwargs), given


@contextmanager
def quiet() -> Generator[None]:
    """Keep torch from logging a traceback of twenty lines for an error that it also raises."""
    _FAKE_LOG.addFilter(_drop)
    try:
        yield
    finally:
        _FAKE_LOG.removeFilter(_drop)


_FAKE_LOG: Final = logging.getLogger("torch._subclasses.fake_tensor")


def _drop(_: logging.LogRecord) -> bool:
    return False


def _is_placed(value: Any) -> bool:
    """Return whether an argument is a device, or a tensor of this process."""
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
"""Operators for which fake tensors differ from "meta" only with symbolic sizes or a named device."""

_FOR_FAKES: Final = frozenset(one for one in op_implementations_dict if str(one).split(".")[1] not in _ALIKE)
"""Operators for which fake tensors give a better result than torch's device "meta"."""


# ---- corrections: operators whose kernels give another layout or error than torch infers without data ----------------

# Programs must see the error classes and strides of torch's kernels.

aten = torch.ops.aten

_HAS_MKL: Final[bool] = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call, unused-ignore]


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


def iterated_strides(given: Sequence[torch.Tensor], size: Sequence[int]) -> Sequence[int]:
    """Return the strides that torch's kernels give the result of an elementwise operator.

    They order dimensions by the strides of the arguments. A dimension that an argument lacks, or along which it is
    expanded, does not affect the order. Without data, torch gives it a stride where the result has size 1 along it.

    Args:
        given: The tensors among the arguments.
        size: Size of the result.
    """
    walked = []
    for one in given:
        lacks = len(size) - one.ndim
        own = zip(one.size(), size[lacks:], one.stride(), strict=True)
        strides = [0 if length == 1 != whole else stride for length, whole, stride in own]
        walked.append(one.as_strided(size, [0] * lacks + strides))
    return compute_elementwise_output_strides(*walked)


def _paired(operator: Any) -> Callable[..., torch.Tensor]:
    """Use the strides of `iterated_strides`, as torch's kernel for two tensors does."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = operator(*args, **kwargs)
        given = [one for one in args if isinstance(one, torch.Tensor)]
        if len(given) < 2:
            return made
        strides = iterated_strides(given, made.size())
        return torch.empty_strided(made.size(), strides, dtype=made.dtype, device=made.device)

    return run


def _index(operator: Any) -> Callable[..., torch.Tensor]:
    """Torch derives the layout from the indices and the tensor together, not from the tensor alone."""

    def run(value: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
        made: torch.Tensor = operator(value, indices)
        given = [one for one in indices if one is not None]
        if not made.numel() or any(one.dtype in (torch.bool, torch.uint8) for one in given):
            return made
        strides = compute_elementwise_output_strides(*_walked(value, indices, made.size()))
        return torch.empty_strided(made.size(), strides, dtype=made.dtype, device=made.device)

    return run


def _walked(value: torch.Tensor, indices: Sequence[torch.Tensor | None], size: Sequence[int]) -> list[torch.Tensor]:
    """Return the operands of torch's index kernel: the tensor and the indices, each expanded to the result's size."""
    given = [one for one in indices if one is not None]
    shape = torch.broadcast_shapes(*[one.shape for one in given])  # type: ignore[no-untyped-call, unused-ignore]
    places = [one.expand(shape) for one in given]
    indexed = [dim for dim, one in enumerate(indices) if one is not None]
    first, is_run = indexed[0], indexed == [*range(indexed[0], indexed[-1] + 1)]
    others = [dim for dim in range(value.ndim) if dim not in indexed]
    before = [dim for dim in others if is_run and dim < first]
    strides = [
        *[value.stride(dim) for dim in before], *[0] * len(shape),
        *[value.stride(dim) for dim in others if dim not in before],
    ]  # fmt: skip
    after = (1,) * (len(others) - len(before))
    return [
        value.as_strided(size, strides),
        *[one.reshape((1,) * len(before) + tuple(one.size()) + after).expand(size) for one in places],
    ]


def _as_clone(value: torch.Tensor, *_: Any) -> torch.Tensor:
    """Torch writes to a copy that preserves the layout where possible."""
    return value.clone(memory_format=torch.preserve_format)


def _in_order(operator: Any) -> Callable[..., torch.Tensor]:
    """Torch's result is contiguous."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = operator(*args, **kwargs)
        return made.contiguous()

    return run


def _in_order_first(operator: Any) -> Callable[..., Any]:
    """The first of torch's results is contiguous."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made, *rest = operator(*args, **kwargs)
        return None if made is None else made.contiguous(), *rest

    return run


def _log_sigmoid(value: torch.Tensor) -> Any:
    """Both of torch's results are contiguous."""
    return tuple(one.contiguous() for one in aten.log_sigmoid_forward.default(value))


def _as_input(operator: Any, place: int = 0) -> Callable[..., torch.Tensor]:
    """Torch's result is contiguous, or has channels last if an argument has."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = operator(*args, **kwargs)
        return made.contiguous(memory_format=suggest_memory_format(args[place]))

    return run


def _angle(value: torch.Tensor) -> torch.Tensor:
    """Torch's result is contiguous for complex numbers."""
    made: torch.Tensor = aten.angle.default(value)
    return made.contiguous() if value.is_complex() else made


def _as_input_first(operator: Any, place: int = 0) -> Callable[..., Any]:
    """The first of torch's results is contiguous, or has channels last if an argument has."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made, *rest = operator(*args, **kwargs)
        return None if made is None else made.contiguous(memory_format=suggest_memory_format(args[place])), *rest

    return run


def _power_of_masks(value: torch.Tensor, exponent: Any) -> torch.Tensor:
    """A mask to the power of a mask is a mask."""
    made: torch.Tensor = aten.pow.Tensor_Scalar(value, exponent)
    return made.to(torch.result_type(value, exponent))


def _vector_norm(value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Torch takes the maximum over rows that are not empty, even where there are no rows."""
    given = {**dict(zip(("ord", "dim", "keepdim"), args, strict=False)), **kwargs}
    order, dims = given.get("ord", 2), given.get("dim")
    if isinstance(order, int | float) and math.isinf(order) and dims and not value.numel():
        each = [dims] if isinstance(dims, int) else dims
        if all(value.size(dim) for dim in each):
            given["ord"] = 2
    made: torch.Tensor = aten.linalg_vector_norm.default(value, **given)
    return made


def _fourier(value: torch.Tensor, dims: Sequence[int], *args: Any) -> torch.Tensor:
    """Torch's kernel for hosts orders the dimensions by their strides; without data, torch 2.11 does not."""
    made: torch.Tensor = aten._fft_c2c.default(value, dims, *args)
    if not dims or value.device.type == "cuda" or not _HAS_MKL:
        return made
    strides, kept = value.stride(), [dim for dim in range(value.ndim) if dim not in dims]
    order = [*sorted(kept, key=strides.__getitem__, reverse=True), *sorted(dims, key=strides.__getitem__, reverse=True)]
    turned = torch.empty([made.size(dim) for dim in order], dtype=made.dtype, device=made.device)
    return turned.permute([order.index(dim) for dim in range(value.ndim)])


def _attention(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Torch sums the exponentials of doubles as doubles; without data, torch 2.11 infers another dtype."""
    made, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(value, *args, **kwargs)
    return made, sums.to(torch.float64 if value.dtype is torch.float64 else torch.float32)


def _batch_norm(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Torch's result is contiguous, or has channels last."""
    made, *rest = aten.native_batch_norm.default(value, *args, **kwargs)
    dtype = dtype_of_statistics(value, args)
    return made.contiguous(memory_format=suggest_memory_format(value)), *[one.to(dtype) for one in rest]


def dtype_of_statistics(value: torch.Tensor, args: Sequence[Any]) -> torch.dtype:
    """Return the dtype of the mean that torch's batch norm saves: the dtype of its weights, if it has any."""
    return next((one.dtype for one in args if isinstance(one, torch.Tensor)), value.dtype)


CORRECTED: Final[dict[Any, Callable[..., Any]]] = {
    aten.view.default: _view,
    aten.pow.Scalar: _power,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.native_batch_norm.default: _batch_norm,
    aten.index.Tensor: _index(aten.index.Tensor),
    aten._unsafe_index.Tensor: _index(aten._unsafe_index.Tensor),
    **{
        one: _paired(one)
        for one in (
            aten.floor_divide.default, aten.div.Tensor_mode, aten.copysign.Tensor, aten.logaddexp.default,
            aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.xlogy.Tensor,
            aten.logit_backward.default, aten.hardtanh_backward.default, aten.elu_backward.default,
            aten.softplus_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default,
        )
    },
    aten.index_fill.int_Scalar: _as_clone,
    aten.index_fill.int_Tensor: _as_clone,
    aten.isin.Tensor_Tensor: _in_order(aten.isin.Tensor_Tensor),
    aten.isin.Tensor_Scalar: _in_order(aten.isin.Tensor_Scalar),
    aten.pow.Tensor_Scalar: _power_of_masks,
    # These kernels read a tensor that autograd assumes contiguous as contiguous: another layout gives wrong values.
    **{
        one: _in_order(one)
        for one in (
            aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
            aten._log_softmax_backward_data.default, aten.glu_backward.default,
        )
    },
    aten.native_layer_norm_backward.default: _in_order_first(aten.native_layer_norm_backward.default),
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.native_batch_norm_backward.default: _as_input_first(aten.native_batch_norm_backward.default, 1),
    aten.native_group_norm.default: _as_input_first(aten.native_group_norm.default),
    aten.native_group_norm_backward.default: _as_input_first(aten.native_group_norm_backward.default, 1),
    aten.angle.default: _angle,
    aten._fft_c2c.default: _fourier,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    **{
        one: _as_input(one)
        for one in (aten.reflection_pad2d.default, aten.channel_shuffle.default, aten.pixel_shuffle.default)
    },
    aten.reflection_pad2d_backward.default: _as_input(aten.reflection_pad2d_backward.default, 1),
    # Without data these refuse masks; shifting a mask by a number gives numbers.
    aten.__lshift__.Tensor: aten.bitwise_left_shift.Tensor,
    aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
    aten.__rshift__.Tensor: aten.bitwise_right_shift.Tensor,
    aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
    aten.__ilshift__.Tensor: aten.bitwise_left_shift_.Tensor,
    aten.__ilshift__.Scalar: aten.bitwise_left_shift_.Tensor_Scalar,
    aten.__irshift__.Tensor: aten.bitwise_right_shift_.Tensor,
    aten.__irshift__.Scalar: aten.bitwise_right_shift_.Tensor_Scalar,
}  # fmt: skip
"""Replacement for an operator when it runs without data."""


# ---- linear layers as operators of one name, for tensors of any number of dimensions ---------------------------------

# Torch decomposes `linear` before dispatch, folding batch and sequence into one dimension, along which a part of a
# sequence is not contiguous. Autograd has no formulas for these operators: `ops/modules.py` has them.

NAMESPACE: Final = "trimesh_tensor"

_of_torch: Final[Any] = torch.library
_library: Final = _of_torch.Library(NAMESPACE, "DEF")
_library.define("linear_layer(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_library.define("linear_weight_gradient(Tensor grad, Tensor input) -> Tensor")


def _linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(value, weight, bias).contiguous()


def _linear_weight_gradient(grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return grad.reshape(-1, grad.size(-1)).t() @ value.reshape(-1, value.size(-1))


_library.impl("linear_layer", _linear, "CompositeExplicitAutograd")
_library.impl("linear_weight_gradient", _linear_weight_gradient, "CompositeExplicitAutograd")

_operators: Final[Any] = getattr(torch.ops, NAMESPACE)

linear: Final = _operators.linear_layer.default
"""`nn.functional.linear`; its result is contiguous."""

linear_weight_gradient: Final = _operators.linear_weight_gradient.default
"""The gradient of its weight: gradient times input, summed over all dimensions but the last."""
