"""Use a mesh from a plain script, without `await`: calls, a future, a stream, a time limit.

python examples/script.py
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import trio

import trimesh.blocking as tb
from trimesh import Actor, endpoint


class Worker(Actor):
    """Does little, and one thing that never ends."""

    @endpoint
    async def square(self, number: int) -> int:
        """Return the square."""
        return number * number

    @endpoint
    async def count(self, upto: int) -> AsyncIterator[int]:
        """Yield numbers."""
        for number in range(upto):
            yield number

    @endpoint
    async def hold(self) -> None:
        """Run until cancelled."""
        await trio.sleep_forever()


def main() -> None:
    """Run it."""
    with tb.spawn_procs({"gpus": 2}) as procs:
        workers = procs.spawn("workers", Worker)
        print("called:", workers.square.call(3).values())
        future = workers.square.call.submit(4)
        print("later:", future.result(timeout=60).values())
        with workers.count.stream(2) as results:
            print("streamed:", sorted((point["gpus"], number) for point, number in results))
        with tb.move_on_after(0.1) as limit:
            workers.hold.call()
        print("held too long:", limit.cancelled_caught)


if __name__ == "__main__":
    main()
