"""The thread of a rank: order of its batches, reports of progress, and its ends. Steps are plain functions here."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
import trio.testing

torch: Any = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.shape.extent import Extent  # noqa: E402 - after the skip
from trimesh.tensor.rank import runner as runner_module  # noqa: E402
from trimesh.tensor.rank.rank import Free, Rank, Replay, ReplayRecord, TeamOnRank  # noqa: E402
from trimesh.tensor.rank.runner import Runner  # noqa: E402

pytestmark = pytest.mark.torch


@attrs.frozen
class Do:
    """A step."""

    work: Callable[[TeamOnRank], object]

    def execute(self, _: Rank, team: TeamOnRank) -> None:
        self.work(team)


class Proc:
    """What a runner needs of its process: it runs functions of the runtime in a nursery."""

    proc_id = 7
    sites: Any = None

    def __init__(self, nursery: trio.Nursery, *, is_simulated: bool = False) -> None:
        self.is_simulated = is_simulated
        self.served: list[Any] = []
        self._nursery = nursery

    def serve(self, function: Any, *args: Any) -> bool:
        self.served.append((function, args))
        if self.is_simulated:
            self._nursery.start_soon(function, *args)
        return True


@attrs.define
class Ran:
    """A runner, and its reports: the team each, and how many of its commands had been executed."""

    proc: Proc
    runner: Runner
    reports: list[tuple[int, int]] = attrs.field(factory=list)
    came: trio.Event = attrs.field(factory=trio.Event)

    async def reported(self, *last: tuple[int, int]) -> None:
        """Wait for these reports, which may have come already."""
        while not set(last) <= set(self.reports):
            await self.came.wait()

    async def ended(self) -> None:
        """Stop the thread, and see all that it has said."""
        self.runner.stop()
        thread = self.runner._thread
        assert thread is not None
        await trio.to_thread.run_sync(thread.join)
        await trio.testing.wait_all_tasks_blocked()


def a_team(number: int = 1) -> TeamOnRank:
    return TeamOnRank(number, Extent(gpus=1), [0], [], 0, 0)


def made(nursery: trio.Nursery, number: int = 0, *, is_simulated: bool = False) -> Ran:
    proc: Any = Proc(nursery, is_simulated=is_simulated)
    outside: Any = SimpleNamespace()
    found: list[Ran] = []

    def report(team: TeamOnRank) -> None:
        found[0].reports.append((team.number, team.done))
        found[0].came.set()
        found[0].came = trio.Event()

    rank = Rank("procs", Extent(gpus=2), number, torch.device("cpu"), outside)
    found.append(Ran(proc, Runner(proc, rank, report)))
    return found[0]


def count(team: TeamOnRank, more: int = 1) -> None:
    team.done += more


async def test_batches_are_executed_in_order_in_a_thread_without_gradients() -> None:
    found: list[Any] = []
    team = a_team()

    def note(team: TeamOnRank) -> None:
        count(team)
        found.append((team.done, threading.current_thread(), torch.is_grad_enabled()))

    async with trio.open_nursery() as nursery:
        ran = made(nursery)
        assert ran.runner._thread is None
        for _ in range(3):
            ran.runner.put(team, [Do(note), Do(note)])
        await ran.reported((1, 6))
        await ran.ended()
    thread = found[0][1]
    assert found == [(number, thread, False) for number in range(1, 7)]
    assert (thread.name, thread.daemon, thread.is_alive()) == ("tensors of procs", True, False)
    assert ran.reports[-1] == (1, 6)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("first", [runner_module._REPORT_COMMANDS - 2, runner_module._REPORT_COMMANDS])
async def test_progress_is_reported_when_all_is_done_and_every_so_many_commands(first: int) -> None:
    gate = threading.Event()
    team, other, idle = a_team(1), a_team(2), a_team(3)
    async with trio.open_nursery() as nursery:
        ran = made(nursery)
        ran.runner.put(team, [Do(lambda _: gate.wait()), Do(lambda team: count(team, first))])
        ran.runner.put(other, [Do(count)])
        ran.runner.put(idle, [Do(lambda _: None)])
        ran.runner.put(team, [Do(count)])
        ran.runner.put(team, [Do(count)])
        gate.set()
        await ran.reported((1, first + 2), (2, 1))
        await ran.ended()
        is_more = first == runner_module._REPORT_COMMANDS
        assert sorted(number for number, _ in ran.reports) == ([1, 1, 2] if is_more else [1, 2])
        assert dict(ran.reports) == {1: first + 2, 2: 1}


async def test_what_was_reported_is_not_reported_again() -> None:
    team = a_team()
    async with trio.open_nursery() as nursery:
        ran = made(nursery)
        ran.runner.put(team, [Do(count)])
        await ran.reported((1, 1))
        ran.runner.put(team, [Do(lambda _: None)])
        ran.runner.put(a_team(2), [Do(count)])
        await ran.reported((2, 1))
        await ran.ended()
    assert ran.reports == [(1, 1), (2, 1)]


async def test_bug_in_a_step_ends_the_process() -> None:
    error = ZeroDivisionError("a bug")

    def fail(_: TeamOnRank) -> None:
        raise error

    async with trio.open_nursery() as nursery:
        ran = made(nursery)
        ran.runner.put(a_team(), [Do(fail)])
        await ran.ended()
    [(function, args)] = ran.proc.served
    with pytest.raises(ZeroDivisionError) as caught:
        await function(*args)
    assert caught.value is error


async def test_thread_runs_functions_in_trio_and_waits_for_what_they_return() -> None:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    here = threading.current_thread()

    async def twice(number: int) -> Any:
        await trio.lowlevel.checkpoint()
        return 2 * number, threading.current_thread()

    async with trio.open_nursery() as nursery:
        ran = made(nursery)
        ran.runner.put(a_team(), [Do(lambda _: found.put(ran.runner.run_in_trio(twice, 4))), Do(count)])
        await ran.reported((1, 1))
        assert found.get_nowait() == (8, here)
        said: list[Any] = []
        ran.runner.tell(said.append, 1)
        assert said == [1]
        await ran.ended()


def test_what_is_told_when_the_loop_has_ended_is_lost() -> None:
    gate, done = threading.Event(), threading.Event()

    async def main() -> Ran:
        async with trio.open_nursery() as nursery:
            ran = made(nursery)
            ran.runner.put(a_team(), [Do(lambda _: gate.wait()), Do(count)])
            ran.runner.put(a_team(), [Do(lambda _: done.set())])
            return ran

    ran = trio.run(main)
    gate.set()
    ran.runner.stop()
    assert ran.runner._thread is not None
    ran.runner._thread.join()
    assert done.is_set()
    assert ran.reports == []


async def test_sites_see_the_steps_that_compute() -> None:
    seen: list[Any] = []

    @contextlib.contextmanager
    def operating(proc_id: int) -> Iterator[None]:
        seen.append(proc_id)
        yield
        seen.append("done")

    team = a_team()
    local: Any = SimpleNamespace(run=lambda *_: seen.append("replay") or 0)
    team.recordings[3] = ReplayRecord(3, [[]], [], [], [], [], [local])
    async with trio.open_nursery() as nursery:
        ran = made(nursery)
        ran.proc.sites = SimpleNamespace(operating=operating)
        ran.runner.put(team, [Do(lambda _: seen.append("other")), Replay(3, 0, 0, [], 0), Free([1])])
        await ran.reported((1, 1))
        await ran.ended()
    assert seen == ["other", 7, "replay", "done"]


async def test_simulated_ranks_take_turns_with_random_numbers_of_their_own() -> None:
    drawn: list[list[Any]] = [[], []]
    torch.manual_seed(99)
    before = torch.get_rng_state()
    async with trio.open_nursery() as nursery:
        ranks = [made(nursery, number, is_simulated=True) for number in (0, 1)]
        team = a_team()

        def draw(number: int) -> Any:
            return Do(lambda _: drawn[number].append((torch.rand(2), torch.is_grad_enabled())))

        for number in (0, 1, 0, 1):
            ranks[number].runner.put(team, [draw(number), draw(number)])
        assert drawn == [[], []]
        assert [len(ran.proc.served) for ran in ranks] == [1, 1]
        await trio.testing.wait_all_tasks_blocked()
        assert [len(ran.reports) for ran in ranks] == [2, 2]
        ranks[0].runner.put(team, [draw(0)])
        await trio.testing.wait_all_tasks_blocked()
        assert [len(ran.proc.served) for ran in ranks] == [2, 1]
        assert ranks[0].runner._thread is None
        with pytest.raises(RuntimeError, match="collectives and moves between ranks need real processes"):
            ranks[0].runner.run_in_trio(trio.sleep, 0)
    assert torch.equal(torch.get_rng_state(), before)
    for number, found in enumerate(drawn):
        expected = torch.Generator().manual_seed(number)
        for one, is_enabled in found:
            assert torch.equal(one, torch.rand(2, generator=expected))
            assert not is_enabled
    assert [len(found) for found in drawn] == [5, 4]
