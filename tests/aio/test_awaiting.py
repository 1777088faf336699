"""Which asyncio tasks a task waits for, as introspection and the search for deadlocks see it (M4, C8)."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

import trio
from tests.rows import rows

import trimesh.aio
from trimesh._runtime.tasks import in_trio
from trimesh.aio.asyncio_work import start_task, tasks_of_actor
from trimesh.aio.awaiting import AsyncioTasks

Tasks = list["asyncio.Task[Any]"]
Waiter = Callable[[Tasks], Coroutine[Any, Any, Any]]


async def await_one(tasks: Tasks) -> None:
    await tasks[0]


async def gather(tasks: Tasks) -> None:
    await asyncio.gather(*tasks)


async def gather_gathers(tasks: Tasks) -> None:
    await asyncio.gather(asyncio.gather(tasks[0]), asyncio.gather(tasks[1], tasks[2]))


async def leave_group(_: Tasks) -> None:
    async with asyncio.TaskGroup() as group:
        for name in ("a", "b"):
            group.create_task(asyncio.Event().wait(), name=name)


async def wait_in_group(_: Tasks) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.Event().wait(), name="a")
        await asyncio.Event().wait()


async def wait_all(tasks: Tasks) -> None:
    await asyncio.wait(tasks)


async def wait_first(tasks: Tasks) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def wait_in_time(tasks: Tasks) -> None:
    await asyncio.wait(tasks, timeout=1_000)


async def wait_event(_: Tasks) -> None:
    await asyncio.Event().wait()


async def run_in_inner(tasks: Tasks) -> None:
    async def inner() -> None:
        await gather(tasks)

    await inner()


ALL = ["a", "b"]
WAITS: list[tuple[Waiter, list[str]]] = [
    (await_one, ["a"]),
    (gather, ALL),
    (gather_gathers, ALL),
    (run_in_inner, ALL),
    (leave_group, ALL),
    (wait_in_group, []),
    (wait_all, ALL),
    (wait_first, []),
    (wait_in_time, []),
    (wait_event, []),
]


@rows("waiter, expected", WAITS)
def test_task_waits_for_all_these(waiter: Waiter, expected: list[str]) -> None:
    """M4, C8: none of which has ended; not for what one of several may end."""

    async def main() -> list[str]:
        tasks = [asyncio.create_task(asyncio.Event().wait(), name=name) for name in ALL]
        tasks.append(asyncio.create_task(asyncio.sleep(0), name="ended"))
        await tasks[-1]
        task = asyncio.create_task(waiter(tasks))
        assert AsyncioTasks().awaited_by(task) == ()  # it has not begun
        await asyncio.sleep(0)
        found = [one.get_name() for one in AsyncioTasks().awaited_by(task)]
        for one in (task, *tasks):
            one.cancel()
        await asyncio.wait([task, *tasks])
        return sorted(found)

    assert asyncio.run(main()) == expected


def test_tasks_of_an_actor_are_those_that_have_not_ended() -> None:
    """M4: of its context, by name."""

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(start_task)
        context = contextvars.copy_context()
        context.run(tasks_of_actor.set, set())

        async def start() -> Tasks:
            return [asyncio.create_task(asyncio.Event().wait(), name=name) for name in ("b", "a", "c")]

        tasks = await asyncio.get_running_loop().create_task(start(), context=context)
        tasks[2].cancel()
        await asyncio.wait([tasks[2]])
        assert [one.get_name() for one in AsyncioTasks().of_actor(context)] == ["a", "b"]
        assert AsyncioTasks().of_actor(contextvars.Context()) == []
        for one in tasks:
            one.cancel()
        await asyncio.wait(tasks)

    asyncio.run(main())


def test_task_that_works_in_trio_has_a_stand_in_there() -> None:
    """M4, C8: while it awaits the work."""

    async def main() -> None:
        found: list[trio.lowlevel.Task] = []

        async def work() -> None:
            found.append(trio.lowlevel.current_task())
            await trio.sleep_forever()

        async with trimesh.aio.open_trio():
            task, other = asyncio.ensure_future(in_trio(work)()), asyncio.create_task(asyncio.Event().wait())
            while not found:  # noqa: ASYNC110 - whatever has begun it
                await asyncio.sleep(0)
            assert AsyncioTasks().in_trio(task) is found[0]
            assert AsyncioTasks().in_trio(other) is None
            task.cancel()
            other.cancel()
            await asyncio.wait([task, other])

    asyncio.run(main())
