"""`Spawning`, which `spawn` and `spawn_procs` return: await it or enter it (rule M1); checks of their arguments."""

from __future__ import annotations

import sys
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, get_args, get_origin

import trio

from trimesh import limits
from trimesh._runtime import life
from trimesh._runtime.system import SEED_MAX, checked_variables
from trimesh._runtime.tasks import TrioBlock, in_trio
from trimesh._runtime.values import MeshInfo, class_of, endpoints_of, is_abstract, signature_of
from trimesh.actor.actor import Actor
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.view import MeshView, Stoppable
from trimesh.context_managers import asynccontextmanager
from trimesh.plain_numbers import real_number, whole_number
from trimesh.shape.extent import Point

if TYPE_CHECKING:
    from trimesh._runtime.life import BorrowedProcs, BorrowPlan

T = TypeVar("T")

Open = Callable[[], AbstractAsyncContextManager[T]]
Adopt = Callable[[], Awaitable[T]]
Env = Mapping[str, str] | Callable[[Point], Mapping[str, str]]
Pickle = Literal["on", "off"]


def checked_name(name: Any) -> str:
    """Return the name of a mesh.

    Raises:
        TypeError: It is no string.
        ValueError: It is empty, or longer than `limits.NAME_CHARS_MAX`.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a mesh must be a string, got {name!r}")
    if not 0 < len(name) <= limits.NAME_CHARS_MAX:
        raise ValueError(
            f"the name of a mesh must have 1 to limits.NAME_CHARS_MAX ({limits.NAME_CHARS_MAX}) characters, "
            f"got {len(name)}"
        )
    return name


def checked_grace(grace: float) -> float:
    """Return seconds for clean-up; `math.inf` waits for ever.

    Raises:
        ValueError: It is negative, or not a number.
    """
    found = real_number(grace)
    if found is None or not found >= 0:
        raise ValueError(f"grace must be a number of seconds >= 0 (math.inf waits for ever), got {grace!r}")
    return found


def checked_env(env: Any) -> Env | None:
    """Return environment variables of processes.

    Raises:
        TypeError: It is no mapping and no function, or has a value that is no text.
        ValueError: A name or a value cannot be in an environment.
    """
    if env is not None and not callable(env):
        if not isinstance(env, Mapping):
            raise TypeError(f"env must be a mapping or a function of the point that returns one, got {env!r}")
        return checked_variables(env, "env")
    return cast("Env | None", env)


def checked_preload(preload: Any) -> tuple[str, ...]:
    """Return names of modules.

    Raises:
        TypeError: They are no sequence of names.
    """
    if isinstance(preload, str) or not isinstance(preload, Iterable):
        given = preload if isinstance(preload, str) else "module"
        raise TypeError(f"preload must be a sequence of names of modules, got {preload!r}: write preload=({given!r},)")
    names = tuple(cast("Sequence[Any]", preload))
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"preload must be names of modules, got {name!r}: write their names as text")
    return names


def checked_seed(seed: Any) -> int | None:
    """Return the seed of the random numbers of processes.

    Raises:
        ValueError: It is not a whole number from 0 to `SEED_MAX`.
    """
    found = whole_number(seed)
    if seed is not None and (found is None or not 0 <= found <= SEED_MAX):
        raise ValueError(f"seed must be a whole number from 0 to {SEED_MAX}, or None, which draws one, got {seed!r}")
    return found


def checked_pickle(pickle: Any) -> bool | None:
    """Return whether values may be pickled; None leaves it to the family.

    Raises:
        ValueError: It is neither "on" nor "off" nor None.
    """
    if pickle not in (None, "on", "off"):
        raise ValueError(f'pickle must be "on" or "off", or left out to follow the family, got {pickle!r}')
    return None if pickle is None else pickle == "on"


class Substitutes:
    """Actor classes that `trimesh.testing.substitute` replaces in this process.

    Attributes:
        classes: The class to spawn, by the one that is asked for.
        setup: Returns a `setup` that makes the same substitutions in a new process; None without any.
    """

    classes: Mapping[type, type] = MappingProxyType({})
    setup: Callable[[Callable[[], Any] | None], Callable[[], Any]] | None = None


def with_substitutes(setup: Callable[[], Any] | None, pickle: str | None) -> Callable[[], Any] | None:
    """Return the `setup` of new processes, in which actors spawn substitutes, too; not where nothing is pickled."""
    make = Substitutes.setup
    if make is None or pickle == "off":
        return setup
    proc = life.find_proc_anywhere()
    return make(setup) if proc is None or proc.values.is_pickled else setup


def checked_class(cls: Any) -> Any:
    """Return an actor class, or one with type arguments, as `Box[int]`; of a substituted class its substitute.

    Raises:
        TypeError: It is no actor class, or it is abstract.
    """
    given, origin = cls, get_origin(cls)
    if isinstance(origin, type) and issubclass(origin, Actor):
        cls = origin
        if getattr(given, "__parameters__", ()):  # in a generic function
            given = given[tuple(Any for _ in given.__parameters__)]
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        if isinstance(cls, Actor):
            name = type(cls).__qualname__
            raise TypeError(
                f"spawn takes a class, of which it makes the actors in their processes, got an object of {name}: "
                f'write spawn("name", {name}, ...) with the arguments of its __init__'
            )
        remedy = f": write `class {cls.__name__}(trimesh.Actor):`" if isinstance(cls, type) else ""
        raise TypeError(f"spawn takes a subclass of trimesh.Actor, got {cls!r}{remedy}")
    if cls in Substitutes.classes:
        return _substitute(given, Substitutes.classes[cls])
    missing = {name for name, spec in endpoints_of(cls).items() if is_abstract(spec)}
    missing |= set[str](getattr(cls, "__abstractmethods__", ()))
    if missing:
        names = ", ".join(sorted(missing))
        raise TypeError(f"{cls.__qualname__} is abstract, it lacks {names}: spawn a subclass that defines them")
    return given


def _substitute(given: Any, other: Any) -> Any:
    """Return a substitute, with the type arguments of the class that is asked for if it takes some."""
    return other[get_args(given)] if get_args(given) and getattr(other, "__parameters__", ()) else other


def check_arguments(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Bind arguments against the signature of a class.

    Raises:
        TypeError: They do not fit.
    """
    cls = class_of(cls)
    try:
        signature_of(cls).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{cls.__qualname__}{signature_of(cls)}: {error}") from None
    except ValueError:  # a class without a signature: its __init__ checks the arguments
        return


def place_of_user() -> str:
    """Return the file and line of the user's code that called this library."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - for the warning
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("trimesh."):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Spawning(TrioBlock[T], Generic[T]):
    """A mesh that has not been started.

    `async with spawning as mesh:` starts it, and the block owns it. `mesh = await spawning` starts it, and the block of
    the mesh that it is spawned on owns it. Only one of them can be done, once.
    """

    def __init__(self, what: str, open_: Open[T], adopt: Adopt[T]) -> None:
        self._what = what
        self._where = place_of_user()
        self._open = open_
        self._adopt = adopt
        self._is_used = self._is_reported = False
        self._entered: AbstractAsyncContextManager[T] | None = None

    def _use(self) -> None:
        if self._is_used:
            raise RuntimeError(f"{self._what} can be started once: call it again for another mesh")
        self._is_used = True

    def _begin(self) -> None:
        self._use()

    if not TYPE_CHECKING:

        def __enter__(self) -> Any:
            self._is_reported = True
            raise TypeError(
                f"{self._what} must be entered by `async with`, got `with`: write `async with` in an async function "
                "that trio.run runs, or use trimesh.blocking, whose meshes are entered by `with`"
            )

        def __exit__(self, *_: object) -> None: ...

    def __await__(self) -> Generator[Any, Any, T]:
        """Start it in the block of the mesh that it is spawned on."""
        self._use()
        return in_trio(self._adopt)().__await__()

    @trio.lowlevel.enable_ki_protection
    async def _enter(self) -> T:
        self._entered = self._open()
        return await self._entered.__aenter__()

    @trio.lowlevel.enable_ki_protection
    async def _leave(self, error: BaseException | None) -> bool | None:
        assert self._entered is not None
        if error is None:
            return await self._entered.__aexit__(None, None, None)
        return await self._entered.__aexit__(type(error), error, error.__traceback__)

    def __getattr__(self, name: str) -> Any:
        self._is_reported = True  # this error replaces the warning of `__del__`
        raise AttributeError(
            f"{self._what} has not been started, so it has no {name!r}: write `mesh = await ...` or "
            "`async with ... as mesh:` first"
        )

    def __del__(self) -> None:
        # The names may be missing when __init__ has failed, and the module may be gone at interpreter exit.
        if not self.__dict__.get("_is_used", True) and not self._is_reported:
            warnings.warn(
                f"{self._what}, made at {self._where}, was never started: write `await` or `async with` before it",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        return f"<{self._what}, not started>"


def handle_on(info: MeshInfo, cls: Any, owner: Stoppable | None) -> Any:
    """Return a handle on all actors of a mesh; `owner` is the owner's side of it, if it is owned here."""
    return ActorMesh(MeshView(info, info.whole, endpoints_of(cls), owner), cls)


def borrowing(plan: BorrowPlan, cls: Any, what: str, home: BorrowedProcs | None) -> Spawning[Any]:
    """Return the start of actors on processes that another process shares.

    Args:
        home: The processes, if a block of this process has borrowed them.
    """

    @asynccontextmanager
    async def open_() -> AsyncGenerator[Any, None]:
        async with life.open_borrowed(plan) as borrowed:
            yield handle_on(borrowed.info, cls, borrowed)

    async def adopt() -> Any:
        if home is not None:
            borrowed = await life.adopt_borrowed(home, plan)
            return handle_on(borrowed.info, cls, borrowed)
        raise RuntimeError(
            f"{plan.procs.name} belongs to another process, whose block cannot adopt actors of this one: write "
            "`async with procs.spawn(...) as actors:`, or get_or_spawn for an actor that stays"
        )

    return Spawning(what, open_, adopt)
