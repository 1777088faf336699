"""Functions that run in the processes of a mesh without an actor class: `ProcMesh.call`, `choose` and `map`.

An actor of the runtime runs them, on each process, spawned at the first use. It runs one function at a time, or
`concurrency`: each number has a class of its own, because slots of endpoints belong to the class.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from trimesh import limits
from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import in_trio_block
from trimesh._runtime.values import EndpointSpec, endpoints_of, signature_of
from trimesh._wire.exceptions.tracebacks import without_own_frames
from trimesh.actor import verbs
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.item_map import ItemMap, Items, check_items
from trimesh.actor.options import NO_OPTIONS, Options
from trimesh.actor.results import Results
from trimesh.actor.started import CALL, CHOOSE
from trimesh.actor.view import MeshView
from trimesh.context_managers import asynccontextmanager
from trimesh.plain_numbers import whole_number

if TYPE_CHECKING:
    from trimesh.actor.proc_mesh import ProcMesh

__all__ = ["CALL", "CHOOSE", "mapped", "run"]

R = TypeVar("R")

_NAME: Final = "Functions"


def name_for(concurrency: int) -> str:
    """Return the name of that class, by which other processes find it in this module."""
    return _NAME if concurrency == 1 else f"{_NAME}{concurrency}"


@cache
def class_for(concurrency: int) -> type[Actor]:
    """Return the class of the actors that run so many functions at once."""

    class Functions(Actor):
        @endpoint(group="functions", concurrency=concurrency)
        async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = function(*args, **kwargs)
            return _sent(function, await result if inspect.isawaitable(result) else result)

        @endpoint(group="functions", concurrency=concurrency, thread=True)
        def run_in_thread(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError(f"{_shown(function)} returned a coroutine: pass the `async def` function itself")
            return _sent(function, result)

    found = {name: msgspec.structs.replace(spec, applies="function") for name, spec in endpoints_of(Functions).items()}
    setattr(Functions, "__trimesh_endpoints__", found)  # noqa: B010 - as `Actor` does
    Functions.__name__ = Functions.__qualname__ = name_for(concurrency)
    return Functions


def __getattr__(name: str) -> Any:
    number = name.removeprefix(_NAME) or "1"
    if not number.isdecimal() or not 0 < int(number) <= limits.FUNCTIONS_AT_ONCE_MAX:
        raise AttributeError(name)
    found = globals()[name] = class_for(int(number))
    return found


def _sent(function: Callable[..., Any], result: Any) -> Any:
    """Return a result with the function whose annotation it is encoded by, where nothing is pickled."""
    return result if current_proc().values.is_pickled else (function, result)


class FunctionMap(ItemMap[R]):
    """A function called once for each item; see `ProcMesh.map`."""

    def __init__(
        self, mesh: MeshView, spec: EndpointSpec, options: Options, function: Callable[..., Any], items: Items
    ) -> None:
        self._function = function
        super().__init__(mesh, spec, options, items)

    @property
    def what(self) -> str:
        return _shown(self._function)

    def _check(self, items: Items) -> None:
        self._check_items(items)  # `_spec_for` has checked the function

    def _arguments(self, unit: Any) -> tuple[verbs.Args, verbs.Kwargs]:
        return (self._function, (unit.item,), {}), {}


def _shown(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


def _unwrapped(function: Any) -> Any:
    """Return the function inside a `functools.partial`; any other as it is."""
    partial_function: Any = function
    return partial_function.func if isinstance(function, partial) else function


def _spec_for(function: Any, args: tuple[Any, ...], *, thread: bool, concurrency: int) -> EndpointSpec:
    """Return the endpoint that runs a function.

    Args:
        function: The function.
        args: Arguments that it will be called with.
        thread: Whether a plain function runs in a thread.
        concurrency: How many functions a process runs at once.

    Raises:
        TypeError: It is no function, is a generator, or does not take these arguments.
        ValueError: `concurrency` is outside its bounds.
    """
    if not callable(function):
        raise TypeError(
            f"a mesh of processes runs a function, got {function!r}: write procs.call(function, *arguments)"
        )
    given: Callable[..., Any] = function
    plain = _unwrapped(function)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise TypeError(f"a function must return its result, got the generator {_shown(plain)}: write an actor with it")
    number = whole_number(concurrency)
    if number is None or not 0 < number <= limits.FUNCTIONS_AT_ONCE_MAX:
        raise ValueError(
            f"concurrency must be a whole number from 1 to limits.FUNCTIONS_AT_ONCE_MAX "
            f"({limits.FUNCTIONS_AT_ONCE_MAX}), got {concurrency!r}"
        )
    try:
        signature_of(given).bind(*args)
    except TypeError as error:
        raise TypeError(f"{_shown(given)}{signature_of(given)}: {error}") from None
    except ValueError:  # a builtin without a signature
        pass
    runs_inline = inspect.iscoroutinefunction(plain) or not thread
    spec = endpoints_of(class_for(number))["run" if runs_inline else "run_in_thread"]
    return msgspec.structs.replace(spec, applied=given)


@asynccontextmanager
async def _actors_on(procs: ProcMesh, concurrency: int) -> AsyncGenerator[MeshView, None]:
    """Provide the actors that run functions on a view of processes.

    On meshes of this process they are spawned once, in the block of the processes; on others for this use.

    Raises:
        RuntimeError: Another process owns the processes, which let their owner alone name functions with pickle="off".
    """
    cls, name = class_for(concurrency), name_for(concurrency).lower()
    owned, region = procs._spawned_here()  # noqa: SLF001 - of its class
    if procs._is_reference and not current_proc().values.is_pickled:  # noqa: SLF001 - as above
        raise RuntimeError(
            f"with pickle='off' only the owner of {procs.name} runs functions there: write an actor with an endpoint, "
            "and start it by `async with procs.spawn(...)`"
        )
    members = None if owned is None else await owned.function_actors.get(name, cls)
    if owned is not None and members is not None:
        membership = members.membership
        view = membership.present if region == owned.whole else region
        if max(view.ranks(), default=0) < len(membership.members):  # a resize keeps the numbers of ranks
            yield MeshView(membership.info, view, endpoints_of(cls), members)
            return
    async with procs.spawn(name, cls) as actors:
        yield actors._view  # type: ignore[attr-defined]  # noqa: SLF001 - an `ActorMesh`, seen as its class


async def run(
    verb: verbs.VerbRow,
    procs: ProcMesh,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    thread: bool,  # noqa: FBT001 - through `in_trio`
) -> Any:
    """Run a function by a verb; see `ProcMesh.call`."""
    spec = _spec_for(function, args, thread=thread, concurrency=1)
    try:
        async with _actors_on(procs, 1) as view:
            return await verbs.run(verb, view, spec, ((function, args, {}), {}), NO_OPTIONS)
    except Exception as error:
        without_own_frames(error)
        raise


def mapped(
    procs: ProcMesh,
    function: Callable[..., Any],
    items: Items,
    options: Options,
    *,
    concurrency: int,
    thread: bool,
) -> AbstractAsyncContextManager[Results[tuple[int, Any]]]:
    """Return the block of results of a function called once for each item; see `ProcMesh.map`."""
    check_items(items)
    spec = _spec_for(function, (None,), thread=thread, concurrency=concurrency)
    options.check(spec)
    return in_trio_block(_mapped(procs, spec, options, function, items, concurrency))


@asynccontextmanager
async def _mapped(
    procs: ProcMesh, spec: EndpointSpec, options: Options, function: Callable[..., Any], items: Items, concurrency: int
) -> AsyncGenerator[Results[tuple[int, Any]], None]:
    async with _actors_on(procs, concurrency) as view:
        window = options.window or min(limits.STREAM_WINDOW_MAX, max(1, len(view.ranks) * concurrency))
        own = msgspec.structs.replace(options, window=window)
        async with FunctionMap[Any](view, spec, own, function, items) as results:
            yield results
