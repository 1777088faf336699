"""Await a coroutine in a context other than the task's own."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeVar

T = TypeVar("T")


@types.coroutine
def run_in_context(context: contextvars.Context, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await `coroutine` with every step of it in `context`.

    A task has one context for its life. A slot runs many messages, and what one of them sets the next must not see.
    """
    try:
        try:
            trap = context.run(coroutine.send, None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        return (yield from _rest(context, coroutine, trap))
    finally:
        del coroutine  # as below


@types.coroutine
def go_on_in_context(
    context: contextvars.Context, coroutine: Coroutine[Any, Any, T], trap: Any
) -> Generator[Any, Any, T]:
    """Await the rest of a coroutine whose first step, which was made in `context`, has given `trap`."""
    try:
        return (yield from _rest(context, coroutine, trap))
    finally:
        del coroutine  # as below


def _rest(context: contextvars.Context, coroutine: Coroutine[Any, Any, T], trap: Any) -> Generator[Any, Any, T]:
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    try:
        while True:
            try:
                value = yield trap
                step = coroutine.send
            except BaseException as error:  # noqa: BLE001 - raised inside of the coroutine
                value = error
                step = coroutine.throw
            try:
                trap = context.run(step, value)
            except StopIteration as stop:
                result: T = stop.value
                return result
    finally:
        # This frame is in the traceback of what comes out. If it held that, too, all frames would live until the
        # collector comes by, and with them what endpoints have at hand: arrays, ports.
        del coroutine, step, value


REST_CODE: Final = _rest.__code__
"""Where a task is while it awaits a coroutine in this way; the frame's local `coroutine` is what it awaits."""
