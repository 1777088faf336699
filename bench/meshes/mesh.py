"""What a workload asks of a mesh, whichever library has started it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol


class Mesh(Protocol):
    """Processes with one actor each.

    Attributes:
        pids: Of the processes, in the order of their ranks.
    """

    pids: Sequence[int]

    def one(self, value: Any) -> Awaitable[Any]:
        """Let the first actor answer a value with itself."""
        ...

    def all(self, value: Any) -> Awaitable[Any]:
        """Let every actor answer a value with itself."""
        ...

    def size_one(self, value: Any) -> Awaitable[Any]:
        """Let the first actor answer the length of a value."""
        ...

    def size_all(self, value: Any) -> Awaitable[Any]:
        """Let every actor answer the length of a value."""
        ...

    async def tasks(self, calls: int) -> None:
        """Call the first actor so often, each call in a task of its own, all at once."""
        ...

    async def batch(self, calls: int) -> None:
        """Call the first actor so often in the way that the library has for many calls."""
        ...

    async def offer(self, value: Any, seconds: float) -> None:
        """Send the first actor a value, asking for no answer; it takes one at a time, each for so long.

        Where a library can send without waiting it does, and waits only where there is no room.
        """
        ...

    async def post(self, value: Any, seconds: float) -> None:
        """Do the same, letting other tasks run each time, where the library has a way to wait for a message to leave.

        The same as `offer` where it has one way only.
        """
        ...

    async def drain(self) -> None:
        """Return when the first actor has taken all that it was offered."""
        ...

    async def wait(self) -> None:
        """Call an endpoint of the first actor that never answers."""
        ...

    async def cancel(self) -> float:
        """Cancel such a call, which has begun over there; return the seconds until it has ended here."""
        ...

    async def neighbour(self) -> Callable[[Any], Awaitable[Any]]:
        """Start another actor in the first process, if the library can; return what lets it answer a value."""
        ...

    async def stream(self, items: int) -> None:
        """Take so many integers, one by one, from an endpoint of the first actor that yields them."""
        ...


class Library(Protocol):
    """A module of this package."""

    def run(self, function: Any, *arguments: Any) -> Any: ...
    def open_host(self) -> AbstractAsyncContextManager[Any]: ...
    def open_mesh(self, ranks: int, host: Any = None) -> AbstractAsyncContextManager[Mesh]: ...
    async def while_running(self, work: Any, look: Any) -> None: ...
