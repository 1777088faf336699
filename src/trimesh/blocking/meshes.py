"""Blocking meshes of hosts, processes and actors, and the functions that start them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar, TypeVarTuple, cast, overload

from trimesh import programs
from trimesh._runtime import channels
from trimesh._wire.exceptions.tracebacks import shortens_tracebacks
from trimesh.actor import actor_mesh, host_mesh, proc_mesh, spawning
from trimesh.actor.actor import Actor
from trimesh.blocking.calls import (
    Attribute,
    Endpoint,
    FacedHandle,
    FacedObject,
    MembershipViews,
    Port,
    RDMABuffer,
    bound,
    calls_here,
    enters,
    inner_items,
    inner_of,
    mirrored,
    returns_face,
    waits,
)
from trimesh.blocking.trio_thread import check_thread
from trimesh.blocking.work import AnyBody, Body, CallFuture, Each, FacedBody, body_of, submit, wait
from trimesh.rdma.buffers import buffer
from trimesh.shape.extent import Extent

if TYPE_CHECKING:
    from trimesh.actor.placement.placement import Placement
    from trimesh.jobs.code import CodeSync  # noqa: F401 - named in strings below
    from trimesh.jobs.on_hosts import Forwarding
    from trimesh.jobs.packages import Installation

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
A = TypeVar("A", bound=Actor)
M = TypeVar("M")
ObjectT = TypeVar("ObjectT")


class Spawning(Generic[T]):
    """A mesh that has not been started.

    `with spawning as mesh:` starts it until the end of the block. `mesh = spawning.open()` starts it until
    `mesh.close()`, as over the cells of a notebook. `mesh = spawning.adopt()` starts it in the block of the mesh that
    it is spawned on. Only one of them can be done, once.
    """

    def __init__(
        self,
        what: str,
        make: Callable[[], spawning.Spawning[Any]],
        face: Callable[[Any, AnyBody | None], T],
        home: AnyBody | None = None,
    ) -> None:
        self._where = spawning.place_of_user()
        self._what = what
        self._make = make
        self._face = face
        self._home = home
        self._is_used = False
        self._body: Body[Any] | None = None

    def __enter__(self) -> T:
        """Start it in a block of its own."""
        return self._enter(keep=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Leave the block: everything that it owns is joined."""
        assert self._body is not None
        return self._body.leave(error)

    @shortens_tracebacks
    def open(self) -> T:
        """Start it until `close()`. If it is still open at the exit of the interpreter, it is closed then, and logged.

        A failure that ends it is raised by running calls, else by the next call, else by `close()`.
        """
        return self._enter(keep=True)

    @shortens_tracebacks
    def adopt(self) -> T:
        """Start it in the block of the mesh that it is spawned on."""
        made = self._use()

        async def adopt() -> Any:
            return await made()

        return self._face(wait(adopt, self._home), self._home)

    def _enter(self, *, keep: bool) -> T:
        make = self._use()
        self._body = body = body_of(make(), self._what, self._home)
        value = body.owns = body.enter(keep=keep)
        return self._face(value, body)

    @shortens_tracebacks
    def close(self) -> None:
        """Stop and join everything that it owns, in order. A second call does nothing.

        Raises:
            MeshErrorGroup: Failures that no call has raised.
            RuntimeError: It was not opened, or something opened inside it is still open.
        """
        if self._body is None:
            raise RuntimeError(f"close() needs a mesh that is open, got {self._what}, not started: call open() first")
        self._body.close()

    def _use(self) -> Callable[[], spawning.Spawning[Any]]:
        if self._is_used:
            raise RuntimeError(f"{self._what} can be started once: call it again for another mesh")
        self._is_used = True
        check_thread()
        return self._make

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._what} has not been started, so it has no {name!r}: write `with ... as mesh:` or "
            "`mesh = ....open()` first"
        )

    def __del__(self) -> None:
        if not self.__dict__.get("_is_used", True):
            warnings.warn(
                f"{self._what}, made at {self._where}, was never started: write `with` before it, or .open() after it",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        return f"<{self._what}, not started>"


def starts(
    method: Callable[Concatenate[Any, P], spawning.Spawning[Any]], face: Callable[[Any, AnyBody | None], T]
) -> Callable[Concatenate[Any, P], Spawning[T]]:
    """Return a blocking form of a method that returns a `Spawning`; `face` makes the blocking form of its mesh."""

    def start(self: FacedObject[Any], call: partial[Any]) -> Spawning[T]:
        what = f"{method.__name__}({', '.join(map(repr, call.args))})"
        return Spawning(what, call, face, self._home)

    return mirrored(method, start)


class _Opened(FacedObject[ObjectT]):
    """A handle that `open` may have returned."""

    def close(self) -> None:
        """Stop and join everything that it owns, in order. A second call does nothing.

        Raises:
            MeshErrorGroup: Failures that no call has raised.
            RuntimeError: It did not come from `open()`, or something opened on it is still open.
        """
        if self._home is None or self._home.owns is not self._inner:
            raise RuntimeError(
                f"close() is for a handle that open() returned, got {self!r}, which has no block of its own: close the "
                "mesh that it is on, or a part of"
            )
        self._home.close()


class ActorMesh(FacedHandle[actor_mesh.ActorMesh]):
    """All actors of one `spawn`, or a view of some: `mesh.<endpoint>.<verb>(...)`.

    Type checkers see it as the actor class itself: endpoints have blocking verbs on the class, and those of `trimesh`
    on its objects.
    """

    def __getattr__(self, name: str) -> Endpoint[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        found: Endpoint[..., Any] = Endpoint(getattr(self._inner, name), self._home)
        vars(self)[name] = found
        return found


_OF_TENSORS: Final = frozenset(("activate", "device_mesh", "process_group", "rank_tensor", "run"))


class ProcMesh(_Opened[proc_mesh.ProcMesh], FacedHandle[proc_mesh.ProcMesh]):
    """A mesh of processes, or a view of some of them.

    `spawn` and `spawning` start actors; the other methods are those of `trimesh.ProcMesh`.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TENSORS:
            raise AttributeError(
                f"a blocking mesh has no {name!r}: write trimesh.blocking.run(function, procs) with an async function, "
                f"in which procs.{name} works"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def spawn(self, name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> type[A]:
        """Spawn an actor in every process of this mesh, or view, and wait until all are ready.

        The block of the processes owns them; see `trimesh.ProcMesh.spawn`.
        """
        return self.spawning(name, cls, *args, **kwargs).adopt()

    def spawning(self, name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> Spawning[type[A]]:
        """Prepare actors with a block of their own: `with procs.spawning("name", Cls) as mesh:`."""
        make = bound(self._inner.spawn, (name, cls, *args), kwargs)
        return Spawning(f"spawn({name!r}, {getattr(cls, '__qualname__', cls)})", make, _actors, self._home)

    def get_or_spawn(self, name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> type[A]:
        """Return the one actor of this name on these processes; see `trimesh.ProcMesh.get_or_spawn`."""
        return cast("type[A]", _actors(self._wait(self._inner.get_or_spawn, name, cls, *args, **kwargs), self._home))

    def membership(self) -> AbstractContextManager[MembershipViews]:
        """Read the members of this mesh: `with procs.membership() as views: for view in views: ...`."""
        body = body_of(self._inner.membership(), f"the members of {self.name}", self._home)
        return FacedBody(body, lambda views: MembershipViews(views, self._home))

    def map(
        self, function: Callable[[T], Any], items: Iterable[T], /, **options: Any
    ) -> AbstractContextManager[Iterator[tuple[int, Any]]]:
        """Run a function once for each item: `with procs.map(f, items) as results: for index, value in results`.

        See `trimesh.ProcMesh.map`; items are iterated in the thread of Trio.
        """
        block = self._inner.map(function, inner_items(items), **options)
        return FacedBody(
            body_of(block, f"the results of {function!r}", self._home), lambda entered: Each(entered, self._home)
        )

    def submit(self, function: Callable[[*Ts], Any], /, *args: *Ts, thread: bool = True) -> CallFuture[Any]:
        """Run a function once, as `choose`, and return a `concurrent.futures.Future`, whose `cancel()` cancels it."""
        return submit(bound(self._inner.choose, (function, *args), {"thread": thread}), self._home)

    call = waits(proc_mesh.ProcMesh.call)
    choose = waits(proc_mesh.ProcMesh.choose)
    live = enters(proc_mesh.ProcMesh.live, "the overview of {0.name}")
    on_failure = enters(proc_mesh.ProcMesh.on_failure, "the failures of {0.name}")
    supervised = returns_face(calls_here(proc_mesh.ProcMesh.supervised))
    replace = waits(proc_mesh.ProcMesh.replace)
    resize = returns_face(waits(proc_mesh.ProcMesh.resize))
    kill = waits(proc_mesh.ProcMesh.kill)
    stop = waits(proc_mesh.ProcMesh.stop)
    settled = waits(proc_mesh.ProcMesh.settled)


class Synced(FacedObject["CodeSync"]):
    """Code of the program on hosts, while its block is open; see `trimesh.HostMesh.sync`."""

    version = Attribute["CodeSync", int](lambda synced: synced.version)
    digest = Attribute["CodeSync", str](lambda synced: synced.digest)
    files = Attribute["CodeSync", int](lambda synced: synced.files)
    sent_bytes = Attribute["CodeSync", int](lambda synced: synced.sent_bytes)

    def update(self) -> bool:
        """Copy changes since the last update; return whether there were any. See `trimesh.HostMesh.sync`."""
        return self._wait(self._inner.update)


class HostMesh(_Opened[host_mesh.HostMesh]):
    """This machine, or the hosts of a job: the blocking form of `trimesh.HostMesh`.

    Enter its methods that start something by `with`, as `with this_host().spawn_procs({"gpus": 4}) as procs:`, or call
    `.open()` on their result. On a warm host `.adopt()` gives processes to the host's block. The `output` of `run` is
    called in the thread of Trio, and must not wait.
    """

    extent = Attribute[host_mesh.HostMesh, Extent](lambda hosts: hosts.extent)
    names = Attribute[host_mesh.HostMesh, tuple[str, ...]](lambda hosts: hosts.names)
    points = calls_here(host_mesh.HostMesh.points)
    slice = returns_face(calls_here(host_mesh.HostMesh.slice))
    spawn_procs = starts(host_mesh.HostMesh.spawn_procs, ProcMesh)
    warm = starts(host_mesh.HostMesh.warm, lambda host, home: HostMesh(host, home))  # noqa: PLW0108 - the class is not defined yet
    replace = waits(host_mesh.HostMesh.replace)
    grow = returns_face(waits(host_mesh.HostMesh.grow))
    wait_notice = waits(host_mesh.HostMesh.wait_notice)
    run = waits(host_mesh.HostMesh.run)
    shell = waits(host_mesh.HostMesh.shell)
    sync = starts(host_mesh.HostMesh.sync, Synced)
    resources = waits(host_mesh.HostMesh.resources)
    place = starts(host_mesh.HostMesh.place, lambda placement, _: cast("Placement", placement))
    install = starts(host_mesh.HostMesh.install, lambda installed, _: cast("Installation", installed))

    def __len__(self) -> int:
        return len(self._inner)

    def _repr_html_(self) -> str:
        """Return a drawing for notebooks; see `trimesh.HostMesh`."""
        return self._inner._repr_html_()

    def __getitem__(self, name: str) -> HostMesh:
        """Return the hosts that the job names so; see `trimesh.HostMesh.__getitem__`."""
        return self._seen(self._inner[name])

    def forward(self, *, local: int = 0, remote: int | str) -> Spawning[Forwarding]:
        """Forward a port of this machine to one of a host: `with hosts.slice(hosts=0).forward(remote=8888):`.

        See `trimesh.HostMesh.forward`.
        """
        make = partial(self._inner.forward, local=local, remote=remote)
        return Spawning(f"forward(remote={remote!r})", make, lambda forwarded, _: forwarded, self._home)


def this_host() -> HostMesh:
    """Return the machine that this program runs on; starts nothing."""
    return HostMesh(host_mesh.this_host())


def this_proc() -> ProcMesh:
    """Return this process as a mesh of one member; its actors run in the thread of Trio."""
    return ProcMesh(host_mesh.this_proc())


def current_view(mesh: M) -> M:
    """Return a handle on the whole mesh as it is now; see `trimesh.current_view`."""
    if not isinstance(mesh, FacedHandle):
        raise TypeError(
            f"current_view takes a mesh of processes or of actors, got {mesh!r}: pass the mesh that "
            "`async with spawn_procs()` or `await spawn()` returns"
        )
    handle = cast("FacedHandle[Any]", mesh)
    return cast("M", handle._seen(handle._wait(proc_mesh.current_view, handle)))  # noqa: SLF001 - of its kind


def publish_as(name: str, actors: object, /) -> AbstractContextManager[None]:
    """Let other programs of this user on this host call some actors: `with tb.publish_as("judge", judges):`.

    See `trimesh.publish_as`.
    """
    return body_of(programs.publish_as(name, inner_of(actors)), f"the name {name!r}")


def log_to(path: str | os.PathLike[str], /, *formats: str) -> AbstractContextManager[None]:
    """Write the metrics of all processes into files while a block is open: `with tb.log_to("runs/x"):`.

    See `trimesh.log_to`.
    """
    from trimesh.telemetry.files import log_to as open_files  # noqa: PLC0415 - few programs need it

    return body_of(open_files(path, *formats), f"the metrics in {os.fspath(path)!r}")


def connect(name: str, cls: type[A], /) -> AbstractContextManager[type[A]]:
    """Connect to the actors that another program publishes: `with tb.connect("judge", Judge) as judge:`.

    See `trimesh.connect`.
    """
    body = body_of(programs.connect(name, cls), f"the connection to {name!r}")
    return FacedBody(body, lambda handle: _actors(handle, body))


def _actors(inner: Any, home: AnyBody | None) -> Any:
    return ActorMesh(inner, home)


@overload
def face(handle: proc_mesh.ProcMesh) -> ProcMesh: ...
@overload
def face(handle: host_mesh.HostMesh) -> HostMesh: ...
@overload
def face(handle: channels.Port[T]) -> Port[T]: ...
@overload
def face(handle: buffer.RDMABuffer) -> RDMABuffer: ...
@overload
def face(handle: A) -> type[A]: ...
def face(handle: Any) -> Any:
    """Return the blocking form of a handle of `trimesh`, such as one that an endpoint returned or received.

    A handle is a mesh, the port of a channel, or a buffer.

    By it an endpoint with `thread=True` calls other actors: `tb.face(self.peers).step.call(1)`. Such a call has the
    deadline of the endpoint, and is cancelled with it.

    Raises:
        TypeError: It is none of these.
    """
    match handle:
        case FacedObject():
            return handle  # pyright: ignore[reportUnknownVariableType]
        case actor_mesh.ActorMesh():
            return ActorMesh(handle)
        case proc_mesh.ProcMesh():
            return ProcMesh(handle)
        case host_mesh.HostMesh():
            return HostMesh(handle)
        case channels.Port():
            return Port(handle)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case buffer.RDMABuffer():
            return RDMABuffer.of(handle)
        case _:
            raise TypeError(
                f"face takes a handle on a mesh, a port or a buffer, got {handle!r}: for other objects write "
                "run(object.method, ...)"
            )
