"""What is refused when an actor class is defined, and what a live actor is not (rules C4, C5)."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.rows import rows

from trimesh import Actor, endpoint
from trimesh._runtime.values.endpoint_spec import endpoints_of
from trimesh.actor.actor import MESH_ATTRIBUTES


class Base(Actor):
    @endpoint
    async def first(self) -> int:
        return 1

    @endpoint
    async def second(self) -> int:
        return 2


class Derived(Base):
    @endpoint(concurrency=3)
    async def second(self) -> int:
        return 20

    first = None  # type: ignore[assignment]

    @endpoint
    async def third(self) -> int:
        return 3


def test_endpoints_are_collected_from_the_class_and_its_bases():
    """What is overridden by something else is no endpoint any more."""
    assert sorted(endpoints_of(Base)) == ["first", "second"]
    assert sorted(endpoints_of(Derived)) == ["second", "third"]
    assert endpoints_of(Derived)["second"].concurrency == 3
    assert endpoints_of(Base)["second"].concurrency == 1


def test_endpoints_of_a_mixin_are_collected():
    class Mixin(Actor):
        @endpoint
        async def mixed(self) -> None: ...

    class Both(Base, Mixin):
        pass

    assert sorted(endpoints_of(Both)) == ["first", "mixed", "second"]


def test_endpoint_has_the_name_of_its_attribute():
    """Whatever a decorator below `@endpoint`, or an alias, makes of it."""

    def decorated(function: Any) -> Any:
        async def wrapper(self: Any) -> Any:
            return await function(self)

        return wrapper

    class Decorated(Actor):
        @endpoint
        @decorated
        async def step(self) -> None: ...

        alias = step

    assert {name: spec.name for name, spec in endpoints_of(Decorated).items()} == {"step": "step", "alias": "alias"}


@rows("name", sorted(MESH_ATTRIBUTES))
def test_name_of_a_mesh_attribute_is_refused(name: str):
    """C5."""

    async def method(self: Any) -> None: ...

    method.__name__ = name
    with pytest.raises(TypeError, match=rf"must not be called '{name}'"):
        type("Colliding", (Actor,), {name: endpoint(method)})


@pytest.mark.parametrize("name", ["lifespan", "_private", "__call__"])
def test_name_of_ours_is_refused(name: str):
    async def method(self: Any) -> None: ...

    method.__name__ = name
    with pytest.raises(TypeError, match=name):
        type("Colliding", (Actor,), {name: endpoint(method)})


def test_groups_that_disagree_are_refused():
    """C4: also across a base class."""

    class Grouped(Actor):
        @endpoint(concurrency=2, group="g")
        async def one(self) -> None: ...

    with pytest.raises(TypeError, match=r"group 'g'.*one says 2 and two says 3"):

        class Disagreeing(Grouped):
            @endpoint(concurrency=3, group="g")
            async def two(self) -> None: ...

    class Agreeing(Grouped):
        @endpoint(concurrency=2, group="g")
        async def two(self) -> None: ...

        @endpoint(concurrency=3, group="h")
        async def three(self) -> None: ...

    assert {spec.slots for spec in endpoints_of(Agreeing).values()} == {"group g", "group h"}


def test_lifespan_that_is_no_context_manager_is_refused():
    with pytest.raises(TypeError, match="asynccontextmanager"):

        class Generator(Actor):
            async def lifespan(self) -> AsyncGenerator[None, None]:
                yield

    with pytest.raises(TypeError, match="asynccontextmanager"):

        class Coroutine(Actor):
            async def lifespan(self) -> None: ...

    class Fine(Actor):
        @asynccontextmanager
        async def lifespan(self) -> AsyncGenerator[None, None]:
            yield

    assert Fine()


@rows("name", sorted(MESH_ATTRIBUTES))
def test_live_actor_has_no_mesh_attributes(name: str):
    """C5: it names what to use."""
    with pytest.raises(AttributeError, match="current_point"):
        getattr(Base(), name)


def test_other_attributes_are_plainly_missing():
    with pytest.raises(AttributeError, match="'Base' object has no attribute 'nothing'"):
        Base().nothing  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(Base(), "__len__")


def test_attributes_of_mesh_names_may_be_set():
    """A live actor may have an attribute `name`; it is the mesh that has no endpoint of that name."""

    class Named(Base):
        def __init__(self) -> None:
            self.__dict__["name"] = "mine"

    assert Named().name == "mine"


# ---- abstract endpoints ----------------------------------------------------------------------------------------------


class Policy(Actor, abc.ABC):
    """Has abstract endpoints, the decorators in both orders."""

    @abc.abstractmethod
    @endpoint
    async def act(self) -> int: ...

    @endpoint
    @abc.abstractmethod
    async def learn(self) -> int: ...


def test_abstract_endpoints_are_abstract() -> None:
    assert Policy.__abstractmethods__ == {"act", "learn"}
    with pytest.raises(TypeError, match="abstract"):
        Policy()  # type: ignore[abstract]

    class Half(Policy):
        @endpoint
        async def act(self) -> int:
            return 1

    assert Half.__abstractmethods__ == {"learn"}


def test_name_with_an_underscore_is_refused_as_such() -> None:
    with pytest.raises(TypeError, match="must not begin with an underscore"):

        class Worker(Actor):
            @endpoint
            async def _step(self) -> None: ...
