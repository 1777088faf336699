"""What an endpoint looks like without `await`: the verbs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, overload

from trimesh._runtime.channels import Port
from trimesh._wire.exceptions.frames import shortens_tracebacks
from trimesh.actor import endpoint
from trimesh.actor.options import Members, Merge, Retry
from trimesh.actor.outcome import Outcome
from trimesh.actor.results import Results
from trimesh.blocking.body import AnyBody, CallFuture, FacedBody, body_of
from trimesh.blocking.handle import inner_of
from trimesh.blocking.work import Each, submit, wait
from trimesh.shape.point import Point
from trimesh.shape.value_mesh import ValueMesh

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Verb(Generic[P, T]):
    """A verb with a result: called it waits for that, `submit` returns a future of it.

    It raises what the verb of `trimesh` raises, and beside that:

    Raises:
        Cancelled: The time limit around it is over, or the block was cancelled; the call has been cancelled.
        KeyboardInterrupt: Ctrl-C came, in the main thread; the call has been cancelled, remote side too.
        RuntimeError: The caller is in a Trio task, or in a process that was forked.
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
        """Call, and return a `concurrent.futures.Future` of the result: `cancel()` cancels the call, remote side too.

        A block that is left waits for it. Ctrl-C ends the wait of `result()`, not the call.
        """
        return submit(self._work(args, kwargs), self._home)

    def _work(self, args: Any, kwargs: Any) -> Callable[[], Awaitable[T]]:
        named = {name: inner_of(value) for name, value in kwargs.items()}
        verb: Any = self._verb
        return partial(verb, *[inner_of(value) for value in args], **named)


class Endpoint(Generic[P, R]):
    """An endpoint of all members of a mesh, or of a view of one; see `trimesh.Endpoint` for what each verb does."""

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
        reply_to: Port[tuple[Point, Outcome[R]]] | None = None,
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
        """Run the endpoint on every member and return what each came to."""
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
        call: Any = self._inner.broadcast_nowait

        async def send(*given: Any, **named: Any) -> None:
            call(*given, **named)

        Verb[..., None](send, self._home)(*args, **kwargs)

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[Iterator[tuple[Point, R]]]:
        """Run the endpoint on every member: `with ... as results: for point, value in results`, as they come.

        Leaving the block early cancels the endpoints and waits until they have unwound.
        """
        stream: Any = self._inner.stream
        given = [inner_of(value) for value in args]
        return self._results(stream(*given, **{name: inner_of(value) for name, value in kwargs.items()}))

    def map(
        self, items: Iterable[Any], *, window: int | None = None
    ) -> AbstractContextManager[Iterator[tuple[int, R]]]:
        """Run the endpoint once for each item: `with ... as results: for index, value in results`, as they come.

        Args:
            items: Taken one by one, in the thread of Trio: the next one must be at hand, and must not wait for calls.
            window: How many items may be under way; see `trimesh.Endpoint.map`.
        """
        return self._results(self._inner.map(_inner_items(items), window=window))

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


def _inner_items(items: Iterable[Any]) -> Generator[Any, None, None]:
    try:
        yield from map(inner_of, items)
    finally:
        if isinstance(items, Generator):
            items.close()
