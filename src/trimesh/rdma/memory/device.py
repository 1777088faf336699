"""Memory of CUDA devices: which device, what others need to open it, and copies on a stream of their own.

torch is not imported: who has a CUDA tensor has it. Streams, events and pinned memory are torch's.

    CD-1 Nothing is queued on a device before what was queued there before the call has ended: so a copy ends soon after
         it has begun, whatever the program computes.
    CD-2 A device is waited for only by looking at an event, and for no more of it than that event.

    ST-1 A place is not touched while a copy to or from it is under way.
    ST-2 A transfer is left, in whatever way, with no copy under way; if one does not end, its memory is kept.
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

# What buffers need of the CUDA driver and torch has no public name for: handles on memory, and copies by address.
#
# torch's own sharing is not used: it counts readers in a file under /dev/shm that outlives a killed process, needs to
# know their number, and its handles are for the same version of torch only.

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


# ---- device ----------------------------------------------------------------------------------------------------------

_kept: Final[list[object]] = []
"""Memory of copies that have not ended (ST-2)."""

_limiter: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("CUDA threads of trimesh")

T = TypeVar("T")
P = ParamSpec("P")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that takes a while; a cancel waits for it. A checkpoint."""
    return await trio.to_thread.run_sync(partial(function, *args, **kwargs), limiter=_threads())


def _threads() -> trio.CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(limits.CUDA_THREADS)
        _limiter.set(limiter)
        return limiter


def _torch() -> Any:
    """Return torch, which is there wherever a tensor or a device is known."""
    return sys.modules["torch"]


def space_of(device: Any) -> str:
    """Return the name that all processes know a CUDA device by."""
    return f"cuda:{_torch().cuda.get_device_properties(device).uuid}"


def find_device(space: str) -> tuple[int | None, str]:
    """Return the number of a device in this process, or None and the reason why it has none."""
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
    """Return what tells whether the work has ended that is queued now on the current stream of a device."""
    torch = _torch()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    tell: Callable[[], bool] = event.query
    return tell


def new_stream(index: int) -> Any:
    """Return a stream on a device, one of those that torch keeps."""
    return _torch().cuda.Stream(device=index)


def settle_writes(index: int) -> None:
    """Have a device see what an adapter has written to its memory; then what is queued from now on reads it.

    Raises:
        DriverError: The driver has no such function, or has refused it.
    """
    load_driver().flush_writes(new_stream(index).cuda_stream)


# ---- what others may reach -------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class DeviceMemory:
    """Memory of a device that this process has granted.

    Attributes:
        address, nbytes: Where it is.
        keep: What keeps it there.
        ready: The event that the ticket names.
        ticket: What others need.
    """

    address: int
    nbytes: int
    keep: object
    ready: Any
    ticket: Ticket

    def is_ready(self) -> bool:
        """Return whether what was queued when the buffer was made has ended."""
        return bool(self.ready.query())


_granted: Final[weakref.WeakValueDictionary[int, DeviceMemory]] = weakref.WeakValueDictionary()
"""By the number of its ticket: a process cannot open what it has itself made a handle for."""


def granted_here(number: int) -> DeviceMemory | None:
    """Return the memory of this process that a ticket names."""
    return _granted.get(number)


def share(tensor: Any, span: Span, text: str) -> DeviceMemory:
    """Make what others need to open the memory of a tensor.

    Args:
        tensor: On a CUDA device.
        span: Its memory.
        text: What it is, for people.

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
            f"the memory of a buffer must be such as CUDA shares among processes, got {text}: {error}. Expandable "
            "segments are not, nor is what cudaMallocAsync has made: set PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:False,backend:native before the tensor is made"
        ) from error
    number = _random_number()
    ticket = Ticket(space_of(tensor.device), number, handle, span.address - base, span.nbytes, ready_handle)
    made = DeviceMemory(span.address, span.nbytes, span.keep, ready, ticket)
    _granted[number] = made
    return made


# ---- what others have granted ----------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Opened:
    """Memory of a device that another process has granted, while it is open here.

    Attributes:
        address: Of its first byte, here.
    """

    address: int
    _base: int
    _stream: Any
    _driver: Driver
    _ready: Any

    def is_ready(self) -> bool:
        """Return whether what the owner had queued when it made the buffer has ended."""
        return bool(self._ready.query())

    def close(self) -> None:
        """Let go of it. By any thread: the driver may take a while."""
        self._driver.close(self._stream.cuda_stream, self._base)


def open_memory(ticket: Ticket, index: int) -> Opened:
    """Open memory of another process, on the device with this number here. By any thread: it may take a while.

    Raises:
        RuntimeError: It cannot be opened.
    """
    torch = _torch()
    driver, stream = load_driver(), new_stream(index)
    ready = torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), ticket.ready)
    base = driver.open(stream.cuda_stream, ticket.memory)
    return Opened(base + ticket.offset, base, stream, driver, ready)


async def close(opened: Opened) -> None:
    """Let go of memory of another process, also when cancelled; a driver that hangs is left to do it alone."""
    with trio.move_on_after(limits.CUDA_END_SECONDS, shield=True), suppress(RuntimeError):
        await trio.to_thread.run_sync(opened.close, abandon_on_cancel=True, limiter=_threads())


# ---- copies ----------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class DeviceLane:
    """Copies between memory of a device and pinned places, or between it and memory of any device.

    Attributes:
        index: The device.
        there: Address of the memory.
        near: Address of the other end, for a place and where the piece starts.
        is_feed: Whether bytes go to `there`.
        memory: What keeps both ends.
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
        """Begin to copy bytes `start` to `stop` of the memory to or from a place.

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
        """Return whether no copy to or from the place is under way.

        Raises:
            RuntimeError: The device has failed.
        """
        return place not in self._events or bool(self._events[place].query())

    def keep(self) -> None:
        """Keep the memory at both ends until the process ends."""
        _kept.append(self)


async def pinned_places(nbytes: int) -> list[Span]:
    """Return pinned memory for the pieces of a transfer of `nbytes`; torch keeps it for the next."""
    size = min(nbytes, limits.CUDA_PIECE_BYTES)
    count = PLACES if nbytes > size else 1
    return await in_thread(_pin, size, count)  # new pages take milliseconds; no mode of torch's is there


def _pin(size: int, count: int) -> list[Span]:
    torch = _torch()
    made = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(count)]
    return [Span(one.data_ptr(), size, one) for one in made]


def _random_number() -> int:
    import secrets  # noqa: PLC0415 - few programs need it

    return secrets.randbits(62)


# ---- staging ---------------------------------------------------------------------------------------------------------

# How bytes go between a device and what carries them: in pieces, a copy and a carrier at work at the same time.
#
# There are two *places*, pieces of pinned memory as a rule. While a carrier fills the one, the device is given what is
# in the other.

PLACES: Final = 2

Step = Callable[[int, int, int], Awaitable[object]]
"""What is done with a piece at the other end: called with the place, and where the piece starts and stops."""


def pieces(nbytes: int, size: int) -> list[tuple[int, int]]:
    """Return start and stop of each piece."""
    return [(start, min(nbytes, start + size)) for start in range(0, nbytes, size)]


async def until(is_done: Callable[[], bool], meanwhile: Callable[[], Awaitable[object]] | None = None) -> None:
    """Wait for a device, which does not tell: look again and again. A checkpoint, cancellable.

    Args:
        is_done: Whether the wait is over.
        meanwhile: Done after each look; may raise.
    """
    pause = limits.CUDA_POLL_SECONDS
    await trio.lowlevel.checkpoint()
    while not is_done():
        await trio.sleep(pause)
        if meanwhile is not None:
            await meanwhile()
        pause = min(2 * pause, limits.CUDA_POLL_SECONDS_MAX)


async def feed(lane: DeviceLane, step: Step, nbytes: int, size: int) -> None:
    """Bring bytes to the device: `step` fills a place, the lane empties it."""
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
    """Bring bytes from the device: the lane fills a place, `step` empties it."""
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
