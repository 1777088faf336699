"""A message runs in a context of its own, though its slot's task has one for life."""

from __future__ import annotations

import contextvars

import pytest
import trio
import trio.testing

from trimesh._runtime.tasks.coroutines import run_in_context

tag: contextvars.ContextVar[str] = contextvars.ContextVar("tag", default="none")


async def test_what_is_set_inside_stays_inside():
    context = contextvars.copy_context()
    context.run(tag.set, "given")

    async def body() -> list[str]:
        seen = [tag.get()]
        tag.set("inside")
        await trio.lowlevel.checkpoint()
        seen.append(tag.get())
        return seen

    tag.set("outside")
    assert await run_in_context(context, body()) == ["given", "inside"]
    assert tag.get() == "outside"
    assert context[tag] == "inside"


async def test_child_tasks_inherit_it():
    context = contextvars.copy_context()
    context.run(tag.set, "given")
    seen: list[str] = []

    async def child() -> None:
        await trio.lowlevel.checkpoint()
        seen.append(tag.get())

    async def body() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        seen.append(await trio.to_thread.run_sync(tag.get))

    await run_in_context(context, body())
    assert seen == ["given", "given"]


@pytest.mark.parametrize("checkpoints", [0, 1, 3])
async def test_error_comes_out(checkpoints: int):
    async def body() -> None:
        for _ in range(checkpoints):
            await trio.lowlevel.checkpoint()
        raise LookupError("inside")

    with pytest.raises(LookupError, match="inside"):
        await run_in_context(contextvars.copy_context(), body())


async def test_cancel_is_raised_inside():
    """And what it is turned into there comes out."""
    seen: list[str] = []

    async def body() -> str:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            seen.append(tag.get())
            raise
        raise AssertionError

    context = contextvars.copy_context()
    context.run(tag.set, "given")
    with trio.CancelScope() as scope:
        scope.cancel()
        await run_in_context(context, body())
    assert scope.cancelled_caught
    assert seen == ["given"]


async def test_cancel_that_is_absorbed_inside_is_over():
    async def body() -> str:
        with trio.CancelScope() as scope:
            scope.cancel()
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return "went on"

    assert await run_in_context(contextvars.copy_context(), body()) == "went on"


async def test_nested_runs():
    async def inner() -> str:
        tag.set("inner")
        await trio.lowlevel.checkpoint()
        return tag.get()

    async def outer() -> list[str]:
        tag.set("outer")
        found = await run_in_context(contextvars.copy_context(), inner())
        return [found, tag.get()]

    assert await run_in_context(contextvars.copy_context(), outer()) == ["inner", "outer"]
    assert tag.get() == "none"


async def test_scopes_and_checkpoints_are_the_task_s():
    async def body() -> float:
        with trio.testing.assert_checkpoints():
            await trio.lowlevel.checkpoint()
        return trio.current_effective_deadline()

    with trio.CancelScope(deadline=10**9) as scope:
        assert await run_in_context(contextvars.copy_context(), body()) == scope.deadline
