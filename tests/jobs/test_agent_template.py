"""Agents of a `LocalJob` that are forked from one process are what executed ones are."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of

from trimesh.jobs.launcher import ChildAgent
from trimesh.jobs.local import AgentTemplate, LocalJob


async def test_forked_agent_leads_a_session_and_ends_with_its_lifeline() -> None:
    """H2: and so does its spawner, which has nothing of it open."""
    with trio.fail_after(HANG_SECONDS):
        template = AgentTemplate.start()
        try:
            first, second = await template.fork("a"), await template.fork("b")
            assert first is not None
            assert second is not None
            spawner = await _spawner_of(first.pid)
            assert [os.getsid(pid) for pid in (first.pid, second.pid, spawner)] == [first.pid, second.pid, spawner]
            assert parent_of(first.pid) == parent_of(second.pid) != os.getpid()
            assert os.readlink(f"/proc/{spawner}/fd/0") == os.devnull
            assert not _pipes_of(spawner) & (_pipes_of(first.pid) | _pipes_of(second.pid))
            assert second.returncode is None
            await first.stdin.aclose()
            assert await first.wait() == first.returncode == 1
            assert b"trimesh agent: " in await first.stderr.receive_some()
            assert second.returncode is None
            second.send_signal(signal.SIGKILL)
            assert await second.wait() == -signal.SIGKILL
            for one in (first, second):
                await one.stdin.aclose()
                await one.stderr.aclose()
        finally:
            await template.close()


async def test_agents_are_executed_where_a_forked_one_would_not_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """H1: the environment of the program has changed since, or the template is gone."""
    launcher = LocalJob(2).launcher()
    agents = list[ChildAgent]()

    async def begin() -> ChildAgent:
        agents.append(ChildAgent(await launcher._process_for("a")))
        return agents[-1]

    with trio.fail_after(HANG_SECONDS):
        async with launcher.open():
            forked = await begin()
            template = parent_of(forked.pid)
            assert template != os.getpid()
            with monkeypatch.context() as changed:
                changed.setenv("TRIMESH_TEST_SINCE", "1")
                assert parent_of((await begin()).pid) == os.getpid()
            os.kill(template, signal.SIGKILL)
            assert (await forked.wait()).text == "SIGKILL"
            assert parent_of((await begin()).pid) == os.getpid()
            for agent in agents:
                await agent.stop()


async def _spawner_of(agent: int) -> int:
    """Wait until an agent has a spawner that has let go of what is the agent's, and return it."""
    while True:
        for child in _text(f"/proc/{agent}/task/{agent}/children").split():
            if _text(f"/proc/{child}/comm") == "trimesh-spawner\n":
                return int(child)
        await trio.sleep(0.01)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return ""


def _pipes_of(pid: int) -> set[str]:
    """Return the pipes that a process has, but for its standard output and error, which are those of all."""
    found = set[str]()
    for name in os.listdir(f"/proc/{pid}/fd"):
        if name not in ("1", "2"):
            with suppress(FileNotFoundError):  # closed meanwhile
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {one for one in found if one.startswith("pipe:")}
