"""Common mistakes: the error says what to write instead."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, only_real, only_sim
from tests.conformance.probe import Probe

import trimesh
from trimesh import Actor, MeshErrorGroup, aio, endpoint, limits
from trimesh.errors import leaves


class Mistaken(Actor):
    """Has endpoints that are written for asyncio, or call themselves as a mesh is called."""

    @endpoint
    async def sleep(self) -> None:
        await asyncio.sleep(1)

    @endpoint
    async def queue(self) -> None:
        await asyncio.Queue[int]().get()

    @endpoint
    async def task(self) -> None:
        asyncio.create_task(asyncio.sleep(1))  # noqa: RUF006 - it is not made

    @endpoint
    async def itself(self) -> None:
        await self.sleep.call()

    def helper(self) -> int:
        return 1


class Foreign(aio.Actor):
    """Has an endpoint that is written for Trio."""

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep(1)


class Slow(Actor):
    """Is not ready on one rank before it is told."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if trimesh.current_rank() == 1:
            await trio.sleep(3600)
        yield


def notes_of(error: BaseException) -> str:
    return "\n".join(note for leaf in leaves(error) for note in getattr(leaf, "__notes__", ()))


async def failed(call: Callable[[], Any]) -> str:
    with pytest.raises(MeshErrorGroup) as caught:
        await call()
    return notes_of(caught.value)


async def test_unawaited_call_is_named(backend: Backend):
    """C5: wherever its coroutine is used, with what to write."""
    for verb in ("call", "call_one"):
        with pytest.raises(MeshErrorGroup) as caught:
            async with backend.procs({"gpus": 1}) as procs:
                probes = await procs.spawn("probes", Probe)
                loss: Any = getattr(probes.rank, verb)()
                loss += 1
        assert f"write `await probes.rank.{verb}(...)`" in notes_of(caught.value)
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            probes = await procs.spawn("probes", Probe)
            getattr(probes.rank.call(), "get")()  # noqa: B009 - for checkers of types
    assert "write `await probes.rank.call(...)`" in notes_of(caught.value)
    gc.collect()  # no warning of the same follows


async def test_unawaited_call_is_warned_of(backend: Backend):
    """C5: with the verb that the coroutine is of."""
    async with backend.procs({"gpus": 1}) as procs:
        probes = await procs.spawn("probes", Probe)
        with pytest.warns(RuntimeWarning, match=r"await mesh\.endpoint\.call\(\.\.\.\)` *\)' was never awaited"):
            probes.rank.call()
            gc.collect()


async def test_asyncio_in_an_actor_of_trio_is_named(backend: Backend):
    """A1: with what Trio has in its place."""
    async with backend.procs({"gpus": 1}) as procs:
        mistaken = await procs.spawn("mistaken", Mistaken)
        for name, instead in (
            ("sleep", "asyncio.sleep does not work: write trio.sleep, or derive the actor from trimesh.aio.Actor"),
            ("queue", "asyncio.Queue.get does not work: write trio.open_memory_channel"),
            ("task", "asyncio.create_task does not work: write trio.open_nursery"),
        ):
            assert instead in await failed(getattr(mistaken, name).call)
        assert "`sleep(...)`; verbs such as call belong to the handle" in await failed(mistaken.itself.call)


@only_real
async def test_trio_in_an_actor_of_asyncio_is_named(backend: Backend):
    """A1."""
    async with backend.procs({"gpus": 1}) as procs:
        foreign = await procs.spawn("foreign", Foreign)
        text = await failed(foreign.sleep.call)
    assert "trio.sleep does not work: write asyncio.sleep, or derive the actor from trimesh.Actor" in text


async def test_names_that_a_mesh_does_not_have_are_answered(backend: Backend):
    """C5: misspelt ones by the nearest, those of Ray and Monarch by what to write here."""
    async with backend.procs({"gpus": 2}) as procs:
        mistaken: Any = await procs.spawn("mistaken", Mistaken)
        started = mistaken.sleep.call_settled.start()
        for use, text in (
            (lambda: mistaken.slepe, r"no endpoint 'slepe' \(is it sleep\?\); its endpoints are: itself, queue"),
            (lambda: mistaken.helper, r"Mistaken\.helper is no endpoint: write @endpoint above its `def`"),
            (lambda: mistaken.sleep.cal, r"no verb 'cal' \(is it call\?\)"),
            (lambda: mistaken.sleep.remote, r"no 'remote': write `await mistaken\.sleep\.call\(\.\.\.\)`"),
            (lambda: started.result, "no 'result': write `await` before it"),
            (lambda: Mistaken.remote, r"no 'remote': write `await procs\.spawn\('name', Mistaken, \.\.\.\)`"),
        ):
            with pytest.raises(AttributeError, match=text):
                use()
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'retries'.*retry"):
            mistaken.sleep.options(retries=2)
        with pytest.raises(ValueError, match=r"slice it to one, as by slice\(gpus=0\)"):
            await mistaken.sleep.call_one()
        with pytest.raises(TypeError, match=r"write `class int\(trimesh\.Actor\):`"):
            procs.spawn("numbers", int)
        with pytest.raises(TypeError, match=r'write spawn\("name", Mistaken, \.\.\.\)'):
            procs.spawn("mistaken", Mistaken())
        await started


def test_meshes_are_not_entered_by_with():
    """M1: what to write instead is said, once."""
    with (
        pytest.raises(TypeError, match=r"`async with`, got `with`.*trimesh\.blocking"),
        trimesh.this_host().spawn_procs({}),
    ):
        raise AssertionError
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'graze'.*grace"):
        trimesh.this_host().spawn_procs({}, graze=1)  # type: ignore[call-arg]
    gc.collect()  # nothing was forgotten


# ---- what is logged --------------------------------------------------------------------------------------------------


@only_sim
async def test_spawn_that_waits_is_logged_once(backend: SimBackend, caplog: pytest.LogCaptureFixture):
    """M1: with the processes that are not ready."""
    caplog.set_level(logging.WARNING, "trimesh")
    async with backend.procs({"gpus": 3}) as procs:
        await procs.spawn("quick", Probe)
        await procs.spawn("slow", Slow)
    [text] = [one.getMessage() for one in caplog.records if "spawn of" in one.getMessage()]
    assert text.startswith(f"spawn of slow has waited for {limits.SPAWNING_LOG_SECONDS:g} s: __init__ or lifespan")
    assert re.search(r"\n  procs\[gpus=1\] pid \d+: .*in the start of an actor for 10\.\d s", text)
    assert "nothing is awaited from 2 other processes" in text


async def test_large_values_are_logged_once_for_an_endpoint(backend: Backend, caplog: pytest.LogCaptureFixture):
    """V1: arguments and results, by the caller."""
    caplog.set_level(logging.WARNING, "trimesh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LARGE_VALUE_BYTES", 1 << 20)
        async with backend.procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            for _ in range(2):
                await probes.note.call(bytes(1 << 20))
                await probes.note.call(bytes(1 << 10))
    texts = [one.getMessage() for one in caplog.records if "by value" in one.getMessage()]
    assert [text.partition(" of ")[0] for text in texts] == ["probes.note: arguments", "probes.note: result"]
    assert "RDMABuffer" in texts[0]
