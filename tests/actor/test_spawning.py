"""A mesh that has not been started: awaited or entered, once (M1)."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from trimesh.actor.spawning import Spawning


def make(log: list[str]) -> Spawning[str]:
    @asynccontextmanager
    async def open_() -> AsyncGenerator[str, None]:
        log.append("entered")
        try:
            yield "mesh"
        finally:
            log.append("left")

    async def adopt() -> str:
        log.append("adopted")
        return "mesh"

    return Spawning("spawn()", open_, adopt)


def spawn(log: list[str]) -> Spawning[str]:
    return make(log)


async def test_nothing_starts_before():
    log: list[str] = []
    spawning = spawn(log)
    assert log == []
    assert await spawning == "mesh"
    assert log == ["adopted"]


async def test_entering_owns():
    log: list[str] = []
    async with spawn(log) as mesh:
        assert mesh == "mesh"
        assert log == ["entered"]
    assert log == ["entered", "left"]


async def test_error_of_the_body_reaches_the_block():
    log: list[str] = []
    with pytest.raises(LookupError):
        async with spawn(log):
            raise LookupError
    assert log == ["entered", "left"]


async def test_second_use_is_refused():
    log: list[str] = []
    spawning = spawn(log)
    await spawning
    with pytest.raises(RuntimeError, match=r"spawn\(\) can be started once"):
        await spawning
    with pytest.raises(RuntimeError, match="once"):
        async with spawning:
            raise AssertionError
    assert log == ["adopted"]


def test_unused_one_warns_with_the_line_that_made_it():
    with pytest.warns(RuntimeWarning, match=r"spawn\(\), made at .*test_spawning\.py:\d+, was never started"):
        spawn([])
        gc.collect()


async def test_attribute_says_what_to_write():
    spawning = spawn([])
    with pytest.raises(AttributeError, match=r"mesh = await"):
        spawning.extent  # noqa: B018
    assert repr(spawning) == "<spawn(), not started>"
    await spawning
