"""`torch.distributed` in actors finds its peers by itself."""

from __future__ import annotations

import errno
import os
import signal
import socket
from typing import Any, cast

import pytest

import trimesh
from trimesh import (
    Actor,
    Backoff,
    Isolate,
    MeshErrorGroup,
    ProcDied,
    Restart,
    Retry,
    current_rank,
    endpoint,
    this_host,
)
from trimesh._runtime.meshes.launching import Rendezvous


def test_the_port_is_given_to_nobody_else_and_may_be_listened_on() -> None:
    """The store of torch binds it with SO_REUSEADDR, on all addresses; a socket without cannot."""
    meeting = Rendezvous()
    try:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use") as caught:
            stranger.bind(("127.0.0.1", meeting.port))
        assert caught.value.errno == errno.EADDRINUSE
        for _ in range(2):  # again, as after a restart
            with (
                socket.create_server(("", meeting.port)) as store,
                socket.create_connection(("127.0.0.1", meeting.port)) as client,
            ):
                store.accept()[0].close()
                assert client.recv(1) == b""
    finally:
        meeting.close()


class Told(Actor):
    """Says what its process was told."""

    @endpoint
    def told(self) -> dict[str, str]:
        names = ("MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        return {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.real
async def test_processes_are_told_who_they_are() -> None:
    """As torchrun does; what the user sets comes first, and without rendezvous= nothing is set."""
    async with this_host().spawn_procs({"a": 2, "b": 2}, rendezvous=True, env={"LOCAL_RANK": "9"}) as procs:
        told = (await (await procs.spawn("told", Told)).told.call()).values()
    async with this_host().spawn_procs({}) as procs:
        assert await (await procs.spawn("told", Told)).told.call_one() == {}

    ports = {one.pop("MASTER_PORT") for one in told}
    assert len(ports) == 1
    same = {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "9", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert list(told) == [{"RANK": str(rank), **same} for rank in range(4)]


def join() -> None:
    """Meet the others."""
    import torch.distributed

    torch.distributed.init_process_group("gloo")


class Summing(Actor):
    """Adds the ranks up."""

    @endpoint(thread=True)
    def total(self) -> float:
        import torch.distributed

        one, distributed = torch.tensor(float(current_rank())), cast("Any", torch.distributed)
        distributed.all_reduce(one)
        return float(one)

    @endpoint(thread=True)
    def total_of_others(self, missing: int) -> float:
        if current_rank() == missing:
            os._exit(1)
        return self.total()

    @endpoint
    def die(self) -> None:
        os._exit(1)


@pytest.mark.real
@pytest.mark.torch
async def test_a_process_group_needs_no_address() -> None:
    """Formed in setup=, and anew at the same port when the mesh was restarted as a whole."""
    options: dict[str, Any] = {"rendezvous": True, "setup": join, "preload": ("torch",)}
    async with this_host().spawn_procs({"n": 3}, supervision=Restart("one_for_all"), **options) as procs:
        summing = await procs.spawn("summing", Summing)
        assert list((await summing.total.call()).values()) == [3.0] * 3
        with pytest.raises(ProcDied):
            await summing.slice(n=0).die.call_one()

        assert list((await summing.total.call()).values()) == [3.0] * 3


@pytest.mark.real
@pytest.mark.torch
async def test_error_of_gloo_is_told_by_the_death_that_it_comes_of() -> None:
    """X3: who waits in a collective hears of a death by itself; that is no failure beside the death.

    Under `Isolate` the call waits for all: where a death ends the block, it may end a survivor before that has failed.
    """
    options: dict[str, Any] = {"rendezvous": True, "setup": join, "preload": ("torch",)}
    async with this_host().spawn_procs({"n": 2}, supervision=Isolate(), **options) as procs:
        summing = await procs.spawn("summing", Summing)
        assert list((await summing.total.call()).values()) == [1.0] * 2
        with pytest.raises(MeshErrorGroup) as caught:
            await summing.total_of_others.call(1)
    (death,) = trimesh.leaves(caught.value)
    assert isinstance(death, ProcDied)
    assert any("summing[n=0]" in note and "RuntimeError" in note for note in death.__notes__)


class Step(Actor):
    """A step around a collective, in which the first process of a rank is killed at one stage."""

    def __init__(self, stage: str, victim: int) -> None:
        self.stage, self.victim = stage, victim

    @endpoint(thread=True, idempotent=True)
    def step(self) -> tuple[int, float]:
        import torch.distributed

        incarnation, distributed = trimesh.context(self).incarnation, cast("Any", torch.distributed)
        dies = (current_rank(), incarnation) == (self.victim, 0)
        one = torch.ones(1 << 20)
        if dies and self.stage == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        work = distributed.all_reduce(one, async_op=True)
        if dies and self.stage == "in":
            os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
        if dies and self.stage == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return incarnation, float(one[0])


class StepCaller(Actor):
    @endpoint
    async def call(self, steps: Step) -> list[tuple[int, float]]:
        return [*(await steps.step.options(retry=Retry(3)).call()).values()]


@pytest.mark.real
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "victim"),
    [
        *(("before", 0), ("in", 1), ("after", 1)),
        *(pytest.param(*one, marks=pytest.mark.stress) for one in (("before", 1), ("in", 0), ("after", 0))),
    ],
)
async def test_step_with_a_collective_is_made_again_whole(stage: str, victim: int) -> None:
    """C6: by the program and by an actor; what survivors raise of a lost peer ends no retry."""
    options: dict[str, Any] = {"rendezvous": True, "setup": join, "preload": ("torch",), "grace": 2}
    policy = Restart("one_for_all", backoff=Backoff(0.01))
    async with this_host().spawn_procs({"n": 2}, supervision=policy, **options) as procs:
        steps = await procs.spawn("steps", Step, stage, victim)
        if victim == 0:
            found = [*(await steps.step.options(retry=Retry(3)).call()).values()]
        else:
            async with this_host().spawn_procs({}) as others:
                found = await (await others.spawn("caller", StepCaller)).call.call_one(steps)
    assert found == [(1, 2.0)] * 2
