"""Ray's `ActorPool`: items go to the actors as they are free; results come as they are ready, or in order.

Run it: python examples/ray/map_over_actors.py [--items 12]
"""

from __future__ import annotations

import argparse

import trio

from trimesh import Actor, current_rank, endpoint, this_host


class Worker(Actor):
    """Squares numbers, one at a time."""

    @endpoint
    async def square(self, number: int) -> tuple[int, int]:
        """Return who has done it, and the square."""
        await trio.sleep(0.002 * (number % 3))
        return current_rank(), number * number


async def main(items: int) -> None:
    async with this_host().spawn_procs({"workers": 3}) as procs:
        workers = await procs.spawn("workers", Worker)

        done: dict[int, int] = {}
        used: set[int] = set()
        async with workers.square.map(range(items), window=3) as results:  # pool.map_unordered(...)
            async for index, (rank, square) in results:
                done[index] = square
                used.add(rank)
        print("in order:", [done[index] for index in range(items)])  # pool.map(...)
        print("workers used:", sorted(used))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=12, help="how many numbers (default: %(default)s)")
    trio.run(main, parser.parse_args().items)
