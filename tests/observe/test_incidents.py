"""Staged incidents: what the commands say names the culprit, without the run having prepared anything (Q1 to Q5)."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.conformance.meeting import make_meetings, meet
from tests.conformance.nodes import Node
from tests.conformance.supervised import Log, reading
from tests.conformance.test_observe import Busy, Relay
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import (
    Actor,
    Died,
    Isolate,
    ProcDied,
    RemoteCancelled,
    Restart,
    Restarted,
    Retry,
    endpoint,
    observe,
    telemetry,
    this_host,
)
from trimesh._wire import flight

pytest.importorskip("cyclopts")

from trimesh.cli.commands import run

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Shell:
    """Runs commands against the run of this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    async def __call__(self, *arguments: str) -> tuple[int, str]:
        """Return exit code and output of a command."""
        self._capfd.readouterr()
        code = await trio.to_thread.run_sync(run, arguments)
        return code, self._capfd.readouterr().out

    async def until(self, text: str | Sequence[str], *arguments: str) -> str:
        """Repeat a command until it says something, all parts in one answer; return what it has said."""
        parts, said = [text] if isinstance(text, str) else text, ""
        with trio.move_on_after(HANG_SECONDS):
            while True:
                _, said = await self(*arguments)
                if all(part in said for part in parts):
                    return said
        raise AssertionError(f"trimesh {' '.join(arguments)} never said {parts}, but:\n{said}")


@pytest.fixture
def trimesh_command(capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capfd)


@asynccontextmanager
async def cancelled_at_the_end() -> AsyncGenerator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()


async def test_rank_that_computes_without_a_checkpoint(trimesh_command: Shell, tmp_path: Path):
    """Q1: it is stuck, and the line is shown; a lock that is held in C makes it silent, with the line, too."""
    over = tmp_path / "over"
    [held] = make_meetings(tmp_path, "held")
    async with this_host().spawn_procs({"gpus": 4}) as procs:
        busy = await procs.spawn("busy", Busy)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(busy.slice(gpus=2).compute.call_one, str(over))
            nursery.start_soon(busy.slice(gpus=3).hold_the_gil.call_one, held)
            while True:
                _, said = await trimesh_command("ps")
                lines = said.splitlines()
                culprits = [
                    line.split("procs[")[-1][:6]
                    for line in lines
                    if "─ procs[" in line and (" stuck" in line or " silent" in line)
                ]
                if culprits == ["gpus=3", "gpus=2"] and "in compute" in said:
                    break
            seen = await trio.to_thread.run_sync(_seen_from_outside)
            rows = {proc.name: proc for proc in seen.procs}
            assert all(proc.memory_bytes for proc in rows.values())
            assert len(observe.read_record(rows["procs[gpus=3]"].record).calls) > 0
            assert {actor.name for actor in seen.actors} == {f"busy[gpus={rank}]" for rank in range(4)}
            await trimesh_command.until(("in compute", "in hold_the_gil"), "stack")
            waits = await trimesh_command.until(
                ("its process is silent", "busy[gpus=3].hold_the_gil waits for no call", "in compute"),
                "calls",
                "--waits",
            )
            await meet(held)
            over.touch()
    assert any("test_observe.py" in line and "in compute" in line for line in lines)
    assert any("no Python code runs" in line and "py-spy dump --native --pid" in line for line in lines)
    assert any("busy[gpus=2].compute waits for no call" in line and "in compute" in line for line in waits.splitlines())


def _seen_from_outside() -> observe.RunSnapshot:
    with observe.find_run() as one:
        return one.snapshot()


@pytest.mark.usefixtures("patient")
async def test_deadlock_under_a_deadline(trimesh_command: Shell):
    """Q2: calls that wait for each other are drawn as a circle, while they do."""
    async with this_host().spawn_procs({"gpus": 2}) as procs, cancelled_at_the_end() as nursery:
        nodes = await procs.spawn("nodes", Node)
        for rank in (0, 1):
            nursery.start_soon(_within, 60.0, nodes.slice(gpus=rank).meet, nodes.slice(gpus=1 - rank))
        await nodes.wait_entered.call(1)
        await nodes.open_gate.call()
        said = await trimesh_command.until("these wait for each other", "calls", "--waits")
    [circle] = [line for line in said.splitlines() if line.startswith("these wait")]
    for part in ("nodes[gpus=0].meet", "nodes[gpus=1].meet", "nodes[gpus=0].ping", "nodes[gpus=1].ping"):
        assert part in circle


async def _within(seconds: float, endpoint: Any, *args: Any) -> None:
    with trio.move_on_after(seconds):
        await endpoint.call_one(*args)


@pytest.mark.usefixtures("patient")
async def test_full_mailbox(trimesh_command: Shell, monkeypatch: pytest.MonkeyPatch):
    """Q2: messages that wait for room, and the call that keeps the mailbox full."""
    monkeypatch.setattr(trimesh.limits, "MAILBOX_MESSAGES", 4)
    async with this_host().spawn_procs({"gpus": 1}) as procs, cancelled_at_the_end() as nursery:
        probes = await procs.spawn("probes", Relay)
        for _ in range(12):
            nursery.start_soon(probes.hold.call_one)
        said = await trimesh_command.until("in hold; 11 calls wait for it", "calls", "--waits")
    assert "room" in said or "sending" in said
    assert len([line for line in said.splitlines() if "waits for no call" in line]) == 1
    assert len(said.splitlines()) < 12  # those that wait alike are one


@pytest.mark.usefixtures("patient")
async def test_rank_that_was_killed(trimesh_command: Shell):
    """Q5: by a person; its mesh does what its policy says, the tables keep it, and say how it ended."""
    async with this_host().spawn_procs({"gpus": 3}, supervision=Isolate()) as procs, reading(procs) as log:
        await procs.spawn("probes", Relay)
        assert await trimesh_command("kill", "probes[gpus=1]") == (0, "")
        await _seen(log)
        code, said = await trimesh_command("ps")
        assert code == 1
        assert ": procs[gpus=1] was killed by SIGKILL" in said.splitlines()[0]
        assert [line for line in said.splitlines() if "─ procs[gpus=1]" in line and " dead" in line]
        _, said = await trimesh_command("events")
        assert re.search(r"Died  procs\[gpus=1\](, probes\[gpus=1\])?  procs\[gpus=1\] was killed by SIGKILL", said)
        assert (await trimesh_command("kill", "probes[gpus=7]"))[0] == 1


async def _seen(log: Log) -> None:
    await log.wait(Died)


async def test_death_names_the_flight_record(monkeypatch: pytest.MonkeyPatch):
    """Q6: that of the process that has died, also where a call meets the death; "" where none is kept."""
    async with this_host().spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
        probes = await procs.spawn("probes", Relay)
        ids = {proc.name: proc.id for proc in (await observe.snapshot()).procs}
        await procs.kill([{"gpus": 1}])
        with pytest.raises(ProcDied) as met:
            await probes.slice(gpus=1).rank.call_one()
        head, _ = flight.read_head(await trio.Path(met.value.record).read_bytes())
    assert (head.proc.name, head.proc.id) == ("procs[gpus=1]", ids["procs[gpus=1]"])
    monkeypatch.setenv("TRIMESH_RECORD", "off")
    async with this_host().spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
        probes = await procs.spawn("probes", Relay)
        await procs.kill([{"gpus": 1}])
        with pytest.raises(ProcDied) as met:
            await probes.slice(gpus=1).rank.call_one()
    assert met.value.record == ""


@pytest.mark.usefixtures("patient")
async def test_slow_rank_among_many(trimesh_command: Shell):
    """Q2: of a call to all, the rank that it still waits for, and where that is."""
    async with this_host().spawn_procs({"gpus": 8}) as procs, cancelled_at_the_end() as nursery:
        probes = await procs.spawn("probes", Relay)
        await probes.slice(gpus=slice(0, 5)).open_gate.call()
        await probes.slice(gpus=slice(6, 8)).open_gate.call()
        nursery.start_soon(probes.wait_for_gate.call)
        await probes.wait.call("gate")
        while True:
            _, said = await trimesh_command("calls")
            if len(said.splitlines()) == 2:
                break
        assert "probes[gpus=5].wait_for_gate  running" in said
        assert "in wait_for_gate" in said


@pytest.mark.usefixtures("patient")
async def test_call_is_cancelled_by_a_person(trimesh_command: Shell):
    """Q5: its caller gets a `RemoteCancelled` that says by whom; the rest goes on."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        probes = await procs.spawn("probes", Relay)
        one = probes.slice(gpus=1)

        async def held() -> None:
            with pytest.raises(RemoteCancelled, match="trimesh cancel"):
                await one.hold.call_one()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(held)
            await one.wait.call_one("hold")
            [call] = (await observe.snapshot()).calls
            _, said = await trimesh_command("calls")
            short = said.splitlines()[1].split()[-1]
            assert len(short) < len(call.id)
            assert await trimesh_command("cancel", short) == (0, "")
        assert await one.rank.call_one() == 1
        assert (await trimesh_command("cancel", "nonsense"))[0] == 1


@pytest.mark.usefixtures("patient")
async def test_numbers_of_a_run(trimesh_command: Shell):
    """Q1: as text for Prometheus; no label has as many values as there are ranks."""
    async with this_host().spawn_procs({"gpus": 2}):
        _, said = await trimesh_command("metrics")
    assert 'trimesh_procs{state="running"} 3' in said
    assert "gpus" not in said
    names = [line.split()[2] for line in said.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    parser = pytest.importorskip("prometheus_client.parser", reason="the environment is older than the extra `test`")
    families = {family.name: family for family in parser.text_string_to_metric_families(said)}
    assert {sample.labels["state"]: sample.value for sample in families["trimesh_procs"].samples} == {"running": 3.0}
    assert {f"{name}{'_total' * (one.type == 'counter')}" for name, one in families.items()} == set(names)
    assert all(one.documentation for one in families.values())


class Failing(Actor):
    @endpoint(idempotent=True)
    def step(self, wrong: bool) -> None:
        if wrong:
            raise ValueError("wrong")


class Trainer(Actor):
    @endpoint
    def step(self) -> None:
        trimesh.log({"loss/train": trimesh.current_rank() + 0.5, 'say "no"\\': 1})
        telemetry.counter("tokens").add(2)
        telemetry.histogram("seconds", [1, 2]).record(1.5)


@pytest.mark.usefixtures("patient")
async def test_metrics_of_the_program_are_summed_over_ranks(trimesh_command: Shell):
    """Q13: counters and histograms are added up, values have mean and bounds; no label is a rank."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call()
        _, said = await trimesh_command("metrics")
    assert 'loss_train{mesh="trainers",over="mean"} 1\n' in said
    assert 'loss_train{mesh="trainers",over="max"} 1.5\n' in said
    assert 'tokens_total{mesh="trainers"} 4\n' in said
    assert 'seconds_bucket{mesh="trainers",le="2"} 2\n' in said
    assert 'trimesh_endpoint_calls_total{mesh="trainers",endpoint="step"} 2\n' in said
    parser = pytest.importorskip("prometheus_client.parser", reason="the environment is older than the extra `test`")
    families = {family.name: family for family in parser.text_string_to_metric_families(said)}
    assert {"loss_train", "say__no__", "tokens", "seconds"} <= set(families)


@pytest.mark.usefixtures("patient")
async def test_calls_deaths_and_retries_are_counted(trimesh_command: Shell):
    """Q17: by endpoint and mesh; a death is not undone by its restart."""
    async with this_host().spawn_procs({"gpus": 2}, supervision=Restart("one_for_one")) as procs:
        workers = await procs.spawn("workers", Failing)
        earlier = re.search(r"^trimesh_call_retries_total (\d+)$", (await trimesh_command("metrics"))[1], re.MULTILINE)
        retries = 1 if earlier is None else 1 + int(earlier[1])  # this process may have made some in other tests
        for wrong in (False, True, False):
            await workers.step.call_settled(wrong)
        one = workers.slice(gpus=0)
        with suppress(ValueError):
            await one.step.options(retry=Retry(1, on=(ValueError,), backoff=0.0)).call_one(True)
        async with procs.events() as events:
            await procs.kill([{"gpus": 1}])
            async for event in events:
                if isinstance(event, Restarted):
                    break
        await workers.step.call(False)
        said = await trimesh_command.until(f"trimesh_call_retries_total {retries}\n", "metrics")
    label = '{mesh="workers",endpoint="step"}'
    assert f"trimesh_endpoint_calls_total{label} 7\n" in said  # those of the dead process are gone with it
    assert f"trimesh_endpoint_errors_total{label} 3\n" in said
    assert 'trimesh_restarted_total{mesh="procs"} 1\n' in said
    assert 'trimesh_died_total{mesh="procs"} 1\n' in said


async def test_machine_is_looked_at(trimesh_command: Shell):
    code, said = await trimesh_command("doctor", "--json")
    assert code == 0
    assert '"kernel"' in said
    assert os.uname().release in said
