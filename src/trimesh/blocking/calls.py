"""Blocking handles, with methods derived from those of the wrapped Trio handle: verbs, channels, buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial, wraps
from types import FunctionType, TracebackType
from typing import Any, Concatenate, Generic, Never, ParamSpec, Self, TypeGuard, TypeVar, cast, overload

import trio

from trimesh._runtime import channels
from trimesh._wire.exceptions.tracebacks import shortens_tracebacks
from trimesh.actor import channel, endpoint
from trimesh.actor.options import Members, Merge, Retry
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.actor.results import Results
from trimesh.actor.verbs import Outcome
from trimesh.blocking.work import AnyBody, CallFuture, Each, FacedBody, body_of, submit, wait, wait_now
from trimesh.errors import Origin
from trimesh.events import Event, MembershipView
from trimesh.rdma.buffers import buffer
from trimesh.shape.extent import Extent, Point
from trimesh.shape.value_mesh import Shaped, ValueMesh

P = ParamSpec("P")
S = TypeVar("S")
ObjectT = TypeVar("ObjectT")
InnerT = TypeVar("InnerT", bound=Shaped)
T = TypeVar("T")


class EventStream(Each[Event]):
    """Event stream of one reader: `for event in events`. Ends when the mesh has stopped."""


class MembershipViews(Each[MembershipView]):
    """Stream of a mesh's membership for one reader: `for view in views`. Ends when the mesh has stopped."""


class ClosedByBlock(ABC):
    """An object that `close`, or the end of a `with` block, closes."""

    @abstractmethod
    def close(self, /) -> None:
        """Close it."""

    def __enter__(self) -> Self:
        """Return it; the end of the block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class FacedObject(Generic[ObjectT]):
    """Blocking form of an object of `trimesh`. Sent to an actor it arrives as that object."""

    def __init_subclass__(cls) -> None:
        """Shorten the tracebacks of all methods: in notebook cells no block does that."""
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, shortens_tracebacks(method))

    def __init__(self, inner: ObjectT, home: AnyBody | None = None) -> None:
        self._inner = inner
        self._home = home

    def _wait(self, function: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T:
        return wait(bound(function, args, kwargs), self._home)

    def _now(self, function: Callable[[], T]) -> T:
        return wait_now(function, self._home)

    def _seen(self, inner: ObjectT) -> Self:
        return type(self)(inner, self._home)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> Any:
        return self._inner.__reduce__()


# ---- methods of the objects inside: `kill = waits(proc_mesh.ProcMesh.kill)` ------------------------------------------

# Signature and docstring come from the given method. In a generic class, methods with parameters of the class in their
# types are written out instead, because pyright replaces such parameters by Any in the calls below.


class Attribute(Generic[ObjectT, T]):
    """An attribute of the object inside: `files = Attribute[Synced, int](lambda synced: synced.files)`."""

    def __init__(self, read: Callable[[ObjectT], T]) -> None:
        self._read = read

    def __get__(self, instance: FacedObject[Any] | None, owner: object = None) -> T:
        return cast("T", self) if instance is None else self._read(instance._inner)  # noqa: SLF001

    def __set__(self, instance: object, value: Never) -> None:
        raise AttributeError("attributes of handles cannot be set: keep the value in a variable")


def waits(method: Callable[Concatenate[Any, P], Awaitable[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls an async method of the object inside, and waits for its result."""
    return mirrored(method, lambda self, call: wait(call, self._home))


def calls_in_trio(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls a plain method of the object inside, in the thread of Trio."""
    return mirrored(method, lambda self, call: wait_now(call, self._home))


def calls_here(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls a plain method of the object inside, in the caller's thread."""
    return mirrored(method, lambda _, call: call())


def returns_face(method: Callable[Concatenate[Any, P], object]) -> Callable[Concatenate[S, P], S]:
    """Return a method that wraps the result of another, such as a view or a clone, in its own class."""

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._seen(method(self, *args, **kwargs))

    return cast("Callable[Concatenate[S, P], S]", call)


def enters(
    method: Callable[Concatenate[Any, P], AbstractAsyncContextManager[T]], what: str
) -> Callable[Concatenate[Any, P], AbstractContextManager[T]]:
    """Return a method whose result is entered by `with`; `what` names it in errors, `{0}` is the object."""
    return mirrored(method, lambda self, call: body_of(call(), what.format(self), self._home))


def mirrored(
    method: Callable[Concatenate[Any, P], Any], act: Callable[[FacedObject[Any], partial[Any]], T]
) -> Callable[Concatenate[Any, P], T]:
    """Return a method with the name and docstring of another; `act` gets the object and the call of the inner one."""
    name = method.__name__

    @wraps(method)
    def call(self: FacedObject[Any], /, *args: Any, **kwargs: Any) -> Any:
        return act(self, bound(getattr(self._inner, name), args, kwargs))

    call.__doc__ = (method.__doc__ or "").replace("async ", "").replace("await ", "")
    return call


class FacedHandle(FacedObject[InnerT]):
    """Blocking form of a mesh. Sent to an actor it arrives as a handle of `trimesh`."""

    name = Attribute[Any, str](lambda mesh: str(mesh.name))
    extent = Attribute[Shaped, Extent](lambda mesh: mesh.extent)
    size = calls_here(Shaped.size)
    points = calls_here(Shaped.points)
    slice = returns_face(calls_here(Shaped.slice))
    flatten = returns_face(calls_here(Shaped.flatten))
    split = returns_face(calls_here(Shaped.split))
    rename = returns_face(calls_here(Shaped.rename))
    exclude = returns_face(calls_here(Shaped.exclude))
    alive = returns_face(calls_in_trio(Shaped.alive))
    statistics = calls_in_trio(ProcMesh.statistics)

    def __len__(self) -> int:
        """Return the number of members that are not missing."""
        return len(self._inner)

    def events(self) -> AbstractContextManager[EventStream]:
        """Read events of the members: `with mesh.events() as events: for event in events`."""
        mesh: Any = self._inner
        body = body_of(mesh.events(), f"the events of {self.name}", self._home)
        return FacedBody(body, lambda events: EventStream(events, self._home))

    def _repr_html_(self) -> str:
        """Return a table of the live members for notebooks. It does not raise the failure of a block; calls do."""

        async def show() -> str:
            return self._inner._repr_html_()

        return wait(show)


def itself(value: T) -> T:
    """Return the argument: messages rebuild a blocking object by it, as the object inside."""
    return value


def _is_faced(value: Any) -> TypeGuard[FacedObject[Any]]:
    return isinstance(value, FacedObject)


def inner_of(value: Any) -> Any:
    """Return the object inside a blocking one; any other value as it is."""
    return value._inner if _is_faced(value) else value  # noqa: SLF001


def home_of(value: Any) -> AnyBody | None:
    """Return the block that a blocking handle belongs to; None for any other value."""
    return value._home if _is_faced(value) else None  # noqa: SLF001


def run(function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run an async function in Trio, inside the innermost block around the caller, and wait for its result.

    For functions that have no blocking form: `run(buffer.read_into, tensor)`, `run(trimesh.fetch, value)`, or a
    function of your own that uses the handles of `trimesh`: of a blocking mesh it gets the mesh of `trimesh`, for
    example for tensors: `run(train, procs)`.

    Raises:
        Cancelled: The time limit around it expired, or the block was cancelled.
        KeyboardInterrupt: Ctrl-C, in the main thread; the work was cancelled and has ended.
        RuntimeError: The caller is a Trio task.
        BaseException: Error of the function.
    """
    return wait(bound(function, args, kwargs))


def bound(function: Callable[..., T], args: Iterable[Any], kwargs: Mapping[str, Any]) -> partial[T]:
    """Return a call with the objects inside its blocking arguments."""
    return partial(function, *map(inner_of, args), **{name: inner_of(value) for name, value in kwargs.items()})


# ---- endpoints, channels and buffers ---------------------------------------------------------------------------------

R = TypeVar("R")


class Verb(Generic[P, T]):
    """A verb with a result: a call waits for it, `submit` returns a future.

    It raises the errors of the verb of `trimesh`, and also:

    Raises:
        Cancelled: The time limit around it expired, or the block was cancelled; the call was cancelled.
        KeyboardInterrupt: Ctrl-C, in the main thread; the call was cancelled, on the remote side, too.
        RuntimeError: The caller is a Trio task, or in a forked process.
    """

    __slots__ = ("_home", "_verb")

    def __init__(self, verb: Callable[P, Awaitable[T]], home: AnyBody | None) -> None:
        self._verb = verb
        self._home = home

    @shortens_tracebacks
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call, and wait for the result."""
        return wait(self._work(args, kwargs), self._home)

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]:
        """Call, and return a `concurrent.futures.Future`; its `cancel()` cancels the call, on the remote side, too.

        Leaving the block waits for the call. Ctrl-C ends the wait of `result()`, not the call.
        """
        return submit(self._work(args, kwargs), self._home)

    def _work(self, args: Any, kwargs: Any) -> Callable[[], Awaitable[T]]:
        return bound(self._verb, args, kwargs)


class Endpoint(Generic[P, R]):
    """An endpoint of all members of a mesh, or of a view of one; `trimesh.Endpoint` describes each verb."""

    __slots__ = ("_home", "_inner")

    def __init__(self, inner: endpoint.Endpoint[P, R], home: AnyBody | None) -> None:
        self._inner = inner
        self._home = home

    def options(
        self,
        *,
        merge: Merge | None = None,
        window: int | None = None,
        retry: Retry | None = None,
        abandon_after: float | None = None,
        choose: bool | None = None,
        reply_to: channels.Port[tuple[Point, Outcome[R]]] | None = None,
        members: Members | None = None,
    ) -> Endpoint[P, R]:
        """Return a handle on the same endpoint with options for its verbs; see `trimesh.Endpoint.options`."""
        inner = self._inner.options(
            merge=merge,
            window=window,
            retry=retry,
            abandon_after=abandon_after,
            choose=choose,
            reply_to=reply_to,
            members=members,
        )
        return Endpoint(inner, self._home)

    @property
    def call(self) -> Verb[P, ValueMesh[R]]:
        """Run the endpoint on every member and return all results."""
        return Verb(self._inner.call, self._home)

    @property
    def call_settled(self) -> Verb[P, ValueMesh[Outcome[R]]]:
        """Run the endpoint on every member and return each outcome."""
        return Verb(self._inner.call_settled, self._home)

    @property
    def call_one(self) -> Verb[P, R]:
        """Run the endpoint of a mesh of one member."""
        return Verb(self._inner.call_one, self._home)

    @property
    def choose(self) -> Verb[P, R]:
        """Run the endpoint on the live member with the fewest unended calls."""
        return Verb(self._inner.choose, self._home)

    @overload
    def call_reduced(self, fn: Callable[[R, R], R], /, *, commutative: bool = False) -> Verb[P, R]: ...
    @overload
    def call_reduced(
        self, fn: Callable[[R, R], R], /, *, along: str | Sequence[str], commutative: bool = False
    ) -> Verb[P, ValueMesh[R]]: ...
    def call_reduced(
        self, fn: Callable[[R, R], R], /, *, along: str | Sequence[str] | None = None, commutative: bool = False
    ) -> Verb[P, Any]:
        """Return a verb that folds the results of all members; `fn` is called in the thread of Trio.

        See `trimesh.Endpoint.call_reduced`.
        """
        inner: Any = self._inner.call_reduced
        return Verb(inner(fn, along=along, commutative=commutative), self._home)

    @property
    def broadcast(self) -> Verb[P, None]:
        """Send to every member and return once the message is queued everywhere."""
        return Verb(self._inner.broadcast, self._home)

    def broadcast_nowait(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send to every member now; see `trimesh.Endpoint.broadcast_nowait`."""
        wait_now(bound(self._inner.broadcast_nowait, args, kwargs), self._home)

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[Iterator[tuple[Point, R]]]:
        """Run the endpoint on every member: `with ... as results: for point, value in results`, as they arrive.

        Leaving the block early cancels the endpoints and waits until they have unwound.
        """
        return self._results(bound(self._inner.stream, args, kwargs)())

    def map(
        self, items: Iterable[Any], *, window: int | None = None
    ) -> AbstractContextManager[Iterator[tuple[int, R]]]:
        """Run the endpoint once for each item: `with ... as results: for index, value in results`, as they arrive.

        Args:
            items: Iterated in the thread of Trio, so that taking an item must not block, nor wait for calls.
            window: Items that may be under way; see `trimesh.Endpoint.map`.
        """
        return self._results(self._inner.map(inner_items(items), window=window))

    def _results(self, results: Results[T]) -> AbstractContextManager[Iterator[T]]:
        body = body_of(results, f"the results of {results.what}", self._home)
        return FacedBody(body, lambda entered: Each(entered, self._home))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Refuse: an endpoint of a mesh is called by a verb (rule C5)."""
        raise TypeError(
            f"an endpoint of a mesh must be called by a verb, got {self!r}(...): "
            "write .call(...), .call_one, .choose, .broadcast, .stream or .map"
        )

    def __repr__(self) -> str:
        return repr(self._inner)


def inner_items(items: Iterable[Any]) -> Generator[Any, None, None]:
    try:
        yield from map(inner_of, items)
    finally:
        if isinstance(items, Generator):
            items.close()


class Port(FacedObject["channels.Port[T]"], ClosedByBlock, Generic[T]):
    """The sending end of a channel; see `trimesh.Port`. Sent to an actor it arrives as one.

    A wait that `Cancelled` or Ctrl-C ends has sent nothing.
    """

    capacity = Attribute["channels.Port[Any]", int](lambda port: port.capacity)
    clone = returns_face(calls_in_trio(channels.Port[Any].clone))
    close = calls_in_trio(channels.Port[Any].close)

    def send(self, value: T) -> None:
        """Send an item; block while there is no room. Raises as `trimesh.Port.send`."""
        self._wait(self._inner.send, value)

    def send_nowait(self, value: T) -> None:
        """Send an item now; raise `trio.WouldBlock` if there is no room. See `trimesh.Port.send_nowait`."""
        self._now(bound(self._inner.send_nowait, (value,), {}))

    def __reduce__(self) -> Any:
        """Reduce to the port inside, which only messages can carry, because they count ports."""
        return itself, (self._inner,)


class Receiver(Each[T], ClosedByBlock):
    """The receiving end of a channel: `for item in receiver` ends when no port is left. See `trimesh.Receiver`."""

    def __init__(self, inner: channels.Receiver[T], home: AnyBody | None = None) -> None:
        super().__init__(inner, home)
        self._inner = inner

    def receive(self) -> T:
        """Wait for the next item and return it. An item that arrives together with a Ctrl-C is not lost.

        Raises:
            trio.EndOfChannel: No port is left, and everything that was sent has been received.
            trio.ClosedResourceError: This receiver is closed.
        """
        try:
            return next(self)
        except StopIteration:
            raise trio.EndOfChannel from None

    def receive_nowait(self) -> T:
        """Return the next item; raise `trio.WouldBlock` if none has arrived."""
        return self.take_kept() if self.has_kept else wait_now(self._inner.receive_nowait, self._home)

    def close(self) -> None:
        """Stop receiving; items that arrived and were not received are lost. Idempotent."""
        wait_now(self._inner.close, self._home)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse, as the receiver of `trimesh` does."""
        return self._inner.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self._inner)


@overload
def open_channel(item_type: type[T], /, *, capacity: int) -> AbstractContextManager[tuple[Port[T], Receiver[T]]]: ...
@overload
def open_channel(
    item_type: None = None, /, *, capacity: int
) -> AbstractContextManager[tuple[Port[Any], Receiver[Any]]]: ...
def open_channel(
    item_type: type[Any] | None = None, /, *, capacity: int
) -> AbstractContextManager[tuple[Port[Any], Receiver[Any]]]:
    """Open a channel: `with tb.open_channel(int, capacity=64) as (port, receiver):`.

    Every holder of the port may send, this process receives; leaving the block closes both. See `trimesh.open_channel`.
    """
    opening = cast("Any", channel.open_channel)(item_type, capacity=capacity)
    body: Any = body_of(opening, "a channel")
    return FacedBody(body, lambda ends: (Port(ends[0], body), Receiver(ends[1], body)))


class RDMABuffer(FacedObject["buffer.RDMABuffer"], ClosedByBlock):
    """Memory of this process that others may access. Sent to an actor it arrives as a `trimesh.RDMABuffer`.

    `tb.face(buffer)` gives this form to a buffer that an endpoint returned or received. Waits end like those of calls,
    by `Cancelled` or by Ctrl-C; the destination of an interrupted copy has undefined contents.

    Args:
        data: A contiguous torch tensor, numpy array, memoryview or bytearray. The buffer keeps a reference to it.
        writable: Whether others may write; then `data` must be writable.

    Raises:
        TypeError, ValueError, LimitExceeded: As for `trimesh.RDMABuffer`.
        RuntimeError: No mesh is open here.
    """

    def __init__(self, data: Any, *, writable: bool = True) -> None:
        super().__init__(wait_now(lambda: buffer.RDMABuffer(data, writable=writable)))

    @classmethod
    def of(cls, inner: buffer.RDMABuffer) -> Self:
        """Return the form without `await` of a buffer, or a handle on one."""
        self = cls.__new__(cls)
        super(RDMABuffer, self).__init__(inner)
        return self

    nbytes = Attribute[buffer.RDMABuffer, int](lambda held: held.nbytes)
    is_writable = Attribute[buffer.RDMABuffer, bool](lambda held: held.is_writable)
    owner = Attribute[buffer.RDMABuffer, Origin](lambda held: held.owner)
    readonly = returns_face(calls_in_trio(buffer.RDMABuffer.readonly))
    read_into = waits(buffer.RDMABuffer.read_into)
    write_from = waits(buffer.RDMABuffer.write_from)
    fetch_add = waits(buffer.RDMABuffer.fetch_add)
    compare_and_swap = waits(buffer.RDMABuffer.compare_and_swap)
    map = enters(buffer.RDMABuffer.map, "the memory of a buffer")
    close = waits(buffer.RDMABuffer.aclose)

    @property
    def backend(self) -> str:
        """Name of the carrier between this process and the buffer; see `trimesh.RDMABuffer.backend`."""
        return self._now(lambda: self._inner.backend)

    def __getitem__(self, part: slice) -> Self:
        """Return a handle on some of its bytes, `buffer[start:stop]`."""
        return self._seen(self._inner[part])

    def _seen(self, inner: buffer.RDMABuffer) -> Self:
        return self.of(inner)
