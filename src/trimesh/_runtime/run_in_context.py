"""Await a coroutine in a context other than the task's own."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def run_in_context(context: contextvars.Context, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await `coroutine` with every step of it in `context`.

    A task has one context for its life. A slot runs many messages, and what one of them sets the next must not see.
    """
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    try:
        while True:
            try:
                trap = context.run(step, value)
            except StopIteration as stop:
                result: T = stop.value
                return result
            try:
                value = yield trap
                step = coroutine.send
            except BaseException as error:  # noqa: BLE001 - raised inside of the coroutine
                value = error
                step = coroutine.throw
    finally:
        # This frame is in the traceback of what comes out. If it held that, too, all frames would live until the
        # collector comes by, and with them what endpoints have at hand: arrays, ports.
        del coroutine, step, value
