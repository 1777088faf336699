"""Drivers of Trio in asyncio loops: which one a loop gets, and what they need of a release of Trio (K04)."""

from __future__ import annotations

import asyncio
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import trimesh
from trimesh._runtime.tasks import in_trio
from trimesh.aio import actor, driver
from trimesh.aio.driver import CallbackDriver, LoopDriver, SelectorDriver, adopt_guest, driver_for, find_names
from trimesh.aio.trio_run import find_run

CORE: Any = trio._core


def test_names_of_this_release_of_trio_are_found() -> None:
    names = find_names()
    assert names is not None
    assert names == driver.NAMES
    assert names.context is CORE._run.GLOBAL_RUN_CONTEXT
    assert not hasattr(names.context, "task")

    async def main() -> None:
        task = trio.lowlevel.current_task()
        assert find_names() is not None
        assert trio.lowlevel.current_task() is task

    trio.run(main)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("_run", name) for name in (*driver.RUN, "GLOBAL_RUN_CONTEXT", "sniffio_library", "unrolled_run")),
        *(("_traps", name) for name in (*driver.TRAPS, "CancelShieldedCheckpoint")),
    ],
)
def test_release_of_trio_that_lacks_a_name_has_no_driver(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K04: nor one in which it is something else."""
    with monkeypatch.context() as patch:
        patch.delattr(getattr(CORE, module), name)
        assert find_names() is None
    if name not in ("CancelShieldedCheckpoint", "GLOBAL_RUN_CONTEXT", "unrolled_run"):
        monkeypatch.setattr(getattr(CORE, module), name, object())
        assert find_names() is None


def test_release_of_trio_that_keeps_its_task_elsewhere_has_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """K04: nor one that has no name of the running library."""
    with monkeypatch.context() as patch:
        patch.setattr(trio.lowlevel, "current_task", lambda: None)
        assert find_names() is None
    with monkeypatch.context() as patch:
        patch.setattr(CORE._run, "sniffio_library", SimpleNamespace())
        assert find_names() is None
    assert find_names() == driver.NAMES
    with monkeypatch.context() as patch:
        patch.setattr(actor, "NAMES", None)
        assert actor.find_steps() is None


def driver_of(loop: Any) -> LoopDriver:
    epoll = SimpleNamespace(fileno=lambda: -1)
    runner = SimpleNamespace(io_manager=SimpleNamespace(_epoll=epoll))
    return driver_for(loop, runner, (_ for _ in ()), lambda _: None)


def test_loop_has_the_driver_that_fits_it() -> None:
    """K04: by its selector, if that can be asked and wrapped; else by callbacks."""
    with closing(asyncio.new_event_loop()) as loop:
        assert type(driver_of(loop)) is SelectorDriver
        selector = loop._selector  # type: ignore[attr-defined]
        parts = {"_ready": [], "_scheduled": [], "_stopping": False, "_selector": selector}
        assert type(driver_of(SimpleNamespace(**parts))) is SelectorDriver
        for left_out in parts:
            some = {name: part for name, part in parts.items() if name != left_out}
            assert type(driver_of(SimpleNamespace(**some))) is CallbackDriver

        class Wrapped:
            """A selector that takes no attributes."""

            __slots__ = ("fileno", "select")

        wrapped = Wrapped()
        wrapped.fileno, wrapped.select = selector.fileno, selector.select
        assert type(driver_of(SimpleNamespace(**{**parts, "_selector": wrapped}))) is CallbackDriver
        assert type(driver_of(SimpleNamespace(**{**parts, "_selector": object()}))) is CallbackDriver


class GuestState:
    """A guest run of Trio that has not begun, as far as drivers look at it."""

    def __init__(self) -> None:
        self.runner = SimpleNamespace(
            io_manager=SimpleNamespace(_epoll=SimpleNamespace(fileno=lambda: -1)),
            guest_tick_scheduled=False,
            is_guest=True,
        )
        self.unrolled_run_gen = (_ for _ in ())
        self.done_callback = print

    def tick(self) -> None:
        """Be the first turn of the run."""


async def test_first_turn_of_a_guest_run_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """K04: once, if it is one of a guest run; where Trio lacks a name it stays what it is."""
    driven, soon = list[LoopDriver](), list[Any]()
    loop: Any = SimpleNamespace(
        call_soon=lambda function, *_: soon.append(function), add_reader=lambda *_: None, remove_reader=lambda *_: None
    )
    run_soon = adopt_guest(loop, driven.append)
    state = GuestState()
    run_soon(soon.clear)
    assert (driven, soon) == ([], [soon.clear])
    with monkeypatch.context() as patch:
        patch.setattr(driver, "NAMES", None)
        run_soon(state.tick)
    assert (driven, soon[1:]) == ([], [state.tick])
    try:
        run_soon(state.tick)
        run_soon(state.tick)
    finally:
        driven[0].stop()
    assert [type(one) for one in driven] == [CallbackDriver]
    assert soon[-1] == state.tick
    assert driven[0].tick in soon


def test_loop_is_quiet_until_its_next_timer() -> None:
    """DV-3: what a transport that spins asks for."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with trimesh.aio.open_trio():
            run = find_run(loop)
            assert run is not None
            found = run.driver
            assert isinstance(found, SelectorDriver)
            assert found.is_quiet(1.0)
            timer = loop.call_later(1_000, print)
            assert found.is_quiet(1.0)
            assert not found.is_quiet(2_000.0)
            timer.cancel()
            before = found.waiting()
            loop.call_soon(lambda: None)
            assert found.waiting() == before + 1

    asyncio.run(main())


def test_loop_sleeps_while_trio_waits() -> None:
    """DV-2: until the deadline of a task, and no longer."""
    waits: list[float | None] = []

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        select = loop._selector.select

        def counted(timeout: float | None = None) -> Any:
            waits.append(timeout)
            return select(timeout)

        loop._selector.select = counted
        async with trimesh.aio.open_trio():
            waits.clear()
            await in_trio(trio.sleep)(0.05)
            assert len(waits) < 20
            assert max(0.0 if one is None else one for one in waits) <= 0.05

    asyncio.run(main())
