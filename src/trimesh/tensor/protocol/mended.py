"""Where torch's kernels make something else of tensors than its operators without data say.

The class of an error, the strides of a result: a program that sees them sees those of torch's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format

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
    """Return how torch's kernels lay out what an operator makes of each element.

    They order dimensions by the strides of the arguments. A dimension that an argument lacks says nothing of the order,
    as one along which it is expanded. Without data torch gives it a stride where the result has one place along it.

    Args:
        given: The tensors among the arguments.
        size: Of the result.
    """
    walked = []
    for one in given:
        lacks = len(size) - one.ndim
        own = zip(one.size(), size[lacks:], one.stride(), strict=True)
        strides = [0 if length == 1 != whole else stride for length, whole, stride in own]
        walked.append(one.as_strided(size, [0] * lacks + strides))
    return compute_elementwise_output_strides(*walked)


def _paired(operator: Any) -> Callable[..., torch.Tensor]:
    """Torch lays out what it makes of two tensors as other operators do."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = operator(*args, **kwargs)
        given = [one for one in args if isinstance(one, torch.Tensor)]
        if len(given) < 2:
            return made
        strides = iterated_strides(given, made.size())
        return torch.empty_strided(made.size(), strides, dtype=made.dtype, device=made.device)

    return run


def _index(operator: Any) -> Callable[..., torch.Tensor]:
    """Torch lays the result out as the places and the tensor lie together, not as the tensor alone."""

    def run(value: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
        made: torch.Tensor = operator(value, indices)
        given = [one for one in indices if one is not None]
        if not made.numel() or any(one.dtype in (torch.bool, torch.uint8) for one in given):
            return made
        strides = compute_elementwise_output_strides(*_walked(value, indices, made.size()))
        return torch.empty_strided(made.size(), strides, dtype=made.dtype, device=made.device)

    return run


def _walked(value: torch.Tensor, indices: Sequence[torch.Tensor | None], size: Sequence[int]) -> list[torch.Tensor]:
    """Return what torch's kernel goes through to index a tensor: it and the places, each as large as the result."""
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
    """Torch writes to a copy that keeps the layout as far as it can."""
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
    """A mask to the power of a mask is one."""
    made: torch.Tensor = aten.pow.Tensor_Scalar(value, exponent)
    return made.to(torch.result_type(value, exponent))


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
    """Torch sums the exponentials of doubles as doubles; without data, torch 2.11 says that it does not."""
    made, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(value, *args, **kwargs)
    return made, sums.to(torch.float64 if value.dtype is torch.float64 else torch.float32)


def _batch_norm(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Torch's result is contiguous, or has channels last."""
    made, *rest = aten.native_batch_norm.default(value, *args, **kwargs)
    dtype = dtype_of_statistics(value, args)
    return made.contiguous(memory_format=suggest_memory_format(value)), *[one.to(dtype) for one in rest]


def dtype_of_statistics(value: torch.Tensor, args: Sequence[Any]) -> torch.dtype:
    """Return the dtype of the mean that torch's batch norm keeps: that of its weights, if it has any."""
    return next((one.dtype for one in args if isinstance(one, torch.Tensor)), value.dtype)


MENDED: Final[dict[Any, Callable[..., Any]]] = {
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
    # A kernel that is given what autograd takes for contiguous goes through it as such: another layout is wrong values.
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
    # Without data these refuse masks, of which a number of places makes numbers.
    aten.__lshift__.Tensor: aten.bitwise_left_shift.Tensor,
    aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
    aten.__rshift__.Tensor: aten.bitwise_right_shift.Tensor,
    aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
    aten.__ilshift__.Tensor: aten.bitwise_left_shift_.Tensor,
    aten.__ilshift__.Scalar: aten.bitwise_left_shift_.Tensor_Scalar,
    aten.__irshift__.Tensor: aten.bitwise_right_shift_.Tensor,
    aten.__irshift__.Scalar: aten.bitwise_right_shift_.Tensor_Scalar,
}  # fmt: skip
"""In the place of an operator."""
