"""Memory of this process that users hand over: what it is, where it lies, whether it may be written.

torch and numpy are not imported: a tensor or an array is one only where its library is there already.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from typing import Any, Final

import attrs

from trimesh._transport.interface.mover import MemoryKind, Span
from trimesh.rdma.memory.device import space_of
from trimesh.rdma.memory.ticket import HOST

_KINDS: Final = "a torch tensor, a numpy array, or a memoryview or bytearray"


@attrs.frozen(eq=False)
class Memory:
    """Contiguous memory.

    Attributes:
        span: Where it lies, and what keeps it there.
        is_writable: Whether it may be written.
        text: What it is, for people.
        tensor: The CUDA tensor that it is, or None for memory of this host.
        is_idle: Tells whether what was queued on its device, when it was handed over for a transfer, has ended.
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
        """Which memory it is part of: that of the host, or of a device."""
        return HOST if self.tensor is None else space_of(self.tensor.device)


def memory_of(data: object, what: str) -> Memory:
    """Return the memory of an object of the user's.

    Args:
        data: The object.
        what: What it is to be, for the text of errors.

    Raises:
        TypeError: It is nothing that has memory, or its elements are objects.
        ValueError: Its memory is not in one piece, or is empty.
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
        raise ValueError(f"{what} must be on cpu or cuda, got {text}: there is no memory to be reached")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{what} must hold its values as they are, got {text}, conjugated or negated when it is read: "
                         "write tensor.resolve_conj().resolve_neg()")  # fmt: skip
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous, got {text} with strides {tensor.stride()}: "
                         "write tensor.contiguous(), which is a copy")  # fmt: skip
    nbytes = tensor.numel() * tensor.element_size()
    address = 0
    with contextlib.suppress(RuntimeError, NotImplementedError):  # what a class that only wraps others raises
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
        raise TypeError(f"{what} must hold numbers, got {text}: references mean nothing elsewhere")
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
        raise TypeError(f"{what} must hold numbers, got {text}: references mean nothing elsewhere")
    if not view.c_contiguous:
        raise ValueError(f"{what} must be contiguous, got {text} with strides {view.strides}: "
                         "write bytearray(view), which is a copy")  # fmt: skip
    return Memory(Span(address_of(view), view.nbytes, view), is_writable=not view.readonly, text=text)


class _Buffer(ctypes.Structure):
    """`Py_buffer` of the C interface of Python: the one way to the address of memory that is read-only."""

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
    """Return where the memory of a view begins; the view, if it is kept, keeps it there."""
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    try:
        return found.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
