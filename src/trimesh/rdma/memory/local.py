"""Memory objects of users (tensors, arrays, memoryviews): their range, kind and writability; and `allocate`.

torch and numpy are not imported: an object can be a tensor or an array only if its library is loaded already.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from trimesh._runtime.life import proc_for
from trimesh._runtime.tasks import in_trio_now
from trimesh._transport.interface import MemoryKind, Span
from trimesh.plain_numbers import whole_number
from trimesh.rdma.memory.device import space_of
from trimesh.rdma.memory.handle import HOST

_KINDS: Final = "a torch tensor, a numpy array, or a memoryview or bytearray"


@attrs.frozen(eq=False)
class Memory:
    """Contiguous memory.

    Attributes:
        span: Its range, with a reference that keeps it allocated.
        is_writable: True if it may be written.
        text: Description for error messages.
        tensor: The CUDA tensor, or None for host memory.
        is_idle: Returns whether work queued on its device before the transfer was requested has ended.
    """

    span: Span
    is_writable: bool
    text: str
    tensor: Any = None
    is_idle: Callable[[], bool] | None = None

    @property
    def nbytes(self) -> int:
        return self.span.nbytes

    @property
    def space(self) -> str:
        """The memory that it is part of: of the host, or of a device."""
        return HOST if self.tensor is None else space_of(self.tensor.device)


def memory_of(data: object, what: str) -> Memory:
    """Return the memory of a user's object.

    Args:
        data: The object.
        what: Role of the object, for error messages.

    Raises:
        TypeError: The object has no memory of its own, or its elements are objects.
        ValueError: Its memory is not contiguous, or is empty.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(data, torch.Tensor):
        found = _of_tensor(data, what)
    elif numpy is not None and isinstance(data, numpy.ndarray):
        found = _of_array(data, what)
    else:
        found = _of_buffer(data, what)
    if found.nbytes == 0:
        raise ValueError(f"{what} must have at least one byte, got {found.text}")
    return found


def _of_tensor(tensor: Any, what: str) -> Memory:
    text = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} on {tensor.device}"
    layout = str(tensor.layout).removeprefix("torch.")
    if layout != "strided" or tensor.is_quantized or tensor.is_nested:
        raise ValueError(f"{what} must be a plain strided tensor, got {text} of layout {layout}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what} must be on cpu or cuda, got {text}: no other device can be read by other processes")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{what} must hold its values, got {text}, which torch conjugates or negates when read: "
                         "write tensor.resolve_conj().resolve_neg()")  # fmt: skip
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous, got {text} with strides {tensor.stride()}: "
                         "write tensor.contiguous(), which is a copy")  # fmt: skip
    nbytes = tensor.numel() * tensor.element_size()
    address = 0
    with contextlib.suppress(RuntimeError, NotImplementedError):  # raised by wrapper subclasses without memory
        if tensor.untyped_storage().device == tensor.device:
            address = tensor.data_ptr()
    if nbytes and not address:
        raise ValueError(f"{what} must have memory of its own, got {text} of class {type(tensor).__qualname__}")
    span = Span(address, nbytes, tensor.untyped_storage() if nbytes else None)
    if tensor.device.type != "cuda":
        return Memory(span, is_writable=True, text=text)
    span = Span(span.address, span.nbytes, span.keep, MemoryKind.CUDA)
    from trimesh.untried import warn_untried  # noqa: PLC0415 - few programs have a device

    warn_untried("bulk data from and to memory of CUDA devices")
    return Memory(span, is_writable=True, text=text, tensor=tensor)


def _of_array(array: Any, what: str) -> Memory:
    text = f"an array of shape {array.shape} and {array.dtype}"
    if array.dtype.hasobject:
        raise TypeError(f"{what} must hold numbers, got {text}: references to objects are valid in one process only")
    if not array.flags.c_contiguous:
        raise ValueError(f"{what} must be contiguous, got {text} with strides {array.strides}: "
                         "write numpy.ascontiguousarray(array), which is a copy")  # fmt: skip
    address, is_readonly = array.__array_interface__["data"]
    return Memory(Span(address, array.nbytes, array), is_writable=not is_readonly, text=text)


def _of_buffer(data: object, what: str) -> Memory:
    try:
        view = memoryview(data)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be {_KINDS}, got {data!r:.100}") from None
    text = f"a {type(data).__qualname__} of {view.nbytes} bytes"
    if "O" in view.format:
        raise TypeError(f"{what} must hold numbers, got {text}: references to objects are valid in one process only")
    if not view.c_contiguous:
        raise ValueError(f"{what} must be contiguous, got {text} with strides {view.strides}: "
                         "write bytearray(view), which is a copy")  # fmt: skip
    return Memory(Span(address_of(view), view.nbytes, view), is_writable=not view.readonly, text=text)


class _Buffer(ctypes.Structure):
    """`Py_buffer` of the C API: the only way to get the address of read-only memory."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Return the address of a view's memory, valid while the view is kept."""
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    try:
        return found.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))


# ---- `allocate`: memory that processes of the same host can map ------------------------------------------------------


def allocate(shape: int | Sequence[int], dtype: Any = None) -> Any:
    """Allocate memory that processes of this host can map: they read a buffer over it faster, or without a copy.

    The contents are undefined: zeros, or remains of earlier use. The memory is reused when the buffer over it is
    closed and no view of it is left.

    Args:
        shape: Of the array or tensor; without `dtype` a number of bytes.
        dtype: A dtype of torch returns a tensor, one of numpy (or its equivalent) an array, None a memoryview.

    Raises:
        TypeError, ValueError: Shape and dtype are invalid, or the result would be empty.
        RuntimeError: No mesh is open here.
        LimitExceeded: This process has `limits.BLOCKS_MAX` such blocks, or the size is too large.
        OSError: The system refuses the memory.

    Example:
        weights = trimesh.rdma.allocate((1024, 1024), torch.float32)
        self.buffer = trimesh.RDMABuffer(weights)
    """
    sizes = _sizes(shape, dtype)
    itemsize = 1
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    if is_torch:
        itemsize = dtype.itemsize
    elif dtype is not None:
        dtype = importlib.import_module("numpy").dtype(dtype)
        if dtype.hasobject:
            raise TypeError(f"allocate needs a dtype of numbers, got {dtype}: references are valid in one process only")
        itemsize = dtype.itemsize
    nbytes = math.prod(sizes) * itemsize
    if nbytes <= 0:
        raise ValueError(f"allocate needs at least one byte, got shape {shape!r} and dtype {dtype!r}")
    memory = in_trio_now(_take_block)(nbytes)
    if is_torch:
        assert torch is not None
        return torch.frombuffer(memory, dtype=dtype).view(sizes)
    if dtype is not None:
        return importlib.import_module("numpy").frombuffer(memory, dtype).reshape(sizes)
    return memory


def _sizes(shape: int | Sequence[int], dtype: Any) -> tuple[int, ...]:
    if (number := whole_number(shape)) is not None:
        sizes: tuple[int, ...] = (number,)
    elif isinstance(shape, Sequence) and dtype is not None and all(hasattr(size, "__index__") for size in shape):
        sizes = tuple(size.__index__() for size in shape)
    elif dtype is None:
        raise TypeError(f"allocate takes a number of bytes, or a shape and a dtype, got {shape!r} alone")
    else:
        raise TypeError(f"a shape must be a number or a sequence of numbers, got {shape!r}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes must be 0 or more, got {shape!r}")
    return sizes


def _take_block(nbytes: int) -> memoryview:
    return proc_for("memory for others is allocated").bulk.take_block(nbytes)
