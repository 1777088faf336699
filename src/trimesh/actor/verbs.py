"""Verbs: bind the arguments, send, and turn the results into the return value of each verb."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypeVar

import msgspec
import trio

from trimesh._runtime.actors import caller_here
from trimesh._runtime.calls import Err, Ok, Request, Result, begin, finish, post, post_nowait
from trimesh._runtime.life import current_proc
from trimesh._runtime.meshes import fold_into_deaths
from trimesh._runtime.peers import Target
from trimesh._runtime.tasks import effective_deadline
from trimesh._runtime.values import GENERATOR, EndpointSpec
from trimesh.actor.options import NO_OPTIONS, Options, PerRank, Spread, spread
from trimesh.errors import MeshErrorGroup, MeshStopped, Origin, RemoteCancelled, set_origin
from trimesh.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc
    from trimesh._runtime.values import MeshInfo
    from trimesh.actor.view import Addressees, MeshView


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Bound = tuple[Args, Kwargs] | Spread
"""Arguments that `bind` has checked: the same for all members, or some for each."""


class VerbRow(msgspec.Struct, frozen=True):
    """Row of the table of verbs with results: the behaviour specific to one verb.

    Attributes:
        name: Name of the verb.
        ranks: Choose the members to call; avoid those of the second argument if there are others.
        conclude: Turn the results of these ranks into the verb's return value or error.
        run: Send, and wait for the outcome: `run` below, except for `call_reduced`.
        again: Do so with `options(retry=)`; None if the verb has no retries.
        fail_fast: Whether the first failure cancels the other ranks.
        errors_win: Whether an error of an endpoint wins over a cancel of the caller.
    """

    name: str
    ranks: Callable[[MeshView, Collection[int]], Sequence[int]]
    conclude: Callable[[Sequence[Result], MeshView, EndpointSpec], Any]
    run: RunVerb
    again: RunVerb | None = None
    fail_fast: bool = False
    errors_win: bool = True


RunVerb: TypeAlias = Callable[[VerbRow, "MeshView", EndpointSpec, Bound, Options], Awaitable[Any]]


@trio.lowlevel.enable_ki_protection
async def run(
    verb: VerbRow,
    mesh: MeshView,
    spec: EndpointSpec,
    bound: Bound,
    options: Options,
    tried: list[int] | None = None,
) -> Any:
    """Call the members that a verb calls, with arguments that `bind` has checked.

    Of members to choose from, those in `tried` come last; those called are appended to it.
    """
    ranks = verb.ranks(mesh, tried or ())
    addressees = mesh.targets(ranks)
    if addressees is None:
        if not mesh.is_open:
            await trio.lowlevel.checkpoint()
            return verb.conclude(refusals(mesh, spec, ranks), mesh, spec)
        if verb.ranks is chosen_rank:
            ranks = await _chosen_living(mesh, ranks, tried or ())
        addressees = await mesh.reach(ranks)
    if tried is not None:
        tried += ranks
    await trio.lowlevel.checkpoint_if_cancelled()
    proc, info, targets = addressees
    request = request_to(mesh, info, spec, bound, ranks, options)
    call = begin(proc, targets, request, effective_deadline(), fail_fast=verb.fail_fast)
    del addressees, targets, request, bound  # thousands may be in flight: the garbage collector visits each object
    return verb.conclude(await finish(call, errors_win=verb.errors_win), mesh, spec)


def all_ranks(mesh: MeshView, _: Collection[int]) -> Sequence[int]:
    """Return the ranks of a view."""
    return mesh.ranks


def values_of(results: Sequence[Result], mesh: MeshView, spec: EndpointSpec) -> ValueMesh[Any]:
    """Return the values of all ranks of a view, or raise their errors."""
    values = tuple([result.value for result in results if type(result) is Ok])
    if len(values) < len(results):
        raise_group(mesh, spec, results)
    return ValueMesh(mesh.region, values)


def outcomes_of(results: Sequence[Result], mesh: MeshView, _: EndpointSpec) -> ValueMesh[Outcome[Any]]:
    """Return the outcome of each rank of a view."""
    return ValueMesh(mesh.region, tuple(outcome_of(result) for result in results))


def one_rank(mesh: MeshView, _: Collection[int]) -> Sequence[int]:
    """Return the ranks of a view of one member.

    Raises:
        ValueError: It has none or several.
    """
    ranks = mesh.ranks
    if len(ranks) != 1:
        raise ValueError(
            f"call_one needs a mesh of exactly one member, got {len(ranks)} in {mesh!r}: slice it to one, as by "
            f"slice({_first(mesh)}), or write call for all of them or choose for any one"
        )
    return ranks


def _first(mesh: MeshView) -> str:
    return ", ".join(f"{label}=0" for label in mesh.region.extent) or "..."


def chosen_rank(mesh: MeshView, avoid: Collection[int]) -> Sequence[int]:
    """Return the rank that `choose` calls; see `pick`."""
    return [pick(mesh, "choose", avoid)]


async def _chosen_living(mesh: MeshView, ranks: Sequence[int], avoid: Collection[int]) -> Sequence[int]:
    """Choose again while the chosen member is found dead, so that a restart is awaited only if no member lives."""
    while True:
        living = await mesh.meet(ranks)
        if not living or ranks[0] in living:
            return ranks
        ranks = chosen_rank(mesh, avoid)


def pick(mesh: MeshView, verb: str, avoid: Collection[int] = ()) -> int:
    """Return the least loaded live member, if possible one that is not in `avoid`.

    Raises:
        ValueError: The view is empty.
        MeshStopped: All members have ended.
    """
    return candidates_of(mesh, verb).pick(avoid)


class Candidates:
    """Members of a view that can accept a call now; valid until the running task waits for anything.

    Attributes:
        mesh: The view.
        proc: The calling process.
        alive: Live ranks; if there are none, those that are being restarted.
    """

    __slots__ = ("_ready", "alive", "mesh", "proc")

    def __init__(self, mesh: MeshView, proc: Proc, alive: Sequence[int]) -> None:
        self.mesh = mesh
        self.proc = proc
        self.alive = alive
        self._ready: dict[int, tuple[Target, Request] | None] = {}

    def pick(self, avoid: Collection[int] = ()) -> int:
        """Return the least loaded member, if possible one that is not in `avoid`."""
        if len(self.alive) == 1:
            rank = self.alive[0]
            self.mesh.turn[0] = rank + 1
            return rank
        some = [rank for rank in self.alive if rank not in avoid] if avoid else None
        return self.mesh.least_loaded(self.proc, some or self.alive)

    def ready(self, rank: int, spec: EndpointSpec, options: Options) -> tuple[Target, Request] | None:
        """Return a live, linked member, and the request without arguments that its calls share; else None.

        See `MeshView.targets`.
        """
        if rank not in self._ready:
            addressees = self.mesh.targets([rank])
            if addressees is None:
                self._ready[rank] = None
            else:
                _, info, [target] = addressees
                self._ready[rank] = target, request_to(self.mesh, info, spec, ((), {}), [rank], options)
        return self._ready[rank]


def candidates_of(mesh: MeshView, verb: str) -> Candidates:
    """Return the members of a view that can accept a call now.

    Raises:
        ValueError: The view is empty.
        MeshStopped: All members have ended.
    """
    ranks = mesh.ranks
    if not ranks:
        raise ValueError(f"{verb} needs a mesh of at least one member, got the empty view {mesh!r}")
    proc = mesh.proc()
    alive = mesh.candidates(proc, ranks)
    if not alive:
        raise MeshStopped(f"{verb} needs a live member, and all {len(ranks)} of {mesh!r} have ended: spawn new ones")
    return Candidates(mesh, proc, alive)


async def broadcast(mesh: MeshView, spec: EndpointSpec, args: Args, kwargs: Kwargs) -> None:
    bound = bind(mesh, spec, args, kwargs)
    if mesh.is_open:
        results = await post(*await prepare(mesh, spec, bound, mesh.ranks))
    else:
        await trio.lowlevel.checkpoint()
        results = refusals(mesh, spec, mesh.ranks)
    for result in results:
        if type(result) is Err:
            raise_group(mesh, spec, results)


def broadcast_nowait(mesh: MeshView, spec: EndpointSpec, args: Args, kwargs: Kwargs) -> None:
    bound = bind(mesh, spec, args, kwargs)
    ranks = mesh.ranks
    if mesh.is_open:
        proc, info, targets = mesh.targets(ranks) or _ended_targets(mesh, ranks)
        results = post_nowait(proc, targets, request_to(mesh, info, spec, bound, ranks))
    else:
        results = refusals(mesh, spec, ranks)
    for result in results:
        if type(result) is Err:
            raise_group(mesh, spec, results)


def _ended_targets(mesh: MeshView, ranks: Sequence[int]) -> Addressees:
    """Return members of which some have ended for good, so that the call can report them.

    Raises:
        trio.WouldBlock: A member is being restarted or linked, or earlier started calls wait to be sent.
    """
    addressees = mesh.any_targets(current_proc(), ranks)
    membership = mesh.membership(addressees[0])
    if membership.line is not None or membership.is_restarting(ranks):
        raise trio.WouldBlock
    if any(target.peer.link is None and target.peer.death is None for target in addressees[2]):
        raise trio.WouldBlock
    return addressees


def bind(mesh: MeshView, spec: EndpointSpec, args: Args, kwargs: Kwargs, *, streams: bool = False) -> Bound:
    """Check the arguments against the signature of the endpoint, and that the verb can call it at all.

    Args:
        mesh: The view that is called.
        spec: The endpoint.
        args: Positional arguments.
        kwargs: Keyword arguments.
        streams: Whether the verb is `stream`.

    Raises:
        TypeError: The arguments do not fit, or only `stream` can call the endpoint.
        ShapeError: The values of a `per_rank` do not fit the view.
    """
    if spec.kind is GENERATOR and not streams:
        raise TypeError(
            f"{mesh.name}.{spec.name} is an async generator, which only stream can call: "
            f"write `async with mesh.{spec.name}.stream(...) as results`"
        )
    least, most = spec.arity
    if kwargs or not least <= len(args) <= most:  # else the common case, at a tenth of the cost
        try:
            spec.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{mesh.name}.{spec.name}{spec.signature}: {error}") from None
        for value in kwargs.values():
            if type(value) is PerRank:
                return spread(mesh.region, repr(mesh), args, kwargs)
    for value in args:
        if type(value) is PerRank:
            return spread(mesh.region, repr(mesh), args, kwargs)
    return args, kwargs


def refusals(mesh: MeshView, spec: EndpointSpec, ranks: Sequence[int]) -> list[Result]:
    """Return a result for each rank of a mesh that is not open any more."""
    text = mesh.closed_text
    refused: list[Result] = []
    for rank in ranks:
        refusal = MeshStopped(text)
        set_origin(refusal, mesh.current.origin(rank, spec.name))
        refused.append(Err(refusal))
    return refused


async def prepare(
    mesh: MeshView, spec: EndpointSpec, bound: Bound, ranks: Sequence[int], options: Options = NO_OPTIONS
) -> tuple[Proc, Sequence[Target], Request]:
    """Link to some ranks of an open mesh; return the sender, the receivers and the request."""
    proc, info, targets = mesh.targets(ranks) or await mesh.reach(ranks)
    return proc, targets, request_to(mesh, info, spec, bound, ranks, options)


def request_to(
    mesh: MeshView,
    info: MeshInfo,
    spec: EndpointSpec,
    bound: Bound,
    ranks: Sequence[int],
    options: Options = NO_OPTIONS,
) -> Request:
    """Return the request for some ranks of a view, whose mesh is now described by `info`."""
    args, kwargs = ((), {}) if isinstance(bound, Spread) else bound
    return Request(
        info.name,
        spec.name,
        args,
        kwargs,
        Origins(info, ranks, spec.name),
        spec,
        abandon_after=options.abandon_after,
        each=tuple([bound.of_rank[rank] for rank in ranks]) if isinstance(bound, Spread) else None,
        view=mesh.sent,
        caller=caller_here(),
    )


class Origins(msgspec.Struct, frozen=True, eq=False):
    """The coordinates of the ranks of a view. A closure would be five objects for the garbage collector to trace."""

    info: MeshInfo
    ranks: Sequence[int]
    endpoint: str

    def __call__(self, index: int) -> Origin:
        return self.info.origin(self.ranks[index], self.endpoint)


def bare(results: Sequence[Result], *_: object) -> Any:
    """Return the one result, or raise its error."""
    [result] = results
    if type(result) is Ok:
        return result.value
    if type(result) is Err:
        raise result.error
    raise RemoteCancelled(reason="the call was cancelled")


def outcome_of(result: Result) -> Outcome[Any]:
    """Return the outcome of one rank."""
    match result:
        case Ok(value=value):
            return Outcome(value=value)
        case Err(error=error):
            return Outcome(error=error)
        case _:
            return Outcome(error=RemoteCancelled(reason="the call was cancelled"))


def raise_group(mesh: MeshView, spec: EndpointSpec, results: Sequence[Result]) -> NoReturn:
    """Raise the errors of a view's ranks, as `call` does."""
    ranks = mesh.ranks
    errors = [result.error for result in results if isinstance(result, Err)]
    came = [(rank, result.value) for rank, result in zip(ranks, results, strict=True) if isinstance(result, Ok)]
    missing = set(ranks) - {rank for rank, _ in came}
    partial = ValueMesh(mesh.region.exclude_ranks(missing), tuple(value for _, value in came))
    raise MeshErrorGroup(
        f"{mesh.name}.{spec.name} failed on {len(errors)} of {len(ranks)}",
        fold_into_deaths(errors) or [RemoteCancelled(reason="the call was cancelled")],
        partial=partial,
        mesh=mesh.name,
        endpoint=spec.name,
    )


# ---- outcome of one rank of `call_settled` ---------------------------------------------------------------------------

T = TypeVar("T")


class Outcome(msgspec.Struct, Generic[T], frozen=True):
    """A value or an error.

    Attributes:
        value: The endpoint's return value, or None after an error.
        error: The endpoint's error, with coordinates, or None.
    """

    value: T | None = None
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        """True if there was no error."""
        return self.error is None

    def unwrap(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"Outcome(value={self.value!r})" if self.error is None else f"Outcome(error={self.error!r})"

    def _notebook_cell_(self) -> T | Exception | None:
        """Return what a table of a notebook shows of it."""
        return self.value if self.error is None else self.error
