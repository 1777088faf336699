"""When a process may spin on its links before it sleeps, when its loop asks for it, and how it wakes."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from trimesh import limits
from trimesh._native import lib
from trimesh._transport.interface import Link, LinkDown, LinkHandler
from trimesh._transport.native import transport as native
from trimesh._transport.native.loop_waits import AroundWait, Poller, chosen_spin_seconds, poller_of_run
from trimesh.config import Settings
from trimesh.ids import ProcId


@pytest.fixture
def quota(tmp_path: Path) -> Path:
    return tmp_path / "cpu.max"


@pytest.mark.parametrize(("said", "seconds"), [("auto", limits.SPIN_SECONDS), ("off", 0.0)])
def test_setting_says_whether_a_process_may_spin(quota: Path, said: str, seconds: float):
    assert chosen_spin_seconds(Settings(spin=said), quota) == seconds


@pytest.mark.parametrize(("said", "may"), [("150000 100000", False), ("200000 100000", True), ("max 100000", True)])
def test_quota_below_two_cores_ends_looking(quota: Path, said: str, may: bool):
    quota.write_text(said)
    assert (chosen_spin_seconds(Settings(), quota) > 0) is may


def test_run_waits_on_a_set_that_tells_of_other_work():
    async def main() -> bool:
        poller = poller_of_run()
        assert poller is not None
        assert not poller.is_guest
        looking = select.poll()
        looking.register(poller.epoll.fileno(), select.POLLIN)
        await trio.testing.wait_all_tasks_blocked()  # the task that takes calls sleeps, too
        trio.lowlevel.current_trio_token().run_sync_soon(lambda: None)
        return bool(looking.poll(0))

    assert trio.run(main)


def test_guest_run_is_one():
    queue: list[Any] = []
    found: list[Poller | None] = []
    ended: list[object] = []

    async def main() -> None:
        found.append(poller_of_run())

    trio.lowlevel.start_guest_run(
        main, run_sync_soon_threadsafe=queue.append, done_callback=ended.append, host_uses_signal_set_wakeup_fd=False
    )
    while not ended:
        if queue:
            queue.pop(0)()
    assert found[0] is not None
    assert found[0].is_guest


def test_outside_of_a_run_there_is_none():
    assert poller_of_run() is None


@pytest.mark.parametrize(("name", "value"), [("_epoll", None), ("_registered", {})])
def test_trio_that_keeps_its_set_otherwise_has_none(monkeypatch: pytest.MonkeyPatch, name: str, value: object):
    async def main() -> Poller | None:
        manager = trio._core._run.GLOBAL_RUN_CONTEXT.runner.io_manager  # type: ignore[attr-defined]
        with monkeypatch.context() as patched:
            patched.setattr(manager, name, value)
            return poller_of_run()

    assert trio.run(main) is None


class Fake:
    """A transport that notes what it is asked for."""

    def __init__(self, spin_seconds: float, seen: int = 2) -> None:
        self.asked: list[str] = []
        self.spin_seconds = spin_seconds
        self.dirty = False
        self.lending = SimpleNamespace(returned=[])
        self.spins = [0, 0, 0, 0]
        self.bus = None
        self.library = SimpleNamespace(
            lib=SimpleNamespace(tm_before_wait=self._before_wait, tm_has_news=self._has_news)
        )
        self.has_news = False
        self.waits_left = self.skips_left = 0
        self.coming = [1, 1, 0]
        self._seen = seen

    def wait_for(self, poller: int) -> int:
        self.asked.append(f"pass on {poller}")
        return self.coming.pop(0)

    def _has_news(self, bus: object) -> bool:
        return self.has_news

    def _before_wait(self, bus: object, poller: int) -> int:
        self.asked.append(f"wait on {poller}")
        return self._seen if self._seen < 0 or poller >= 0 else 0

    def flush(self) -> None:
        self.asked.append("flush")

    def wake(self) -> None:
        self.asked.append("wake")

    def look(self) -> int:
        return 1

    def hand_over(self, handler: object, n: int) -> None:
        assert n == 1
        self.asked.append("take")


def around_wait(fake: Fake, poller: Poller | None) -> AroundWait:
    async def make() -> AroundWait:
        return AroundWait(fake, None, poller)  # type: ignore[arg-type]

    return trio.run(make)


@pytest.fixture
def poller() -> Iterator[Poller]:
    with select.epoll() as epoll:
        yield Poller(epoll, is_guest=False)


def test_loop_that_can_go_on_only_flushes(poller: Poller):
    fake = Fake(1e-4)
    instrument = around_wait(fake, poller)
    instrument.before_io_wait(0)
    assert fake.asked == []
    fake.dirty = True
    instrument.before_io_wait(0)
    assert fake.asked == ["flush"]


def test_loop_with_a_deadline_in_that_time_does_not_look(poller: Poller):
    fake = Fake(1e-4)
    around_wait(fake, poller).before_io_wait(1e-4)
    assert fake.asked == ["wait on -1"]
    assert fake.spins == [0, 0, 0, 0]


def test_loop_that_is_about_to_sleep_looks(poller: Poller):
    fake = Fake(1e-4)
    fake.dirty = True
    around_wait(fake, poller).before_io_wait(86400)
    assert fake.asked == [f"wait on {poller.epoll.fileno()}"]
    assert not fake.dirty
    assert fake.spins == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("seconds", "has_poller", "is_guest"), [(0.0, True, False), (1e-4, True, True), (1e-4, False, False)]
)
def test_loop_that_may_not_look_never_does(poller: Poller, seconds: float, has_poller: bool, is_guest: bool):
    fake = Fake(seconds)
    around_wait(fake, poller._replace(is_guest=is_guest) if has_poller else None).before_io_wait(math.inf)
    assert fake.asked == ["wait on -1"]


def test_refusal_of_the_library_is_raised_by_the_task_that_serves(poller: Poller):
    fake = Fake(1e-4, seen=lib.ERR_FORKED)
    instrument = around_wait(fake, poller)
    instrument.before_io_wait(math.inf)
    assert fake.asked[-1] == "wake"
    assert instrument.failure is not None


def test_what_comes_while_tasks_can_run_is_left_to_a_task_if_it_may_be_an_answer(poller: Poller):
    """AW-1."""
    fake = Fake(1e-4)
    instrument = around_wait(fake, poller)
    fake.dirty = True
    instrument.before_io_wait(0)
    instrument.after_io_wait(0)
    assert fake.asked == ["flush"]
    fake.has_news = True
    instrument.after_io_wait(0)
    assert fake.asked == ["flush", "wake"]
    fake.dirty = False
    instrument.before_io_wait(0)
    instrument.after_io_wait(0)
    assert fake.asked == ["flush", "wake", "take"]


class Runner:
    """A run of Trio whose tasks and deadlines a test decides."""

    def __init__(self) -> None:
        self.runq = ["the one that was woken"]
        self.waiting_for_idle: list[str] = []
        self.deadlines = self
        self.clock = self
        self.deadline = math.inf

    def next_deadline(self) -> float:
        return self.deadline

    def current_time(self) -> float:
        return 5


@pytest.fixture
def alone(poller: Poller) -> tuple[Fake, Runner, AroundWait]:
    """A turn of the loop in which a message has woken one task, which runs."""
    fake, runner = Fake(1e-4), Runner()
    instrument = around_wait(fake, poller._replace(runner=runner))
    instrument.before_io_wait(math.inf)
    instrument.after_io_wait(math.inf)
    runner.runq.clear()
    fake.asked.clear()
    return fake, runner, instrument


def test_task_that_is_alone_waits_itself_until_nothing_comes(alone: tuple[Fake, Runner, AroundWait], poller: Poller):
    """AW-2."""
    fake, _, instrument = alone
    assert [instrument.wait_here() for _ in range(4)] == [True, True, False, False]
    waits = f"pass on {poller.epoll.fileno()}"
    assert fake.asked == [waits, "take", waits, "take", waits]


def test_task_that_has_waited_in_vain_is_not_followed_by_others_at_once(alone: tuple[Fake, Runner, AroundWait]):
    """What costs a turn nothing where answers are quick would double it where they are slow."""
    fake, runner, instrument = alone
    fake.coming = [0]
    assert not instrument.wait_here()
    runner.runq.append("the one that was woken")
    left: list[int] = []
    for _ in range(limits.TURNS_LEFT_OUT + 1):
        instrument.before_io_wait(math.inf)
        instrument.after_io_wait(math.inf)
        left.append(fake.waits_left)
    assert left == [0] * limits.TURNS_LEFT_OUT + [limits.WAITS_HERE_MAX]


def test_task_waits_itself_only_so_often_in_one_turn(alone: tuple[Fake, Runner, AroundWait]):
    """AW-2."""
    fake, _, instrument = alone
    fake.coming = [1] * 100
    assert [instrument.wait_here() for _ in range(100)].count(True) == limits.WAITS_HERE_MAX
    instrument.before_io_wait(math.inf)
    assert fake.waits_left == 0


@pytest.mark.parametrize("why", ["a task can run", "a deadline is due", "a task waits for quiet"])
def test_task_beside_which_something_is_to_be_done_leaves_the_wait_to_the_loop(
    alone: tuple[Fake, Runner, AroundWait], why: str
):
    """AW-2."""
    fake, runner, instrument = alone
    if why == "a task can run":
        runner.runq.append("another one")
    elif why == "a deadline is due":
        runner.deadline = runner.current_time() + limits.WAIT_HERE_SECONDS / 2
    else:
        runner.waiting_for_idle.append("another one")
    assert not instrument.wait_here()
    assert fake.asked == []
    runner.runq.clear()
    runner.waiting_for_idle.clear()
    runner.deadline += 1
    assert instrument.wait_here()


def test_two_tasks_of_one_turn_leave_their_waits_to_the_loop(poller: Poller):
    """AW-2: what is left of a turn cannot be asked for."""
    fake, runner = Fake(1e-4), Runner()
    runner.runq.append("another one")
    instrument = around_wait(fake, poller._replace(runner=runner))
    instrument.after_io_wait(math.inf)
    runner.runq.clear()
    assert not instrument.wait_here()


@pytest.mark.parametrize("spin_seconds", [1e-4, 0.0])
def test_task_that_is_alone_skips_turns_only_so_often_in_one(
    monkeypatch: pytest.MonkeyPatch, poller: Poller, spin_seconds: float
):
    """AW-3: also where the process may not spin."""
    monkeypatch.setattr(limits, "SKIP_TURNS_SECONDS", 60.0)
    fake, runner = Fake(spin_seconds), Runner()
    instrument = around_wait(fake, poller._replace(runner=runner))
    instrument.after_io_wait(0)
    runner.runq.clear()
    assert skip_all(fake, instrument) == limits.SKIP_TURNS_MAX
    instrument.after_io_wait(0)  # no task was woken
    assert not fake.skips_left


def skip_all(fake: Fake, instrument: AroundWait) -> int:
    """Return how many turns a task can skip."""

    async def main() -> int:
        skipped = 0
        while fake.skips_left and instrument.skip_turn():
            skipped += 1
        return skipped

    return trio.run(main)


def test_skipped_turn_wakes_peers(monkeypatch: pytest.MonkeyPatch, alone: tuple[Fake, Runner, AroundWait]):
    """AW-3."""
    fake, runner, instrument = alone
    monkeypatch.setattr(limits, "SKIP_TURNS_SECONDS", 60.0)
    for fake.dirty in (False, True):
        runner.runq.append("the one that runs")
        instrument.after_io_wait(0)
        runner.runq.clear()
        fake.asked.clear()
        fake.skips_left = 1
        assert skip_all(fake, instrument) == 1
        assert fake.asked == (["flush"] if fake.dirty else [])


@pytest.mark.parametrize("why", ["a task can run", "a deadline is due", "a task waits for quiet", "it ran for long"])
def test_task_beside_which_something_is_to_be_done_skips_no_turn(
    monkeypatch: pytest.MonkeyPatch, alone: tuple[Fake, Runner, AroundWait], why: str
):
    """AW-3."""
    fake, runner, instrument = alone
    assert fake.skips_left
    if why == "a task can run":
        runner.runq.append("another one")
    elif why == "a deadline is due":
        runner.deadline = runner.current_time()
    elif why == "a task waits for quiet":
        runner.waiting_for_idle.append("another one")
    else:
        monkeypatch.setattr(limits, "SKIP_TURNS_SECONDS", -1.0)
        runner.runq.append("the one that runs")
        instrument.after_io_wait(0)
        runner.runq.clear()
    assert skip_all(fake, instrument) == 0
    assert not fake.skips_left


@pytest.mark.parametrize("why", ["a task can run", "a deadline is about to be due"])
def test_two_tasks_of_one_turn_skip_none(poller: Poller, why: str):
    """AW-3."""
    fake, runner = Fake(1e-4), Runner()
    if why == "a task can run":
        runner.runq.append("another one")
    else:
        runner.deadline = runner.current_time() + limits.SKIP_TURNS_MARGIN_SECONDS / 2
    around_wait(fake, poller._replace(runner=runner)).after_io_wait(0)
    assert not fake.skips_left


def test_turn_after_messages_were_sent_can_be_the_last_for_a_while(poller: Poller):
    """AW-3: unless an answer has come, which the transport's task hands over."""
    fake, runner = Fake(1e-4), Runner()
    instrument = around_wait(fake, poller._replace(runner=runner))
    for fake.has_news in (False, True):
        fake.dirty = True
        instrument.before_io_wait(0)
        instrument.after_io_wait(0)
        assert bool(fake.skips_left) is not fake.has_news


class Careless:
    """A handler that breaks its promise not to raise."""

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        raise LookupError(bytes(head).decode())

    def link_down(self, link: Link, down: LinkDown) -> None:
        raise AssertionError(down)

    def link_stalled(self, link: Link, seconds: float) -> None:
        raise AssertionError(seconds)


class Noting(Careless):
    """A handler that keeps what comes."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.news = trio.Event()

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        self.heads.append(bytes(head))
        self.news.set()

    async def wait_for(self, n: int) -> None:
        while len(self.heads) < n:
            self.news = trio.Event()
            await self.news.wait()


@asynccontextmanager
async def pair_of_transports(*handlers: LinkHandler) -> AsyncIterator[list[Link]]:
    ends = [native.NativeTransport(ProcId(i + 1)) for i in range(2)]
    links = [end.open_link(sock, local=True, lease=False) for end, sock in zip(ends, socket.socketpair(), strict=True)]
    try:
        async with trio.open_nursery() as nursery:
            for end, handler in zip(ends, handlers, strict=True):
                nursery.start_soon(end.run, handler)
            for link in links:
                await link.up.wait()
            yield [*links]
            nursery.cancel_scope.cancel()
    finally:
        for end in ends:
            end.close()


def test_error_of_a_handler_ends_the_task_that_serves():
    async def main() -> None:
        async with pair_of_transports(Careless(), Careless()) as links:
            await trio.testing.wait_all_tasks_blocked()
            links[0].send(b"of a handler")
            await trio.sleep_forever()

    with pytest.RaisesGroup(pytest.RaisesExc(LookupError, match="of a handler")):
        trio.run(main)


@pytest.mark.parametrize("has_poller", [True, False])
def test_loop_wakes_for_messages_and_large_ones_with_any_trio(monkeypatch: pytest.MonkeyPatch, has_poller: bool):
    if not has_poller:
        monkeypatch.setattr(native, "poller_of_run", lambda: None)

    async def main() -> None:
        here, there = Noting(), Noting()
        async with pair_of_transports(here, there) as [to_there, to_here]:
            for i in range(3):
                await trio.testing.wait_all_tasks_blocked()
                to_there.send(b"small", [])
                to_there.send(b"large", [bytearray(3 * limits.CHUNK_BYTES)])
                to_here.send(b"back")
                await there.wait_for(2 * i + 2)
                await here.wait_for(i + 1)
        assert there.heads == [b"small", b"large"] * 3
        assert here.heads == [b"back"] * 3

    trio.run(main)


def test_task_waits_itself_for_what_has_come():
    async def main() -> None:
        there = Noting()
        async with pair_of_transports(Noting(), there) as [to_there, to_here]:
            assert isinstance(to_there, native.NativeLink)
            assert isinstance(to_here, native.NativeLink)
            await trio.testing.wait_all_tasks_blocked()
            to_there.send(b"wakes")
            await there.wait_for(1)
            to_there.send(b"needs no turn")
            to_there.transport.flush()
            assert to_here.transport.wait_here()
            assert there.heads == [b"wakes", b"needs no turn"]
            to_there.send(b"wakes again")
            await there.wait_for(3)

    trio.run(main)


def test_task_that_skips_turns_is_cancelled_in_time_and_passes_checkpoints():
    """AW-3."""

    async def main() -> int:
        skipped = 0
        async with pair_of_transports(Noting(), Noting()) as [link, _]:
            assert isinstance(link, native.NativeLink)
            transport = link.transport
            with trio.move_on_after(0.05) as scope:
                while True:
                    with trio.testing.assert_checkpoints():
                        await trio.lowlevel.checkpoint_if_cancelled()
                        if transport.skips_left and transport.skip_turn():
                            skipped += 1
                        else:
                            await trio.lowlevel.cancel_shielded_checkpoint()
            assert scope.cancelled_caught
        return skipped

    assert trio.run(main) > 0


@pytest.mark.parametrize("clock", [None, trio.testing.MockClock()])
def test_run_by_another_clock_does_not_say_what_is_next(clock: trio.abc.Clock | None):
    async def main() -> Poller | None:
        return poller_of_run()

    poller = trio.run(main, clock=clock)
    assert poller is not None
    assert (poller.runner is None) is (clock is not None)


def test_run_leaves_nothing_in_the_set_of_trio():
    async def main() -> None:
        poller = poller_of_run()
        assert poller is not None
        end = native.NativeTransport(ProcId(1))
        for _ in range(2):  # a descriptor that is in it cannot be added again
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end.run, Noting())
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        bell = end._bell
        with pytest.raises(FileNotFoundError):
            poller.epoll.unregister(bell)
        end.close()

    trio.run(main)
