"""Monarch's dining philosophers: actors that wait for each other's forks, with a waiter who prevents the deadlock.

Without the waiter each takes the left fork and waits for the right one: `DeadlockError` says so at once.

Run it: python examples/monarch/dining_philosophers.py [--philosophers 5] [--rounds 20]
"""

from __future__ import annotations

import argparse

import trio

from trimesh import Actor, DeadlockError, current_rank, endpoint, leaves, this_host, this_proc


class Fork(Actor):
    """Lies between two philosophers; one holds it at a time."""

    def __init__(self) -> None:
        self.free = trio.Semaphore(1, max_value=1)

    @endpoint(concurrency=4)
    async def take(self) -> None:
        """Wait until the fork is free."""
        await self.free.acquire()

    @endpoint(concurrency=4)
    async def put_back(self) -> None:
        """Free it."""
        self.free.release()


class Waiter(Actor):
    """Lets all but one sit down."""

    def __init__(self, seats: int) -> None:
        self.seats = trio.Semaphore(seats, max_value=seats)

    @endpoint(concurrency=100)
    async def sit_down(self) -> None:
        """Wait for a seat."""
        await self.seats.acquire()

    @endpoint(concurrency=100)
    async def stand_up(self) -> None:
        """Leave it."""
        self.seats.release()


class Philosopher(Actor):
    """Thinks, takes both forks, eats."""

    def __init__(self, forks: Fork, waiter: Waiter) -> None:
        rank, size = current_rank(), len(forks)
        self.left, self.right = forks.slice(seat=rank), forks.slice(seat=(rank + 1) % size)
        self.waiter = waiter

    @endpoint
    async def dine(self, rounds: int) -> int:
        """Eat so many times; return how often."""
        eaten = 0
        for _ in range(rounds):
            await self.waiter.sit_down.call_one()
            await self.left.take.call_one()
            await self.right.take.call_one()
            eaten += 1
            await self.right.put_back.call_one()
            await self.left.put_back.call_one()
            await self.waiter.stand_up.call_one()
        return eaten


class Stubborn(Actor):
    """Holds its own fork while it asks the neighbour for the other one: a call around the table."""

    def __init__(self) -> None:
        self.neighbour: Stubborn | None = None

    @endpoint(concurrency=1, group="setup")
    async def meet(self, neighbours: Stubborn) -> None:
        """Learn who sits to the right."""
        self.neighbour = neighbours.slice(seat=(current_rank() + 1) % len(neighbours))

    @endpoint
    async def fork(self) -> str:
        """Give the fork as soon as this philosopher, who has one slot, is done."""
        assert self.neighbour is not None
        return await self.neighbour.fork.call_one()


async def main(philosophers: int, rounds: int) -> None:
    async with this_host().spawn_procs({"seat": philosophers}) as procs:
        forks = await procs.spawn("forks", Fork)
        async with this_proc().spawn("waiter", Waiter, philosophers - 1) as waiter:
            diners = await procs.spawn("philosophers", Philosopher, forks, waiter)
            print("meals:", list(await diners.dine.call(rounds)))

        stubborn = await procs.spawn("stubborn", Stubborn)
        await stubborn.meet.call(stubborn)
        try:
            await stubborn.fork.call()
        except* DeadlockError as group:
            print(f"without a waiter: {next(leaves(group))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--philosophers", type=int, default=5, help="and as many forks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="meals of each (default: %(default)s)")
    options = parser.parse_args()
    trio.run(main, options.philosophers, options.rounds)
