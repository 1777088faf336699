"""torch tensors as values: their memory travels beside the pickle and arrives writable and private (rule V1).

Registered by name: a process that never imports torch pays nothing, and one may import it at any time.

The bytes of a tensor's storage from its first to its last element travel, and no others. `torch.save` keeps the whole
storage, which makes one row of a large table as large as the table; here a row is a row. Tensors of one message whose
bytes overlap share one storage on arrival, of exactly the bytes that they cover together; those that do not overlap
arrive apart. A view that skips most of the bytes it spans (a column) is sent contiguous when it is alone.

    CPU, any dtype; views, strides, expanded, conjugated, negated, zero-size; Parameters; attributes   here
    meta device                                                                                        here, no bytes
    CUDA                                                       here, by way of this host's memory, to the same device
    sparse, quantized, nested, subclasses, tensors with hooks                         torch's own reduce, with a copy

As with plain pickle, `grad` stays behind. So does the graph: a non-leaf tensor arrives detached, without
`requires_grad`; as a leaf it would collect gradients that never reach its inputs.
"""

# ruff: noqa: SLF001 - pickling reads state of torch that has no public names

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

from trimesh._wire.memory import EntryMemory, Sink, memory_at, register_reducer, view_of, writable
from trimesh._wire.typed.codec import DecodeSource, ValueKind, register_kind
from trimesh._wire.typed.known_kinds import must_be_imported
from trimesh.errors import PayloadError, ProtocolError


@cache
def _torch() -> Any:
    """Return torch, which exists wherever a tensor does; an arriving tensor may be the first to need it."""
    return importlib.import_module("torch")


Tensor = Any
"""A `torch.Tensor`; torch is not a dependency, so type checkers do not know it."""

SPARSE = 2
"""A view that spans more than this many times its own bytes is sent compacted when nothing else shares its memory."""


def register() -> None:
    """Register the reducers of this module; torch need not be imported."""
    register_reducer("torch.Tensor", reduce_tensor)
    register_reducer("torch.nn.parameter.Parameter", reduce_tensor)


def register_kinds() -> None:
    """Register tensors and parameters where nothing is pickled; torch need not be imported."""
    register_kind(ValueKind("tensor", "torch.Tensor", _take_apart, _put_together))


def _take_apart(tensor: Tensor, sink: Sink) -> tuple[Any, ...]:
    torch = _torch()
    reduced: Any = reduce_tensor(tensor, sink) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else NotImplemented
    if reduced is NotImplemented:
        raise TypeError(
            f"a tensor must be dense and of torch.Tensor itself to be sent with pickle='off', got a "
            f"{type(tensor).__qualname__} of layout {tensor.layout}"
        )
    args: tuple[Any, ...] = reduced[1]
    state: Any = reduced[2] if len(reduced) > 2 else None
    return str(args[1]).removeprefix("torch."), args[0], state, *args[2:]


def _put_together(source: DecodeSource, name: Any, data: Any, state: Any, *rest: Any) -> Tensor:
    must_be_imported(source, "torch", "a tensor")
    names: dict[str, Any] = _torch().__dict__  # `getattr` would import lazy attributes
    dtype = names.get(name) if isinstance(name, str) else None
    if not isinstance(dtype, _torch().dtype):
        raise ProtocolError(f"a tensor must have a dtype, got {name!r:.100}")
    if data is not None:
        view_of(data)  # a peer may send anything; this raises for an object without memory
    elif not (0 in rest[0] or rest[4:] == ("meta",)):
        raise ProtocolError(f"a tensor of size {rest[0]!r:.100} must come with its bytes")
    try:
        tensor = rebuild_tensor(data, dtype, *rest)
    except ValueError as error:
        raise PayloadError(str(error)) from error
    if isinstance(state, dict):
        set_attributes(tensor, cast("dict[str, Any]", state))
    return tensor


def reduce_tensor(tensor: Tensor, sink: Sink) -> Any:
    """Reduce a tensor or a parameter: its bytes go to the sink, the rest into the pickle."""
    torch = _torch()
    is_cpu = tensor.is_cpu
    if (
        tensor.layout is not torch.strided
        or not (is_cpu or tensor.device.type in _DEVICES)
        or tensor.is_quantized
        or tensor.is_nested
        or tensor._backward_hooks
        or _is_wrapped()(tensor)
    ):
        return NotImplemented
    size, strides = tuple(tensor.size()), tensor.stride()
    marks = (
        tensor.requires_grad and tensor.is_leaf,
        tensor.is_conj(),
        tensor.is_neg(),
        type(tensor) is not torch.Tensor,
    )
    token = None
    if tensor.numel() and not tensor.is_meta:
        token, span = _memory_of(tensor, size, strides, sink)
    else:
        span = 0
    args: tuple[Any, ...] = (token, tensor.dtype, size, strides, span)
    if not is_cpu or marks != _NO_MARKS:
        args += (marks, None if is_cpu else str(tensor.device))
    state = tensor.__dict__
    if not state:
        return rebuild_tensor, args
    return rebuild_tensor, args, state, None, None, set_attributes


@cache
def _is_wrapped() -> Callable[[Tensor], bool]:
    """Return a function that tests for a functorch wrapper, which has no memory of its own."""
    return cast("Callable[[Tensor], bool]", _torch()._C._functorch.is_functorch_wrapped_tensor)


_DEVICES = frozenset(("cpu", "cuda", "meta"))
_NO_MARKS = (False, False, False, False)


def _memory_of(tensor: Tensor, size: tuple[int, ...], strides: tuple[int, ...], sink: Sink) -> tuple[Any, int]:
    itemsize = tensor.element_size()
    nbytes = tensor.numel() * itemsize
    if tensor.is_contiguous():
        span = nbytes
    else:
        span = (1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))) * itemsize
    storage = tensor.untyped_storage()
    if tensor.is_cpu:
        space, read = "cpu", partial(memory_at, keep=storage)
    else:
        space, read = str(tensor.device), partial(_device_memory, storage)
    compact = partial(_compacted, tensor) if span > SPARSE * nbytes else None
    return sink.memory(tensor.data_ptr(), span, read, space=space, compact=compact), span


def _device_memory(storage: Any, address: int, nbytes: int) -> memoryview:
    """Copy memory of a device to this host and return it; waits for the device's current stream."""
    from trimesh.untried import warn_untried  # noqa: PLC0415 - few programs have a device

    warn_untried("the transport of CUDA tensors in arguments and results")
    torch = _torch()
    with _no_modes():
        there = torch.empty(0, dtype=torch.uint8, device=storage.device)
        copied = there.set_(storage, address - storage.data_ptr(), (nbytes,)).cpu()
    return memory_at(copied.data_ptr(), nbytes, copied)


def _compacted(tensor: Tensor) -> memoryview:
    torch = _torch()
    with _no_modes(), torch.no_grad():
        physical = _marked(tensor.detach(), conj=tensor.is_conj(), neg=tensor.is_neg())  # a second time removes it
        copied = physical.clone(memory_format=torch.contiguous_format).cpu()
    return memory_at(copied.data_ptr(), copied.numel() * copied.element_size(), copied)


def rebuild_tensor(
    data: EntryMemory | memoryview | None,
    dtype: Any,
    size: tuple[int, ...],
    strides: tuple[int, ...],
    span: int,
    marks: tuple[bool, bool, bool, bool] = _NO_MARKS,
    device: str | None = None,
) -> Tensor:
    """Make the tensor that `reduce_tensor` described, over the memory that arrived.

    Raises:
        ValueError: It was on a device that this process does not have.
    """
    torch = _torch()
    requires_grad, conj, neg, is_parameter = marks
    is_plain = device is None and not (conj or neg) and type(data) is memoryview and data.nbytes == span
    tensor = _plain(data, dtype, size, strides) if is_plain else None
    if tensor is None:
        where = _device(device)
        # Modes must not apply to an arriving tensor: an active mesh would run this on every rank.
        with _no_modes(), torch.no_grad():
            if data is None:
                tensor = torch.empty_strided(size, strides, dtype=dtype, device=where)
            else:
                storage, start, nbytes = _storage(data, where, dtype.itemsize)
                tensor = torch.empty(0, dtype=dtype, device=where)
                if nbytes == span:
                    tensor.set_(storage, start // dtype.itemsize, size, strides)
                else:  # compacted on the way
                    tensor.set_(storage, start // dtype.itemsize, size)
            tensor = _marked(tensor, conj=conj, neg=neg)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _plain(data: Any, dtype: Any, size: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Make a CPU tensor over memory of its own, at a third of the cost; None if a mode or the alignment forbids it."""
    torch = _torch()
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return None  # a mode is on
    tensor = torch.frombuffer(writable(data), dtype=dtype)
    if tensor.data_ptr() % dtype.itemsize:
        return None
    return tensor.as_strided_(size, strides)  # in place: a view would have a base


def set_attributes(tensor: Tensor, state: dict[str, Any]) -> None:
    tensor.__dict__.update(state)


def _storage(data: EntryMemory | memoryview, where: Any, itemsize: int) -> tuple[Any, int, int]:
    """Return the storage for the data, shared with other tensors of the message, its first byte and its length."""
    if isinstance(data, EntryMemory) and data.offset % itemsize == 0:
        storage = data.region.cache.get(("torch", where))
        if storage is None:
            storage = data.region.cache["torch", where] = _storage_over(data.region.memory, where)
        if storage.data_ptr() % itemsize == 0:
            return storage, data.offset, data.nbytes
    storage = _storage_over(view_of(data), where)
    if storage.data_ptr() % itemsize:  # of another alignment than its elements: a copy has the right one
        storage = _storage_over(memoryview(bytearray(view_of(data))), where)
    return storage, 0, storage.nbytes()


def _storage_over(view: memoryview, where: Any) -> Any:
    torch = _torch()
    return torch.frombuffer(writable(view), dtype=torch.uint8).to(where).untyped_storage()


def _device(name: str | None) -> Any:
    torch = _torch()
    device = torch.device(name or "cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"a tensor on {name} arrived in a process that sees {torch.cuda.device_count()} CUDA devices; "
            "send tensor.cpu(), or move it to a device that both processes see"
        )
    return device


def _marked(tensor: Tensor, *, conj: bool, neg: bool) -> Tensor:
    """Return a view with the lazy conjugation and negation switched over."""
    torch = _torch()
    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor  # as torch's own rebuild does


class _no_modes:  # noqa: N801 - used as a function
    """Keep torch's modes (an active mesh, fake tensors, a default device) out of a block."""

    def __enter__(self) -> None:
        torch = _torch()
        self._guards = (torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch())
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *_: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)
