"""Memory of CUDA devices: names of devices, IPC handles, and copies on a separate stream.

torch is not imported here: a program that has a CUDA tensor has it. Streams, events and pinned memory are torch's.

    CD-1 A copy is queued only when the work queued on the device before the call has ended. So it ends soon after it
         has begun, whatever the program computes.
    CD-2 A wait for a device polls one event, and never synchronises the device or a stream.

    ST-1 A place (see below) is not touched while a copy to or from it is in progress.
    ST-2 A transfer leaves no copy in progress, however it ends; if a copy does not end, its memory is kept.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import attrs
import trio

from trimesh import limits
from trimesh._transport.interface import Span
from trimesh.rdma.memory.handle import CUDA_HANDLE_BYTES, Ticket

# Parts of the CUDA driver that torch does not expose publicly: IPC handles on memory, and copies by address.
#
# torch's own sharing is not used: it counts readers in a file under /dev/shm that outlives a killed process, it needs
# their number in advance, and its handles work only with the same version of torch.

_LAZY_PEER_ACCESS: Final = 1
"""`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`; the driver takes no other value."""


class DriverError(RuntimeError):
    """The CUDA driver refused a call, or is missing."""


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
"""Functions and their argument types, as in cuda.h; all return a `CUresult`."""

_FLUSH: Final = "cuFlushGPUDirectRDMAWrites"
_FLUSH_TYPES: Final = (ctypes.c_int, ctypes.c_int)
"""Argument types of the flush function, optional: drivers have it since CUDA 11.3."""
_CURRENT_CONTEXT: Final = 0
_TO_OWNER: Final = 100
"""`CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX` and `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER`."""


class Driver:
    """The CUDA driver. Each call takes the number of a stream that torch has made, which determines the device.

    Any thread may call: the stream's context is current during the call, which releases the GIL.

    Raises:
        DriverError: By each method: the driver refused the call.
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
        """Return start and size of the allocation that contains an address."""
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
        """Map an allocation of another process and return its local address; `close` it as often as it was opened."""
        address = _Address()
        with self._current(stream):
            made = _MemoryHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), made, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, stream: int, address: int) -> None:
        """Release an address that `open` returned."""
        with self._current(stream):
            self._call("cuIpcCloseMemHandle", address)

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Queue a copy between any two addresses, of devices or of pinned memory."""
        with self._current(stream):
            self._call("cuMemcpyAsync", to, source, nbytes, stream)

    def flush_writes(self, stream: int) -> None:
        """Make adapters' writes to device memory visible to the device of a stream."""
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
    """Load the driver, once per process.

    Raises:
        DriverError: It is missing.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver cannot be loaded: {error}") from error
    return Driver(library)


# ---- device ----------------------------------------------------------------------------------------------------------

_kept: Final[list[object]] = []
"""Memory of copies that never ended (ST-2)."""

_limiter: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("CUDA threads of trimesh")

T = TypeVar("T")
P = ParamSpec("P")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a slow function in a thread; a cancel waits for it. A checkpoint."""
    return await trio.to_thread.run_sync(partial(function, *args, **kwargs), limiter=_threads())


def _threads() -> trio.CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(limits.CUDA_THREADS)
        _limiter.set(limiter)
        return limiter


def _torch() -> Any:
    """Return torch, which is loaded wherever there is a tensor or a device."""
    return sys.modules["torch"]


def space_of(device: Any) -> str:
    """Return the name of a CUDA device that is the same in all processes."""
    return f"cuda:{_torch().cuda.get_device_properties(device).uuid}"


def find_device(space: str) -> tuple[int | None, str]:
    """Return the index of a device in this process, or None and the reason why it has none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None, "torch is not imported in this process"
    try:
        if not torch.cuda.is_available():
            return None, "torch sees no CUDA device in this process"
        seen = {space_of(index): index for index in range(torch.cuda.device_count())}
    except (RuntimeError, AssertionError) as error:  # torch raises either when CUDA cannot be started
        return None, f"CUDA does not start in this process: {error}"
    if space not in seen:
        return None, f"this process sees {', '.join(seen)} and not {space}, see CUDA_VISIBLE_DEVICES"
    return seen[space], ""


def queued_before(device: Any) -> Callable[[], bool]:
    """Return a function that polls whether the work now queued on the device's current stream has ended."""
    torch = _torch()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    tell: Callable[[], bool] = event.query
    return tell


def new_stream(index: int) -> Any:
    """Return a stream of torch's pool on a device."""
    return _torch().cuda.Stream(device=index)


def settle_writes(index: int) -> None:
    """Make an adapter's writes to device memory visible to work that is queued from now on.

    Raises:
        DriverError: The driver has no such function, or refused the call.
    """
    load_driver().flush_writes(new_stream(index).cuda_stream)


# ---- granted memory --------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class DeviceMemory:
    """Memory of a device that this process has granted.

    Attributes:
        address, nbytes: Its range.
        keep: Reference that keeps it allocated.
        ready: The event that the ticket names.
        ticket: Description by which other processes open it.
    """

    address: int
    nbytes: int
    keep: object
    ready: Any
    ticket: Ticket

    def is_ready(self) -> bool:
        """Return whether the work that was queued when the buffer was made has ended."""
        return bool(self.ready.query())


_granted: Final[weakref.WeakValueDictionary[int, DeviceMemory]] = weakref.WeakValueDictionary()
"""By the number of its ticket: a process cannot open an IPC handle of its own."""


def granted_here(number: int) -> DeviceMemory | None:
    """Return the memory of this process that a ticket names."""
    return _granted.get(number)


def share(tensor: Any, span: Span, text: str) -> DeviceMemory:
    """Make the ticket by which other processes open the memory of a tensor.

    Args:
        tensor: On a CUDA device.
        span: Its memory.
        text: Description for error messages.

    Raises:
        ValueError: CUDA does not share this memory.
    """
    torch = _torch()
    stream = new_stream(tensor.device.index).cuda_stream
    try:
        driver = load_driver()
        base, _ = driver.allocation_of(stream, span.address)
        handle = driver.handle_of(stream, base)
        ready = torch.cuda.Event(interprocess=True)
        ready.record(torch.cuda.current_stream(tensor.device))
        ready_handle = bytes(ready.ipc_handle())
    except RuntimeError as error:
        raise ValueError(
            f"a buffer needs memory that CUDA can share between processes, got {text}: {error}. It cannot share "
            "expandable segments, nor memory of cudaMallocAsync: set PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:False,backend:native before the tensor is made"
        ) from error
    number = _random_number()
    ticket = Ticket(space_of(tensor.device), number, handle, span.address - base, span.nbytes, ready_handle)
    made = DeviceMemory(span.address, span.nbytes, span.keep, ready, ticket)
    _granted[number] = made
    return made


# ---- memory of other processes ---------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Opened:
    """Memory of a device that another process has granted, while it is open here.

    Attributes:
        address: Local address of its first byte.
    """

    address: int
    _base: int
    _stream: Any
    _driver: Driver
    _ready: Any

    def is_ready(self) -> bool:
        """Return whether the work that the owner had queued when it made the buffer has ended."""
        return bool(self._ready.query())

    def close(self) -> None:
        """Release it. For any thread, since the driver may take a while."""
        self._driver.close(self._stream.cuda_stream, self._base)


def open_memory(ticket: Ticket, index: int) -> Opened:
    """Open memory of another process on the device with this local index. For any thread, since it may take a while.

    Raises:
        RuntimeError: It cannot be opened.
    """
    torch = _torch()
    driver, stream = load_driver(), new_stream(index)
    ready = torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), ticket.ready)
    base = driver.open(stream.cuda_stream, ticket.memory)
    return Opened(base + ticket.offset, base, stream, driver, ready)


async def close(opened: Opened) -> None:
    """Release memory of another process, also when cancelled; a driver that hangs is not awaited."""
    with trio.move_on_after(limits.CUDA_END_SECONDS, shield=True), suppress(RuntimeError):
        await trio.to_thread.run_sync(opened.close, abandon_on_cancel=True, limiter=_threads())


# ---- copies ----------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class DeviceLane:
    """Copies between device memory and pinned places, or between two devices.

    Attributes:
        index: The device.
        there: Address of the memory.
        near: Returns the address of the other end, given a place and the start of the piece.
        is_feed: True if bytes are copied to `there`.
        memory: Reference that keeps both ends allocated.
    """

    index: int
    there: int
    near: Callable[[int, int], int]
    is_feed: bool
    memory: object
    _driver: Driver = attrs.field(factory=load_driver)
    _stream: Any = attrs.field(init=False)
    _events: dict[int, Any] = attrs.field(factory=dict[int, Any], init=False)

    def __attrs_post_init__(self) -> None:
        self._stream = new_stream(self.index)

    def begin(self, place: int, start: int, stop: int) -> None:
        """Queue a copy of bytes `start` to `stop` of the memory to or from a place.

        Raises:
            DriverError: The driver has refused it.
        """
        there, near = self.there + start, self.near(place, start)
        to, source = (there, near) if self.is_feed else (near, there)
        self._driver.copy(self._stream.cuda_stream, to, source, stop - start)
        event = _torch().cuda.Event()
        event.record(self._stream)
        self._events[place] = event

    def is_done(self, place: int) -> bool:
        """Return whether no copy to or from the place is in progress.

        Raises:
            RuntimeError: The device has failed.
        """
        return place not in self._events or bool(self._events[place].query())

    def keep(self) -> None:
        """Keep the memory at both ends until the process ends."""
        _kept.append(self)


async def pinned_places(nbytes: int) -> list[Span]:
    """Return pinned memory for the pieces of a transfer of `nbytes`; torch caches it."""
    size = min(nbytes, limits.CUDA_PIECE_BYTES)
    count = PLACES if nbytes > size else 1
    return await in_thread(_pin, size, count)  # pinning takes milliseconds; the thread has none of the caller's modes


def _pin(size: int, count: int) -> list[Span]:
    torch = _torch()
    made = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(count)]
    return [Span(one.data_ptr(), size, one) for one in made]


def _random_number() -> int:
    import secrets  # noqa: PLC0415 - few programs need it

    return secrets.randbits(62)


# ---- staging ---------------------------------------------------------------------------------------------------------

# Bytes move between a device and a carrier in pieces, through two *places*, usually pinned memory: while the carrier
# fills one, the device copies from the other.

PLACES: Final = 2

Step = Callable[[int, int, int], Awaitable[object]]
"""Transfer of one piece at the other end, called with the place and the start and stop of the piece."""


def pieces(nbytes: int, size: int) -> list[tuple[int, int]]:
    """Return start and stop of each piece."""
    return [(start, min(nbytes, start + size)) for start in range(0, nbytes, size)]


async def until(is_done: Callable[[], bool], meanwhile: Callable[[], Awaitable[object]] | None = None) -> None:
    """Poll a device until a condition holds. A checkpoint, cancellable.

    Args:
        is_done: The condition.
        meanwhile: Called after each poll; may raise.
    """
    pause = limits.CUDA_POLL_SECONDS
    await trio.lowlevel.checkpoint()
    while not is_done():
        await trio.sleep(pause)
        if meanwhile is not None:
            await meanwhile()
        pause = min(2 * pause, limits.CUDA_POLL_SECONDS_MAX)


async def feed(lane: DeviceLane, step: Step, nbytes: int, size: int) -> None:
    """Copy bytes to the device: `step` fills a place, the lane empties it."""
    try:
        for number, (start, stop) in enumerate(pieces(nbytes, size)):
            place = number % PLACES
            await _until_done(lane, place)
            await step(place, start, stop)
            lane.begin(place, start, stop)
        await _until_all_done(lane)
    except BaseException:
        await _end(lane)
        raise


async def drain(lane: DeviceLane, step: Step, nbytes: int, size: int) -> None:
    """Copy bytes from the device: the lane fills a place, `step` empties it."""
    cut = pieces(nbytes, size)
    try:
        lane.begin(0, *cut[0])
        for number, (start, stop) in enumerate(cut):
            place = number % PLACES
            if number + 1 < len(cut):  # that place is empty: its last step has ended
                lane.begin((number + 1) % PLACES, *cut[number + 1])
            await _until_done(lane, place)
            await step(place, start, stop)
    except BaseException:
        await _end(lane)
        raise


async def _until_done(lane: DeviceLane, place: int) -> None:
    await until(lambda: lane.is_done(place))


async def _until_all_done(lane: DeviceLane) -> None:
    for place in range(PLACES):
        await _until_done(lane, place)


async def _end(lane: DeviceLane) -> None:
    """See ST-2."""
    with trio.move_on_after(limits.CUDA_END_SECONDS, shield=True) as scope, suppress(RuntimeError):
        await _until_all_done(lane)  # a device that has failed copies nothing any more
    if scope.cancelled_caught:
        lane.keep()
