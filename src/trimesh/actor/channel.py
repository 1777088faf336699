"""`open_channel`: a channel whose sending end can be sent to other processes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, overload

import trio

from trimesh._runtime import life
from trimesh._runtime.channels import Port, Receiver
from trimesh._runtime.tasks import in_trio_block
from trimesh.context_managers import asynccontextmanager
from trimesh.plain_numbers import whole_number

T = TypeVar("T")


@overload
def open_channel(
    item_type: type[T], /, *, capacity: int
) -> AbstractAsyncContextManager[tuple[Port[T], Receiver[T]]]: ...
@overload
def open_channel(
    item_type: None = None, /, *, capacity: int
) -> AbstractAsyncContextManager[tuple[Port[Any], Receiver[Any]]]: ...
def open_channel(
    item_type: type[Any] | None = None, /, *, capacity: int
) -> AbstractAsyncContextManager[tuple[Port[Any], Receiver[Any]]]:
    """Open a channel: every holder of its port may send, this process receives.

    Args:
        item_type: Type of the items. If they are pickled, only type checkers check it. With `pickle="off"` items travel
            by this type: a class, `None`, a container of such or a union; `send` refuses any other item.
        capacity: Items of each sending process that may wait for the receiver; `limits.MAILBOX_BYTES` bounds their
            size, too. With 0 each `send` waits until its item has been taken.

    Returns:
        A context manager that gives `(port, receiver)`; leaving it closes both.

    Raises:
        TypeError: The capacity is no whole number; or, on entering, the type cannot travel with `pickle="off"`.
        ValueError: The capacity is negative or infinite.

    Example:
        async with trimesh.open_channel(int, capacity=64) as (port, receiver):
            async with port:
                await workers.count.broadcast(port)     # each worker sends, and drops its port when it is done
            async for number in receiver:               # ends when no port is left
                ...
    """
    found = whole_number(capacity)
    if found is None and capacity == float("inf"):
        raise ValueError("a channel must be bounded, got capacity=inf: give the number of items that may wait")
    if found is None:
        raise TypeError(f"capacity must be a whole number of items, got {capacity!r}")
    if found < 0:
        raise ValueError(f"capacity must be 0 or more, got {capacity}")
    return in_trio_block(_open(found, item_type))


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def _open(capacity: int, item_type: Any) -> AsyncGenerator[tuple[Port[Any], Receiver[Any]], None]:
    async with life.lease_proc(is_block=False) as (proc, _):
        await trio.lowlevel.checkpoint()
        port, home = proc.channels.open(capacity, item_type)
        try:
            yield port, Receiver(home)
        finally:
            port.close()
            home.close()
        await trio.lowlevel.checkpoint()
