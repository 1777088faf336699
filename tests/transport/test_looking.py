"""When a process may look at its links before it sleeps, and when its loop asks for it."""

from __future__ import annotations

import math
import select
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from trimesh import limits
from trimesh._transport import native
from trimesh._transport.base import Link, LinkDown
from trimesh._transport.looking import chosen_look_seconds, poller_of_run
from trimesh.ids import ProcId


@pytest.fixture
def quota(tmp_path: Path) -> Path:
    return tmp_path / "cpu.max"


@pytest.mark.parametrize(
    ("said", "seconds"), [("", limits.LOOK_SECONDS), (" auto ", limits.LOOK_SECONDS), ("off", 0.0)]
)
def test_environment_says_whether_a_process_may_look(quota: Path, said: str, seconds: float):
    assert chosen_look_seconds({"TRIMESH_LOOK": said}, quota) == seconds


def test_other_word_in_the_environment_is_refused(quota: Path):
    with pytest.raises(ValueError, match=r"TRIMESH_LOOK must be one of auto, off, got 'on'"):
        chosen_look_seconds({"TRIMESH_LOOK": "on"}, quota)


@pytest.mark.parametrize(("said", "may"), [("150000 100000", False), ("200000 100000", True), ("max 100000", True)])
def test_quota_below_two_cores_ends_looking(quota: Path, said: str, may: bool):
    quota.write_text(said)
    assert (chosen_look_seconds({}, quota) > 0) is may


def test_run_sleeps_on_a_descriptor_that_tells_of_other_work():
    async def main() -> bool:
        looking = select.poll()
        looking.register(poller_of_run(), select.POLLIN)
        await trio.testing.wait_all_tasks_blocked()  # the task that takes calls sleeps, too
        trio.lowlevel.current_trio_token().run_sync_soon(lambda: None)
        return bool(looking.poll(0))

    assert trio.run(main)


def test_guest_run_has_none():
    queue: list[Any] = []
    found: list[int] = []
    ended: list[object] = []

    async def main() -> None:
        found.append(poller_of_run())

    trio.lowlevel.start_guest_run(
        main, run_sync_soon_threadsafe=queue.append, done_callback=ended.append, host_uses_signal_set_wakeup_fd=False
    )
    while not ended:
        if queue:
            queue.pop(0)()
    assert found[0] == -1


def test_outside_of_a_run_there_is_none():
    assert poller_of_run() == -1


class Fake:
    """A transport that notes what it is asked for."""

    def __init__(self, look_seconds: float) -> None:
        self.asked: list[str] = []
        self.look_seconds = look_seconds
        self.dirty = False
        self.lending = SimpleNamespace(returned=[])
        self.looks = [0, 0, 0, 0]
        self.bus = None
        self.library = SimpleNamespace(lib=SimpleNamespace(tm_look=self._look))

    def _look(self, bus: object, poller: int) -> int:
        self.asked.append(f"look on {poller}")
        return 2

    def flush(self) -> None:
        self.asked.append("flush")


def before_sleep(monkeypatch: pytest.MonkeyPatch, fake: Fake, poller: int) -> Any:
    monkeypatch.setattr(native, "poller_of_run", lambda: poller)

    async def make() -> Any:
        return native._AroundSleep(fake, None)  # type: ignore[arg-type]

    return trio.run(make)


def test_loop_that_can_go_on_does_not_look(monkeypatch: pytest.MonkeyPatch):
    fake = Fake(1e-4)
    instrument = before_sleep(monkeypatch, fake, 7)
    instrument.before_io_wait(0)
    assert fake.asked == []


def test_loop_with_a_deadline_in_that_time_does_not_look(monkeypatch: pytest.MonkeyPatch):
    fake = Fake(1e-4)
    instrument = before_sleep(monkeypatch, fake, 7)
    instrument.before_io_wait(1e-4)
    assert fake.asked == []


def test_loop_that_is_about_to_sleep_flushes_and_then_looks(monkeypatch: pytest.MonkeyPatch):
    fake = Fake(1e-4)
    fake.dirty = True
    instrument = before_sleep(monkeypatch, fake, 7)
    instrument.before_io_wait(86400)
    assert fake.asked == ["flush", "look on 7"]
    assert fake.looks == [0, 0, 1, 0]


@pytest.mark.parametrize(("seconds", "poller"), [(0.0, 7), (1e-4, -1)])
def test_loop_that_may_not_look_never_does(monkeypatch: pytest.MonkeyPatch, seconds: float, poller: int):
    fake = Fake(seconds)
    instrument = before_sleep(monkeypatch, fake, poller)
    instrument.before_io_wait(math.inf)
    assert fake.asked == []


class Careless:
    """A handler that breaks its promise not to raise."""

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        raise LookupError(bytes(head).decode())

    def link_down(self, link: Link, down: LinkDown) -> None:
        raise AssertionError(down)

    def link_stalled(self, link: Link, seconds: float) -> None:
        raise AssertionError(seconds)


def test_error_of_a_handler_ends_the_task_that_serves():
    async def main() -> None:
        ends = [native.NativeTransport(ProcId(i + 1)) for i in range(2)]
        links = [
            end.open_link(sock, local=True, lease=False) for end, sock in zip(ends, socket.socketpair(), strict=True)
        ]
        try:
            async with trio.open_nursery() as nursery:
                for end in ends:
                    nursery.start_soon(end.run, Careless())
                for link in links:
                    await link.up.wait()
                await trio.testing.wait_all_tasks_blocked()
                links[0].send(b"of a handler")
        finally:
            for end in ends:
                end.close()

    with pytest.RaisesGroup(pytest.RaisesExc(LookupError, match="of a handler")):
        trio.run(main)
