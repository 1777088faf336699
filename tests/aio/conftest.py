"""Fixtures of the asyncio tests: `run` runs a coroutine function on each kind of loop."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable

import pytest
from tests.aio.loops import LOOPS, Test


@pytest.fixture(scope="session", autouse=True)
def what_libuv_keeps() -> None:
    """Let libuv make the pipe and the threads that it keeps, before a test is asked what it has left."""
    if importlib.util.find_spec("uvloop") is not None:
        uvloop = importlib.import_module("uvloop")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(runner.get_loop().getaddrinfo("localhost", 0))


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Test], None]:
    """Run a test on one kind of loop and check that nothing is left in it."""
    return LOOPS[request.param]
