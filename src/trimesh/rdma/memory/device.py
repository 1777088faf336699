"""Memory of CUDA devices: which device, what others need to open it, and copies on a stream of their own.

torch is not imported: who has a CUDA tensor has it. Streams, events and pinned memory are torch's.

    CD-1 Nothing is queued on a device before what was queued there before the call has ended: so a copy ends soon after
         it has begun, whatever the program computes.
    CD-2 A device is waited for only by looking at an event, and for no more of it than that event.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import attrs
import trio

from trimesh import limits
from trimesh._transport.interface.mover import Span
from trimesh.rdma.memory.driver import Driver, load_driver
from trimesh.rdma.memory.staging import PLACES
from trimesh.rdma.memory.ticket import Ticket

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
