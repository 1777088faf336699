"""`@endpoint`, and the handle on an endpoint with its verbs."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, Literal, ParamSpec, TypeVar, cast, overload

import msgspec

from trimesh._runtime.tasks import in_trio, in_trio_now
from trimesh._runtime.values import EndpointKind, EndpointSpec, is_abstract, signature_of
from trimesh.actor import replies, verbs
from trimesh.actor.item_map import ItemMap
from trimesh.actor.options import NO_OPTIONS, Members, Merge, Options, Retry, check_window, suggests_keywords
from trimesh.actor.results import Results, Stream
from trimesh.actor.started import CALL, CALL_ONE, CALL_SETTLED, CHOOSE, CallVerb
from trimesh.actor.verbs import Outcome
from trimesh.plain_numbers import plain_real, whole_number
from trimesh.shape.extent import Point
from trimesh.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from trimesh._runtime.actors import Reply
    from trimesh._runtime.channels import Port
    from trimesh.actor.view import MeshView
    from trimesh.blocking import calls as blocking

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")
"""Return type of the method itself: a coroutine, the result of a plain def, or an async generator."""


class Endpoint(Generic[P, R]):
    """An endpoint of all members of a mesh, or of a view of one.

    Every verb binds its arguments to the signature first (`TypeError`, nothing sent), then encodes them (`TypeError`
    that names the argument). Messages from one process to one actor arrive in the order in which they were sent, by
    any verb, and run at most once. A full mailbox makes the sender wait, cancellably.
    """

    # No slots: `cached_property` keeps each verb here, so that a call in a loop makes it once.

    def __init__(self, mesh: MeshView, spec: EndpointSpec, options: Options = NO_OPTIONS) -> None:
        self._mesh = mesh
        self._spec = spec
        self._options = options

    @suggests_keywords
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
        """Return a handle on the same endpoint with options for its verbs; those that are None stay as they are.

        Args:
            merge: For `stream` and `map`: "fail_fast" (the default) cancels the others when one has failed; "collect"
                lets them go on and raises all failures after the last result.
            window: For `stream` of a generator endpoint: items that each member may be ahead of the consumer
                (`limits.STREAM_WINDOW`). For `map`: items that may be under way (`limits.MAP_WINDOW`).
            retry: For `call`, `call_one`, `choose` and `map` of an idempotent endpoint: when to try again.
            abandon_after: For all verbs with results: seconds for which a caller that is cancelled, or whose deadline
                passes, waits for the members to acknowledge (`limits.CANCEL_ACK_SECONDS`); 0 does not wait. Then the
                call is *abandoned*: the endpoint may still run and have effects, and holds its slot; its result is
                dropped.
            choose: For `stream`: run on one member only, the one that the verb `choose` would take.
            reply_to: For `broadcast`: port that gets `(point, Outcome)` of each member, exactly one, when the member
                has returned, raised or died. Points are those of the view that is called.
            members: "seen" (the default) calls the members that this handle shows; one that has left its mesh raises
                `MembershipChanged`. "follow" calls those that are in the mesh when the verb is read (`ep.call`, ...):
                new ones, too, if the view has all places along the first dimension, else those that have not left. A
                process that does not own the mesh may know older members: see `current_view`.

        Raises:
            TypeError: An option means nothing for this endpoint, or has the wrong type.
            ValueError: A value is outside its bounds.
        """
        before = self._options
        options = Options(
            before.merge if merge is None else merge,
            before.window if window is None else check_window(window),
            before.retry if retry is None else retry,
            before.abandon_after if abandon_after is None else plain_real(abandon_after),
            before.choose if choose is None else choose,
            before.reply_to if reply_to is None else reply_to,
            before.members if members is None else members,
        )
        options.check(self._spec)
        if options.members == "follow":
            return cast("Endpoint[P, R]", _Following(self._mesh, self._spec, options))
        return Endpoint(self._mesh, self._spec, options)

    @cached_property
    def call(self) -> CallVerb[P, ValueMesh[R]]:
        """Run the endpoint on every member and return all results.

        Returns:
            The results, over the extent of the view that was called; empty for an empty view.

        Raises:
            MeshErrorGroup: The first failure cancelled the other ranks. The group has all failures, with coordinates;
                `.partial` holds the results received.

        Blocking: a checkpoint, cancellable. A cancel cancels the endpoints; when this raises `Cancelled` they have
        unwound, or have been abandoned: see `options(abandon_after=...)`. `call.start(...)` sends now and returns a
        handle to await later; the next three verbs have it, too.
        """
        return CallVerb(CALL, self._mesh, self._spec, self._options)

    @cached_property
    def call_settled(self) -> CallVerb[P, ValueMesh[Outcome[R]]]:
        """Run the endpoint on every member and return each outcome; no remote failure raises or cancels."""
        return CallVerb(CALL_SETTLED, self._mesh, self._spec, self._options)

    @cached_property
    def call_one(self) -> CallVerb[P, R]:
        """Run the endpoint of a mesh of one member.

        Raises:
            ValueError: The mesh, or view, has not exactly one member; nothing was sent.
            Exception: The endpoint's own exception, bare.
        """
        return CallVerb(CALL_ONE, self._mesh, self._spec, self._options)

    @cached_property
    def choose(self) -> CallVerb[P, R]:
        """Run the endpoint on the live member with the fewest unended calls of this process, ties in turn.

        Raises:
            ValueError: The view is empty.
            MeshStopped: All members have ended.
            Exception: The endpoint's own exception, bare.
        """
        return CallVerb(CHOOSE, self._mesh, self._spec, self._options)

    @overload
    def call_reduced(self, fn: Callable[[R, R], R], /, *, commutative: bool = False) -> CallVerb[P, R]: ...
    @overload
    def call_reduced(
        self, fn: Callable[[R, R], R], /, *, along: str | Sequence[str], commutative: bool = False
    ) -> CallVerb[P, ValueMesh[R]]: ...
    def call_reduced(
        self, fn: Callable[[R, R], R], /, *, along: str | Sequence[str] | None = None, commutative: bool = False
    ) -> CallVerb[P, Any]:
        """Return a verb that runs the endpoint on every member and folds the results.

        `await mesh.loss.call_reduced(operator.add)(batch)` is the sum of all; `along="gpus"` folds that dimension
        away and gives a `ValueMesh` over the others.

        Args:
            fn: Called in this process with the accumulated value and the next result, like `functools.reduce`.
            along: One or more dimensions of the view; without it all of them, and the bare result.
            commutative: Whether to fold results as they arrive. Else they are folded in the order of the view; results
                that arrive early are held.

        Raises:
            ValueError: Called on an empty view, without `along`.
            ShapeError: Called on a view that has no such dimension; nothing was sent.
            MeshErrorGroup: As from `call`, without `.partial`.
            Exception: What `fn` raises; the endpoints that still run are cancelled.
        """
        verb = replies.reducing_verb(fn, along, commutative=commutative)
        return CallVerb(verb, self._mesh, self._spec, self._options)

    async def broadcast(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send to every member and return once the message is queued everywhere.

        There is no reply: a failure is raised by the block that owns the mesh. The arguments may be changed when this
        returns.

        With `options(reply_to=port)` this process forwards each member's outcome, failures included, to the port; do
        not change large arguments before the outcomes have come. The broadcast has no deadline, and the owner of a
        started call (`call.start`), which waits for it. A cancel of the owner, or of this call before it returns,
        cancels the members; then only outcomes for which the channel has room are sent. Failures that cannot be sent
        because the receiver is closed are raised by the owner.

        Raises:
            trio.ClosedResourceError: The port of `reply_to` is closed.
        """
        if self._options is not NO_OPTIONS:
            self._check("broadcast")
            if self._options.reply_to is not None:
                await in_trio(replies.broadcast)(self._mesh, self._spec, self._options.reply_to, args, kwargs)
                return
        await in_trio(verbs.broadcast)(self._mesh, self._spec, args, kwargs)

    def broadcast_nowait(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send to every member now.

        Raises:
            trio.WouldBlock: A mailbox is full, or there is no link yet; nothing was sent.
        """
        if self._options is not NO_OPTIONS:
            self._check("broadcast_nowait")
        in_trio_now(verbs.broadcast_nowait)(self._mesh, self._spec, args, kwargs)

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> Results[tuple[Point, R]]:
        """Run the endpoint on every member; yield results as they arrive.

        `async with mesh.name.stream(...) as results: async for point, value in results`: one value of each member, or
        from a generator endpoint every item that each yields, in its order, members interleaved as they come. Points
        are those of the view that was called. A generator endpoint is at most `window` items and
        `limits.STREAM_BYTES` bytes ahead of the consumer; it waits in its `yield`.

        Leaving the block early cancels the endpoints and waits until they have unwound. The iteration raises failures
        as one `MeshErrorGroup`, after earlier values; with `options(merge="collect")` the other members finish first.
        With `options(choose=True)` one member runs it, the live one with the fewest unended calls.

        Raises:
            TypeError: The arguments do not fit; nothing was sent.

        Blocking: no checkpoint; entering, each step and leaving are. Cancellable as `call` is.
        """
        if self._options is not NO_OPTIONS:
            self._check("stream")
        bound = verbs.bind(self._mesh, self._spec, args, kwargs, streams=True)
        return Stream[R](self._mesh, self._spec, self._options, bound)

    def map(self, items: Iterable[Any] | AsyncIterable[Any], *, window: int | None = None) -> Results[tuple[int, R]]:
        """Run the endpoint once for each item, on the least busy members; yield results as they arrive.

        `async with mesh.name.map(items) as results: async for index, value in results`: each item is the one argument
        of one call, to the live member with the fewest unended calls. `index` is the item's place in `items`. Do not
        change an item before its result has come.

        Leaving the block early cancels running calls and waits until they have unwound. A failure stops the map; the
        iteration raises it in a `MeshErrorGroup`, after earlier results. With `options(merge="collect")` the other
        items finish first. An error of `items` itself is in the group, too, without coordinates.

        Args:
            items: Taken one by one, in a task of the map's own, never more than `window` ahead of the results taken. A
                generator, or async generator, is closed when the block is left before its end.
            window: Items that may be under way (`limits.MAP_WINDOW`). With as many as members, each member gets its
                next item when it has finished the previous one.

        Raises:
            TypeError: The endpoint does not take one argument.
            ValueError: `window` is outside its bounds.

        Blocking: no checkpoint; entering, each step and leaving are. Cancellable as `call` is.
        """
        if self._options is not NO_OPTIONS:
            self._check("map")
        return ItemMap[R](self._mesh, self._spec, self._options, items, window)

    def _check(self, verb: str) -> None:
        self._options.check_verb(f"{self._mesh.name}.{self._spec.name}", verb)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Refuse: an endpoint of a mesh is called by a verb (rule C5)."""
        name = self._spec.name
        raise TypeError(
            f"an endpoint of a mesh must be called by a verb, got mesh.{name}(...): "
            f"write `await mesh.{name}.call(...)`, .call_one, .choose, .broadcast, .stream or .map"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from trimesh.actor.options import no_verb  # noqa: PLC0415 - only errors need it

            raise no_verb(f"{self._mesh.name}.{self._spec.name}", name)

    def __repr__(self) -> str:
        return f"<endpoint {self._mesh!r}.{self._spec.name}>"


class _Following:
    """An endpoint with `members="follow"`: reading a verb selects the members that are in the mesh then."""

    def __init__(self, mesh: MeshView, spec: EndpointSpec, options: Options) -> None:
        self._mesh = mesh
        self._spec = spec
        self._options = options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        mesh = self._mesh if name == "options" else in_trio_now(self._mesh.followed)()
        return getattr(Endpoint[..., Any](mesh, self._spec, self._options), name)

    def __repr__(self) -> str:
        return f"<endpoint {self._mesh!r}.{self._spec.name}, of its current members>"


class EndpointMethod(Generic[P, R, W]):
    """An endpoint in the class body: an ordinary method on the actor, a handle on a mesh.

    Attributes:
        spec: What the runtime knows about it.
    """

    __slots__ = ("spec",)

    def __init__(self, spec: EndpointSpec) -> None:
        self.spec = spec

    if TYPE_CHECKING:
        # Handles of `trimesh.blocking` are typed as the class itself: no other type has its endpoints.
        @overload
        def __get__(self, instance: None, owner: type) -> blocking.Endpoint[P, R]: ...
        @overload
        def __get__(self, instance: Any, owner: type | None = None) -> BoundEndpoint[P, R, W]: ...
        def __get__(self, instance: Any, owner: type | None = None) -> Any: ...

    else:

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            return self if instance is None else self.spec.fn.__get__(instance, owner)

    @property
    def __isabstractmethod__(self) -> bool:
        return is_abstract(self.spec)

    @__isabstractmethod__.setter
    def __isabstractmethod__(self, value: bool) -> None:
        """Set by `abc.abstractmethod` above `@endpoint`."""
        function: Any = self.spec.fn
        function.__isabstractmethod__ = value

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.spec.fn.__doc__

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.spec.fn

    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function, as `super().add(1)` or `Counter.add(counter, 1)` do."""
        return self.spec.fn(instance, *args, **kwargs)


if TYPE_CHECKING:

    class BoundEndpoint(Endpoint[P, R], Generic[P, R, W]):
        """Type of `object.endpoint` for type checkers: the verbs of a mesh, and inside the actor a plain method.

        There is none at run time: a mesh gives an `Endpoint`, an actor a bound method.
        """

        def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> W:
            """Call the plain method."""
            ...


@overload
def endpoint(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
) -> EndpointMethod[P, R, Coroutine[Any, Any, R]]: ...
@overload
def endpoint(  # pyright: ignore[reportOverlappingOverload]
    function: Callable[Concatenate[Any, P], AsyncGenerator[R, None]], /
) -> EndpointMethod[P, R, AsyncGenerator[R, None]]: ...
@overload
def endpoint(
    function: Callable[Concatenate[Any, P], AsyncIterator[R]], /
) -> EndpointMethod[P, R, AsyncIterator[R]]: ...
@overload
def endpoint(function: Callable[Concatenate[Any, P], R], /) -> EndpointMethod[P, R, R]: ...
@overload
def endpoint(
    *, concurrency: int = 1, group: str | None = None, thread: bool = False, idempotent: bool = False
) -> _Decorator: ...
@overload
def endpoint(
    *,
    reply: Literal["later"],
    concurrency: int = 1,
    group: str | None = None,
    thread: bool = False,
    idempotent: bool = False,
) -> _LaterDecorator: ...
def endpoint(
    function: Callable[..., Any] | None = None,
    /,
    *,
    concurrency: int = 1,
    group: str | None = None,
    thread: bool = False,
    idempotent: bool = False,
    reply: Literal["later"] | None = None,
) -> Any:
    """Mark a method of an `Actor` as callable from other processes.

    Args:
        function: The method: a coroutine function; an async generator function, for `stream`; or a plain function,
            which runs inline on the main thread of its process (nothing else of that process runs meanwhile).
        concurrency: Messages that may run at once. 1 shares the one slot of the actor; more makes a group of its own.
            A plain function that runs inline runs one message at a time.
        group: Name of a group of endpoints that share `concurrency` slots.
        thread: Run a plain function in a worker thread instead.
        idempotent: Whether running it twice does no harm; only such an endpoint may be retried.
        reply: With "later" the first parameter after `self` is a `Reply[T]`, which callers do not pass. `reply.send`
            answers the call, also after the method has returned and freed its slot.

    Raises:
        TypeError: The function, or the combination of options, cannot be an endpoint.
    """
    if reply not in (None, "later"):
        raise TypeError(f'@endpoint takes reply="later" or no reply, got reply={reply!r}')
    if function is None:
        return _Decorator(concurrency, group, thread, idempotent, reply == "later")
    return _Decorator(concurrency, group, thread, idempotent)(function)


if TYPE_CHECKING:

    class _LaterDecorator:
        """Type of `endpoint(reply="later")` for type checkers: callers pass no reply."""

        def __call__(
            self, function: Callable[Concatenate[Any, Reply[R], P], Coroutine[Any, Any, None] | None], /
        ) -> EndpointMethod[P, R, Any]: ...


class _Decorator(msgspec.Struct, frozen=True):
    concurrency: int
    group: str | None
    thread: bool
    idempotent: bool
    answers_later: bool = False

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
        ) -> EndpointMethod[P, R, Coroutine[Any, Any, R]]: ...
        @overload
        def __call__(  # pyright: ignore[reportOverlappingOverload]
            self, function: Callable[Concatenate[Any, P], AsyncGenerator[R, None]], /
        ) -> EndpointMethod[P, R, AsyncGenerator[R, None]]: ...
        @overload
        def __call__(
            self, function: Callable[Concatenate[Any, P], AsyncIterator[R]], /
        ) -> EndpointMethod[P, R, AsyncIterator[R]]: ...
        @overload
        def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> EndpointMethod[P, R, R]: ...
        def __call__(self, function: Any, /) -> Any: ...

    else:

        def __call__(self, function: Any, /) -> Any:
            return EndpointMethod(self._spec(function))

    def _spec(self, function: Callable[..., Any]) -> EndpointSpec:
        if isinstance(function, EndpointMethod):
            raise TypeError(f"@endpoint must stand once above a method, got it twice above {function.spec.name}")
        if not inspect.isfunction(function):
            raise TypeError(f"@endpoint must decorate a method, got {function!r}")
        name = function.__name__
        concurrency = whole_number(self.concurrency)
        if concurrency is None or concurrency < 1:
            raise TypeError(f"endpoint {name} needs concurrency >= 1, got {self.concurrency!r}")
        if inspect.isgeneratorfunction(function):
            raise TypeError(
                f"endpoint {name} must not be a plain generator: write an async generator, `async def` with `yield`"
            )
        kind = self._kind(function)
        if kind is EndpointKind.INLINE and concurrency > 1 and self.group is None:
            raise TypeError(
                f"endpoint {name} is a plain def, of which one runs at a time whatever concurrency= says, got "
                f"concurrency={self.concurrency}: write thread=True or `async def` for more, or group={name!r} for a "
                "slot of its own"
            )
        signature = signature_of(function)
        parameters = list(signature.parameters.values())
        if not parameters:
            raise TypeError(f"endpoint {name} must take self, got a function without parameters")
        if self.answers_later:
            self._check_later(name, kind, parameters)
        signature = signature.replace(parameters=parameters[2 if self.answers_later else 1 :])
        return EndpointSpec(
            name, function, kind, concurrency, self.group, self.idempotent, signature,
            answers_later=self.answers_later,
        )  # fmt: skip

    def _check_later(self, name: str, kind: EndpointKind, parameters: Sequence[inspect.Parameter]) -> None:
        if kind is EndpointKind.GENERATOR:
            raise TypeError(f'endpoint {name} is a generator, which answers by its items: leave reply="later" out')
        if len(parameters) < 2 or parameters[1].kind not in _POSITIONAL:
            raise TypeError(
                f'endpoint {name} with reply="later" must take the reply first: '
                f"write `def {name}(self, reply: Reply[int], ...)`"
            )

    def _kind(self, function: Callable[..., Any]) -> EndpointKind:
        if inspect.iscoroutinefunction(function):
            if self.thread:
                raise TypeError(f"endpoint {function.__name__} is a coroutine function: thread=True needs a plain def")
            return EndpointKind.ASYNC
        if inspect.isasyncgenfunction(function):
            if self.thread:
                raise TypeError(f"endpoint {function.__name__} is an async generator: thread=True needs a plain def")
            return EndpointKind.GENERATOR
        return EndpointKind.THREAD if self.thread else EndpointKind.INLINE
