"""What exceptions, results and arguments become on their way (E05, E06; rules M5, X2)."""

from __future__ import annotations

import os
import threading
import traceback
from typing import Any, final

import pytest
from tests.conformance.meshes import Backend
from tests.conformance.probe import Probe

import trimesh
from trimesh import Actor, MeshErrorGroup, RemoteError, endpoint


class KeywordOnly(Exception):
    """Cannot be made from its `args`."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class ReadOnlyArgs(Exception):
    """Refuses its `args`."""

    @property
    def args(self) -> Any:
        return ("fixed",)

    @args.setter
    def args(self, value: Any) -> None:
        raise AttributeError("read-only")


class OwnReduce(Exception):
    """Pickles into something that does not unpickle."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


class Unpicklable(Exception):
    """Carries what cannot travel."""

    def __init__(self) -> None:
        super().__init__("unpicklable")
        self.lock = threading.Lock()


@final
class Final(Exception):
    """Cannot be subclassed, says its author."""


class Slotted(Exception):
    """Keeps its state in slots."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Thrower(Actor):
    """Makes its errors where it raises them."""

    @endpoint
    async def throw(self, kind: str) -> None:
        if kind == "keyword-only":
            raise KeywordOnly(code=7)
        if kind == "read-only args":
            raise ReadOnlyArgs("ignored")
        if kind == "own reduce":
            raise OwnReduce("odd")
        if kind == "unpicklable":
            raise Unpicklable
        if kind == "final":
            raise Final("last")
        if kind == "slotted":
            raise Slotted(8)
        if kind == "unicode":
            b"\xff".decode()
        if kind == "os":
            os.stat("/nonexistent/file")
        if kind == "local":

            class Local(LookupError):
                pass

            raise Local("local")
        raise AssertionError(kind)

    @endpoint
    async def chained(self) -> None:
        try:
            try:
                {}["missing"]
            except KeyError as error:
                raise ValueError("middle") from error
        except ValueError:
            raise RuntimeError("top")  # noqa: B904 - its context is tested

    @endpoint
    async def grouped(self) -> None:
        raise ExceptionGroup("several", [ValueError("one"), ExceptionGroup("inner", [TypeError("two")])])

    @endpoint
    def inline(self) -> None:
        raise LookupError("inline")

    @endpoint
    async def unsendable(self) -> Any:
        return lambda: (yield)

    @endpoint
    async def lock(self) -> Any:
        return threading.Lock()


async def test_group_that_an_endpoint_raises_has_coordinates(backend: Backend):
    """M5, E04: every leaf of it."""
    async with backend.procs({"gpus": 1}) as procs:
        thrower = await procs.spawn("thrower", Thrower)
        with pytest.raises(ExceptionGroup) as bare:
            await thrower.grouped.call_one()
        with pytest.raises(MeshErrorGroup) as caught:
            await thrower.grouped.call()
    assert not isinstance(bare.value, MeshErrorGroup)
    for group in (bare.value, caught.value):
        assert [str(leaf) for leaf in trimesh.leaves(group)] == ["one", "two"]
        assert trimesh.coords(group) == [{"gpus": 0}, {"gpus": 0}]
        assert group.subgroup(TypeError) is not None


TRAVELLERS: dict[str, type[BaseException]] = {
    "keyword-only": KeywordOnly,
    "read-only args": ReadOnlyArgs,
    "own reduce": OwnReduce,
    "unpicklable": Unpicklable,
    "final": Final,
    "slotted": Slotted,
    "unicode": UnicodeDecodeError,
    "os": FileNotFoundError,
    "local": LookupError,
}


@pytest.mark.parametrize("kind", TRAVELLERS)
async def test_strange_exception_arrives_as_itself(backend: Backend, kind: str):
    """E05, X2: never as a decoding failure."""
    async with backend.procs({"gpus": 1}) as procs:
        thrower = await procs.spawn("thrower", Thrower)
        by_name = kind != "local" or backend.pickle == "on"  # a local class travels by value only
        with pytest.raises(TRAVELLERS[kind] if by_name else RemoteError) as caught:
            await thrower.throw.call_one(kind)
        error: Any = caught.value
        assert trimesh.origin(error) is not None or kind == "slotted"
        assert "throw" in "".join(traceback.format_exception(error))
        if kind in ("keyword-only", "slotted"):
            assert error.code in (7, 8)
        if kind == "os":
            assert error.filename == "/nonexistent/file"
        if kind == "unicode":
            assert error.object == b"\xff"
        await thrower.throw.call_settled(kind)


class Odd(BaseException):
    """No `Exception`."""


@pytest.mark.parametrize("error", [KeyboardInterrupt("k"), SystemExit(3), GeneratorExit("g"), Odd("o")])
async def test_exit_raised_by_an_endpoint_is_a_remote_error(backend: Backend, error: BaseException):
    """E06: and the process that raised it lives on."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        pid = await probe.pid.call_one()
        with pytest.raises(RemoteError) as caught:
            await probe.fail.call_one(error)
        assert type(error).__name__ in caught.value.type_name
        with pytest.raises(MeshErrorGroup):
            await probe.fail.call(error)
        (outcome,) = (await probe.fail.call_settled(error)).values()
        assert isinstance(outcome.error, RemoteError)
        assert await probe.pid.call_one() == pid


@pytest.mark.daily("real")
async def test_chain_of_causes_travels(backend: Backend):
    """X2: causes and contexts of the remote chain are kept; the remote traceback ends it."""
    async with backend.procs({"gpus": 1}) as procs:
        thrower = await procs.spawn("thrower", Thrower)
        with pytest.raises(RuntimeError, match="top") as caught:
            await thrower.chained.call_one()
    top = caught.value
    middle = top.__context__
    assert isinstance(middle, ValueError)
    assert isinstance(middle.__cause__, KeyError)
    text = "".join(traceback.format_exception(top))
    for part in ("missing", "middle", "top", "chained"):
        assert part in text


async def test_error_of_a_plain_function(backend: Backend):
    """API 3: inline endpoints fail like others."""
    async with backend.procs({"gpus": 1}) as procs:
        thrower = await procs.spawn("thrower", Thrower)
        with pytest.raises(LookupError, match="inline"):
            await thrower.inline.call_one()


async def test_result_that_cannot_be_sent_is_an_error_of_the_call(backend: Backend):
    """E05, API 3: `TypeError` to the caller, naming the endpoint; the actor lives on."""
    async with backend.procs({"gpus": 1}) as procs:
        thrower = await procs.spawn("thrower", Thrower)
        with pytest.raises(TypeError, match="lock"):
            await thrower.lock.call_one()
        with pytest.raises(LookupError):
            await thrower.inline.call_one()


async def test_argument_that_cannot_be_sent_is_an_error_of_the_caller(backend: Backend):
    """V2, API 3: `TypeError` naming the argument; nothing was sent, to any rank."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        for verb in ("call", "call_settled", "choose", "broadcast"):
            with pytest.raises(TypeError, match=r"note"):
                await getattr(probes.note, verb)(threading.Lock())
        with pytest.raises(TypeError, match=r"note"):
            probes.note.broadcast_nowait({"deep": [threading.Lock()]})
        assert list((await probes.seen.call()).values()) == [[], []]


@pytest.mark.parametrize("verb", ["call", "call_settled", "call_one", "choose", "broadcast"])
async def test_arguments_are_bound_at_the_caller(backend: Backend, verb: str):
    """API 3: `TypeError` naming the endpoint and its signature; nothing was sent."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"other": 2})):
            with pytest.raises(TypeError, match=r"probe\.note\(note"):
                await getattr(probe.note, verb)(*args, **kwargs)
        with pytest.raises(TypeError, match=r"probe\.note\(note"):
            probe.note.broadcast_nowait()
        assert await probe.seen.call_one() == []
