"""Run a generator endpoint: what it yields goes to the consumer, as far ahead as its window allows.

A `yield` is a checkpoint of the endpoint like any `await`. A cancel, or an item that cannot be serialised, is raised at
the `yield`; so a cancel scope or a nursery around it works as it does around an `await`.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import trio

from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.tasks.coroutines import run_in_context
from trimesh._runtime.values.codec import Values


@trio.lowlevel.enable_ki_protection
async def produce(
    call: IncomingCall, generator: AsyncGenerator[Any, None], context: contextvars.Context, values: Values
) -> None:
    """Run a generator endpoint to its end."""
    assert call.items is not None
    steps: list[Any] = [generator.__anext__()]  # no frame of a traceback may hold the error, see `run_in_context`
    while True:
        try:
            item = await _advance(context, steps)
        except StopAsyncIteration:
            return
        try:
            await trio.lowlevel.checkpoint()  # at each yield (rule T1)
            value = values.encode_item(item, call.spec)
            del item
            await call.items.send(call, value)
            del value
            steps.append(generator.__anext__())
        except BaseException as error:  # noqa: BLE001 - raised at the `yield`
            steps.append(generator.athrow(error))


@trio.lowlevel.disable_ki_protection  # what users write can be interrupted anywhere
async def _advance(context: contextvars.Context, steps: list[Coroutine[Any, Any, Any]]) -> Any:
    return await run_in_context(context, steps.pop())
