"""What `@endpoint` takes and what it makes of it (rules C4, C5)."""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trimesh import Actor, Reply, endpoint
from trimesh._runtime.values.endpoint_spec import EndpointKind, EndpointSpec, endpoints_of
from trimesh.actor.spawning import check_arguments


class Kinds(Actor):
    """One endpoint of every kind."""

    @endpoint
    async def coroutine(self, a: int, b: int = 2) -> int:
        """Adds."""
        return a + b

    @endpoint
    def inline(self) -> int:
        return 1

    @endpoint(thread=True)
    def thread(self) -> int:
        return 2

    @endpoint(concurrency=4)
    async def many(self) -> None: ...

    @endpoint(group="alone")
    async def alone(self) -> None: ...

    @endpoint(concurrency=4, group="pool", idempotent=True)
    async def pooled(self) -> None: ...


def spec(name: str) -> EndpointSpec:
    return endpoints_of(Kinds)[name]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("coroutine", EndpointKind.ASYNC), ("inline", EndpointKind.INLINE), ("thread", EndpointKind.THREAD)],
)
def test_kind_follows_from_the_function(name: str, kind: EndpointKind):
    assert spec(name).kind is kind


@pytest.mark.parametrize(
    ("name", "slots"),
    [("coroutine", ""), ("inline", ""), ("thread", ""), ("many", "endpoint many"), ("alone", "group alone"),
     ("pooled", "group pool")],
)  # fmt: skip
def test_slots_follow_from_the_options(name: str, slots: str):
    """C4."""
    assert spec(name).slots == slots


def test_options_are_kept():
    assert spec("pooled").idempotent
    assert not spec("many").idempotent
    assert str(spec("coroutine").signature) == "(a: 'int', b: 'int' = 2) -> 'int'"


async def test_endpoint_is_a_plain_method_of_the_object():
    """C5."""
    kinds = Kinds()
    assert await kinds.coroutine(1) == 3
    assert kinds.inline() == 1
    assert await Kinds.coroutine(kinds, 5, b=5) == 10
    assert Kinds.coroutine.__doc__ == "Adds."


def test_concurrency_of_a_plain_def_is_refused():
    """C4: it would have no effect; with `thread=True` it has, and a group gives slots of its own."""
    with pytest.raises(TypeError, match=r"plain def, of which one runs at a time.*thread=True.*group='compute'"):

        @endpoint(concurrency=2)
        def compute(self: Any) -> None: ...

    @endpoint(concurrency=2, thread=True)
    def in_threads(self: Any) -> None: ...

    @endpoint(concurrency=2, group="mixed")
    def inline(self: Any) -> None: ...

    assert (in_threads.spec.concurrency, inline.spec.concurrency) == (2, 2)


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, "2", None])
def test_concurrency_must_be_a_positive_int(concurrency: Any):
    with pytest.raises(TypeError, match="concurrency"):

        @endpoint(concurrency=concurrency)
        async def method(self: Any) -> None: ...


def test_thread_needs_a_plain_function():
    with pytest.raises(TypeError, match="thread=True"):

        @endpoint(thread=True)
        async def method(self: Any) -> None: ...


def test_async_generator_is_known_as_one():
    @endpoint(concurrency=2)
    async def method(self: Any) -> Any:
        yield 1

    assert method.spec.kind is EndpointKind.GENERATOR


def test_plain_generator_is_refused():
    """A stream is an async generator: only that can wait in its `yield`."""
    with pytest.raises(TypeError, match="write an async generator"):

        @endpoint
        def method(self: Any) -> Any:
            yield 1


def test_async_generator_in_a_thread_is_refused():
    with pytest.raises(TypeError, match="thread=True"):

        @endpoint(thread=True)
        async def method(self: Any) -> Any:
            yield 1


def test_function_without_self_is_refused():
    with pytest.raises(TypeError, match="self"):

        @endpoint
        async def method() -> None: ...


@pytest.mark.parametrize(
    "thing", [3, "method", functools.partial(print), classmethod(print), staticmethod(print), print]
)
def test_only_methods_are_endpoints(thing: Any):
    with pytest.raises(TypeError, match="method"):
        endpoint(thing)


def test_endpoint_stands_once_above_a_method():
    with pytest.raises(TypeError, match="must stand once above a method, got it twice above _nothing"):
        endpoint(endpoint(_nothing))


def _nothing(self): ...
def _one(self, a): ...
def _optional(self, a, /, b=1): ...
def _any(self, a, *rest): ...
def _keyword(self, a, *, key): ...
def _optional_keyword(self, a=1, *, key=2, **others): ...


@pytest.mark.parametrize("function", [_nothing, _one, _optional, _any, _keyword, _optional_keyword])
def test_arity_says_what_the_signature_does(function: Any):
    """C5: the short way of checking arguments."""
    found = endpoint(function).spec
    least, most = found.arity
    for count in range(5):
        try:
            found.signature.bind(*range(count))
        except TypeError:
            assert not least <= count <= most
        else:
            assert least <= count <= most


def test_later_replies_are_checked_where_they_are_defined() -> None:
    """A3: and callers see the endpoint without its reply."""
    with pytest.raises(TypeError, match="reply first"):

        @endpoint(reply="later")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        def alone(self: Any) -> None: ...

    with pytest.raises(TypeError, match="by its items"):

        @endpoint(reply="later")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        async def items(self: Any, reply: Reply[int]) -> AsyncIterator[int]:
            yield 1

    with pytest.raises(TypeError, match='reply="later" or no reply'):
        endpoint(reply="now")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]

    class Later(Actor):
        @endpoint(reply="later")
        def ask(self, reply: Reply[int], number: int) -> None: ...

    assert list(endpoints_of(Later)["ask"].signature.parameters) == ["number"]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated late since Python 3.14")
async def test_annotations_may_name_what_is_not_defined_yet() -> None:
    names: dict[str, Any] = {"Actor": Actor, "Reply": Reply, "endpoint": endpoint}
    source = """if True:
        class Early(Actor):
            def __init__(self, part: Later) -> None: self.part = part
            @endpoint
            async def first(self, other: Early, *rest: list[Later]) -> Later: return rest
            @endpoint(reply="later")
            async def second(self, reply: Reply[Later], other: Early) -> None: reply.send(other)
    """
    exec(compile(source, "early.py", "exec", dont_inherit=True), names)

    found = endpoints_of(names["Early"])

    assert [spec.parameters for spec in found.values()] == [("other", "rest"), ("other",)]
    check_arguments(names["Early"], (1,), {})
    with pytest.raises(TypeError, match=r"Early\(part: .*Later.*\).*: missing a required argument: 'part'"):
        check_arguments(names["Early"], (), {})
