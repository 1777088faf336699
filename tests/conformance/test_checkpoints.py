"""Every async function is a checkpoint, none swallows a cancel, no sync function waits (K01, K02, K03)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend
from tests.conformance.probe import Probe

import trimesh
from trimesh import Endpoint, this_host, this_proc

VERBS = ("call", "call_settled", "call_one", "choose", "broadcast")


def test_all_verbs_are_listed():
    """K01: a new async verb has to be added to this list, and to the tests below."""
    found = {
        name
        for name, value in vars(Endpoint).items()
        if inspect.iscoroutinefunction(value)
        or (isinstance(value, property | functools.cached_property) and not name.startswith("_"))
    }
    assert found == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
async def test_verb_is_a_checkpoint(backend: Backend, verb: str):
    """K01: for views of one member, of all, and of none, where the verb takes them."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        one, none = probes.slice(gpus=0), probes.exclude([{"gpus": 0}, {"gpus": 1}])
        views = {"call_one": [one], "choose": [one, probes]}.get(verb, [one, probes, none])
        for view in views:
            for _ in range(3):
                with trio.testing.assert_checkpoints():
                    await getattr(view.rank, verb)()


@pytest.mark.parametrize("verb", VERBS)
async def test_verb_lets_a_cancel_through(backend: Backend, verb: str):
    """K03: a cancelled scope is seen by every call, also of an empty view, also when it had a result."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        one, none = probes.slice(gpus=0), probes.exclude([{"gpus": 0}, {"gpus": 1}])
        for view in {"call_one": [one], "choose": [one, probes]}.get(verb, [one, probes, none]):
            with trio.CancelScope() as scope:
                scope.cancel()
                await getattr(view.rank, verb)()
                raise AssertionError
            assert scope.cancelled_caught


async def test_entering_and_leaving_are_checkpoints(backend: Backend):
    """K01: of process meshes, actor meshes, warm hosts, with nothing in them."""
    meshes: list[Callable[[], Any]] = [
        lambda: backend.procs({"gpus": 1}),
        lambda: this_proc().spawn("probe", Probe),
        lambda: this_host().warm(),
    ]
    for make in meshes:
        mesh = make()
        with trio.testing.assert_checkpoints():
            await mesh.__aenter__()
        with trio.testing.assert_checkpoints():
            await mesh.__aexit__(None, None, None)


async def test_adopting_is_a_checkpoint(backend: Backend):
    """K01: `await spawn` and `await spawn_procs` on a warm host; of views of all members and of none."""
    async with backend.procs() as procs, this_host().warm() as host:
        adoptions: list[Callable[[], Awaitable[Any]]] = [
            lambda: procs.spawn("probes", Probe),
            lambda: host.spawn_procs({"gpus": 1}),
            lambda: procs.exclude([{"gpus": 0}, {"gpus": 1}]).spawn("none", Probe),
        ]
        for adopt in adoptions:
            with trio.testing.assert_checkpoints():
                await adopt()


async def test_entering_lets_a_cancel_through(backend: Backend):
    """K03."""
    async with backend.procs({"gpus": 1}) as procs:
        with trio.CancelScope() as scope:
            scope.cancel()
            await procs.spawn("probe", Probe)
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            scope.cancel()
            async with procs.spawn("probe", Probe), backend.procs():
                raise AssertionError
        assert scope.cancelled_caught
    with trio.CancelScope() as scope:
        scope.cancel()
        async with backend.procs():
            raise AssertionError
    assert scope.cancelled_caught


async def test_sync_functions_have_no_checkpoint(backend: Backend):
    """K02: shapes, views, contexts, errors, and what makes meshes."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        with trio.testing.assert_no_checkpoints():
            assert len(probes.slice(gpus=0)) == 1
            assert len(list(probes.points())) == 2
            assert probes.size("gpus") == 2
            assert len(probes.alive()) == len(procs.alive()) == 2
            assert repr(probes)
            assert repr(probes.rank)
            probes.rank.broadcast_nowait()
            spawning = procs.spawn("other", Probe)
            with pytest.raises(RuntimeError):
                trimesh.current_rank()
        await spawning
        await probes.wait.call("nothing", 0)
