"""`substitute`: spawns of one actor class start another one, in every process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import attrs

from trimesh._runtime.life import current_proc
from trimesh._runtime.values import GENERATOR, EndpointSpec, endpoints_of
from trimesh.actor.actor import Actor
from trimesh.actor.spawning import Substitutes


@contextmanager
def substitute(cls: type[Actor], fake: type[Actor], /) -> Generator[None, None, None]:
    """Start one actor class wherever another one is spawned, while the block is open.

    `with substitute(Engine, FakeEngine):` applies to spawns of this process, and of actors in processes that are
    started inside the block, also to `get_or_spawn`. Blocks nest; the inner one wins. With `pickle="off"` it applies to
    spawns of this process only, as classes do not travel in `setup=` there.

    Args:
        cls: The class that the program spawns; its subclasses are not replaced.
        fake: The class of the actors that are made. It has at least the endpoints of `cls`, of the same kind, with
            parameters for the same arguments.

    Raises:
        TypeError: One of them is no actor class, or an endpoint is missing or differs.
    """
    for one in (cls, fake):
        given: object = one
        if not (isinstance(given, type) and issubclass(given, Actor)):
            raise TypeError(f"substitute takes two actor classes, got {given!r}: write substitute(Engine, FakeEngine)")
    for name, spec in endpoints_of(cls).items():
        _check(cls, fake, spec, endpoints_of(fake).get(name))
    before = Substitutes.classes, Substitutes.setup
    _use({**Substitutes.classes, cls: fake})
    try:
        yield
    finally:
        Substitutes.classes, Substitutes.setup = before


def _use(classes: Mapping[type, type]) -> None:
    Substitutes.classes = MappingProxyType(dict(classes))
    Substitutes.setup = lambda setup: _SubstitutingSetup(tuple(classes.items()), setup)


def _check(cls: type, fake: type, spec: EndpointSpec, other: EndpointSpec | None) -> None:
    name = f"{fake.__qualname__}.{spec.name}"
    if other is None:
        raise TypeError(
            f"a substitute must have the endpoints of {cls.__qualname__}, got {fake.__qualname__} without "
            f"{spec.name}: add `@endpoint async def {spec.name}(...)`"
        )
    if (spec.kind is GENERATOR) is not (other.kind is GENERATOR):
        kind = "an async generator" if spec.kind is GENERATOR else "no generator"
        raise TypeError(f"a substitute must have endpoints of the same kind, got {name}, which must be {kind}")
    if spec.idempotent and not other.idempotent:
        raise TypeError(f"{name} must be idempotent, as that of {cls.__qualname__}: write @endpoint(idempotent=True)")
    args: list[str] = []
    kwargs: dict[str, str] = {}
    for parameter in spec.signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = ""
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            args.append("")
    try:
        other.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"a substitute must take the arguments of {cls.__qualname__}.{spec.name}{spec.signature}, got "
            f"{name}{other.signature}: {error}"
        ) from None


@attrs.frozen
class _SubstitutingSetup:
    """The `setup` of a process in which actors spawn substitutes, too.

    Attributes:
        classes: Pairs of a class and its substitute.
        setup: The user's own `setup`, which runs afterwards.
    """

    classes: tuple[tuple[type, type], ...]
    setup: Callable[[], Any] | None = None

    async def __call__(self) -> None:
        """Substitute in this process; simulated ones share the table of the test."""
        if not current_proc().is_simulated:
            _use(dict(self.classes))
        result = None if self.setup is None else self.setup()
        if inspect.isawaitable(result):
            await result
