"""What buffers need of the CUDA driver and torch has no public name for: handles on memory, and copies by address.

torch's own sharing is not used: it counts readers in a file under /dev/shm that outlives a killed process, needs to
know their number, and its handles are for the same version of torch only.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from trimesh.rdma.memory.ticket import CUDA_HANDLE_BYTES

_LAZY_PEER_ACCESS: Final = 1
"""`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`; the driver takes no other value."""


class DriverError(RuntimeError):
    """The CUDA driver has refused something, or is not there."""


class _MemoryHandle(ctypes.Structure):
    """`CUipcMemHandle`, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * CUDA_HANDLE_BYTES),)


_Address = ctypes.c_uint64  # CUdeviceptr
_Pointer = ctypes.c_void_p
_TYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cuCtxPopCurrent_v2": (_Pointer,),
    "cuCtxPushCurrent_v2": (_Pointer,),
    "cuGetErrorName": (ctypes.c_int, _Pointer),
    "cuIpcCloseMemHandle": (_Address,),
    "cuIpcGetMemHandle": (_Pointer, _Address),
    "cuIpcOpenMemHandle_v2": (_Pointer, _MemoryHandle, ctypes.c_uint),
    "cuMemGetAddressRange_v2": (_Pointer, _Pointer, _Address),
    "cuMemcpyAsync": (_Address, _Address, ctypes.c_size_t, _Pointer),
    "cuStreamGetCtx": (_Pointer, _Pointer),
}
"""Functions and the types of their arguments, as cuda.h has them; all return a `CUresult`."""

_FLUSH: Final = "cuFlushGPUDirectRDMAWrites"
_FLUSH_TYPES: Final = (ctypes.c_int, ctypes.c_int)
"""Of a function that drivers have since CUDA 11.3; the rest does without it."""
_CURRENT_CONTEXT: Final = 0
_TO_OWNER: Final = 100
"""`CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX` and `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER`."""


class Driver:
    """The driver. Each call names a stream that torch has made, by its number: it says on which device.

    Any thread may call, for the stream's context is made current meanwhile; other threads run on.

    Raises:
        DriverError: Of each method: the driver has refused it.
    """

    def __init__(self, library: Any) -> None:
        self._functions: dict[str, Any] = {}
        for name, types in _TYPES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise DriverError(f"the CUDA driver is too old: it has no {name}") from None
            function.argtypes, function.restype = types, ctypes.c_int
            self._functions[name] = function
        flush = getattr(library, _FLUSH, None)
        if flush is not None:
            flush.argtypes, flush.restype = _FLUSH_TYPES, ctypes.c_int
            self._functions[_FLUSH] = flush

    def allocation_of(self, stream: int, address: int) -> tuple[int, int]:
        """Return where the allocation begins that an address lies in, and its size."""
        base, size = _Address(), ctypes.c_size_t()
        with self._current(stream):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def handle_of(self, stream: int, base: int) -> bytes:
        """Return the handle by which other processes open an allocation."""
        handle = _MemoryHandle()
        with self._current(stream):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle)

    def open(self, stream: int, handle: bytes) -> int:
        """Return the address, here, of an allocation of another process; `close` it as often as it was opened."""
        address = _Address()
        with self._current(stream):
            made = _MemoryHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), made, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, stream: int, address: int) -> None:
        """Give back what `open` has returned."""
        with self._current(stream):
            self._call("cuIpcCloseMemHandle", address)

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Queue a copy between any two addresses, of devices or of pinned memory."""
        with self._current(stream):
            self._call("cuMemcpyAsync", to, source, nbytes, stream)

    def flush_writes(self, stream: int) -> None:
        """Have the device of a stream see what adapters have written to its memory."""
        if _FLUSH not in self._functions:
            raise DriverError(f"the CUDA driver is too old: it has no {_FLUSH}")
        with self._current(stream):
            self._call(_FLUSH, _CURRENT_CONTEXT, _TO_OWNER)

    @contextmanager
    def _current(self, stream: int) -> Generator[None, None, None]:
        context, last = _Pointer(), _Pointer()
        self._call("cuStreamGetCtx", stream, ctypes.byref(context))
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(last))

    def _call(self, name: str, *args: Any) -> None:
        code = self._functions[name](*args)
        if code:
            text = ctypes.c_char_p()
            self._functions["cuGetErrorName"](code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


@functools.cache
def load_driver() -> Driver:
    """Load the driver, once a process.

    Raises:
        DriverError: It is not there.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver cannot be loaded: {error}") from error
    return Driver(library)
