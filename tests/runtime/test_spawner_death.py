"""Z02-Z07: the controller ends, in every way and at every moment; nothing of its family is left."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.conftest import new_id
from tests.runtime.processes import Controller, family, state, wait_gone

pytestmark = pytest.mark.real

_STRIDE = 8


@pytest.fixture
def controllers() -> Iterator[list[Controller]]:
    """Controllers that are ended after the test."""
    started = list[Controller]()
    yield started
    for controller in started:
        controller.close()


async def hold(controllers: list[Controller], *habits: str) -> tuple[Controller, int, list[int]]:
    """Start a controller that has workers, and return it, its family and the pids of all there is to end."""
    root_id = new_id()
    controller = Controller("hold", str(root_id), *habits)
    controllers.append(controller)
    return controller, root_id, await controller.line()


@pytest.mark.parametrize(
    "habits", [(), ("nests",), ("stops_workers",), ("stops_spawner",), ("stops_spawner", "stops_workers")]
)
async def test_killed_controller_leaves_nothing(controllers: list[Controller], habits: tuple[str, ...]) -> None:
    """Z04, Z06: SIGKILL; workers with foreign children of every kind, workers of workers, stopped ones."""
    controller, root_id, pids = await hold(controllers, *habits)
    assert len(pids) >= 8
    assert all(map(state, pids))

    controller.process.kill()

    await wait_gone(pids)
    assert not family(root_id)


async def test_killed_controller_leaves_nothing_although_its_own_child_holds_the_sockets(
    controllers: list[Controller],
) -> None:
    """Z04, O4: the end of a connection is only a hint; the spawner watches the process itself."""
    controller, root_id, (holder,) = await hold(controllers, "forks")
    pids = await controller.line()
    try:
        controller.process.kill()

        await wait_gone(pids)
        assert not family(root_id)
        assert state(holder)
    finally:
        os.kill(holder, signal.SIGKILL)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signalled_controller_leaves_nothing(controllers: list[Controller], signum: int) -> None:
    """Z02, Z03: Ctrl-C and SIGTERM unwind; SIGHUP has its default action, and the spawner does the rest."""
    controller, root_id, pids = await hold(controllers)

    controller.process.send_signal(signum)

    await wait_gone(pids)
    assert not family(root_id)
    assert await controller.wait() == (-signal.SIGINT if signum == signal.SIGINT else -signum)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.stress) for first in range(1, _STRIDE))])
async def test_controller_killed_at_any_moment_leaves_nothing(controllers: list[Controller], first: int) -> None:
    """Z04: at the nth step of opening, launching and leaving; for all n under `stress`."""
    root_id = new_id()
    for nth in range(1 + first, 300, _STRIDE):
        controller = Controller("die_at_nth", str(root_id), str(nth))
        controllers.append(controller)
        code = await controller.wait()
        left = family(root_id)
        await wait_gone(left)
        assert not family(root_id)
        if code == 0:
            assert nth > 9
            return
        assert code == -signal.SIGKILL
    pytest.fail("it never came to its end")


async def test_controller_killed_during_a_slow_preload_leaves_nothing(
    controllers: list[Controller], tmp_path: Path
) -> None:
    """Z04: a spawner that imports cannot look; the kernel ends it."""
    (tmp_path / "sleeps_on_import.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    root_id = new_id()
    controller = Controller("preload_slowly", str(root_id), str(tmp_path))
    controllers.append(controller)
    (spawner,) = await controller.line()
    assert family(root_id) == [spawner]

    controller.process.kill()

    await wait_gone([spawner])


async def test_controller_and_spawner_killed_together_leave_no_worker(controllers: list[Controller]) -> None:
    """The second net: the kernel kills workers whose spawner has ended."""
    controller, _, pids = await hold(controllers)
    spawner, *_, one, two, three = pids

    os.kill(spawner, signal.SIGSTOP)
    controller.process.kill()
    os.kill(spawner, signal.SIGKILL)

    await wait_gone([spawner, one, two, three])
    for pid in pids:  # foreign children of a worker go with it only if somebody is there to see to it
        if state(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_controller_and_spawner_killed_together_leave_no_group(
    controllers: list[Controller], is_stopped: bool
) -> None:
    """O4: the worker's own thread kills its whole group; the kernel does not take the worker before, alone."""
    controller = Controller("hold_actor")
    controllers.append(controller)
    spawner, worker, in_group, left_group = await controller.line()
    try:
        if is_stopped:  # the kernel continues it
            os.kill(worker, signal.SIGSTOP)
        controller.process.send_signal(signal.SIGSTOP)
        os.kill(spawner, signal.SIGKILL)
        controller.process.kill()

        await wait_gone([spawner, worker, in_group])
        assert state(left_group)  # nobody is left who could know of it
    finally:
        for pid in (in_group, left_group):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_two_families_do_not_touch_each_other(controllers: list[Controller]) -> None:
    """The marker names the family."""
    (first, _, first_pids), (_, second_id, second_pids) = await hold(controllers), await hold(controllers)

    first.process.kill()

    await wait_gone(first_pids)
    assert all(map(state, second_pids))
    assert set(second_pids) >= set(family(second_id))


async def test_stopped_controller_ends_nothing(controllers: list[Controller]) -> None:
    """O5: Ctrl-Z or a debugger; the spawner goes on reaping, and keeps the rest."""
    controller, _, pids = await hold(controllers)
    controller.process.send_signal(signal.SIGSTOP)

    victim = pids.pop()
    os.kill(victim, signal.SIGKILL)
    await wait_gone([victim])

    assert all(map(state, pids))
    controller.process.kill()
    await wait_gone(pids)
