"""Actors that own meshes of actors: a tree of 15 processes adds numbers, survives an error, and falls with a death.

Run it: python examples/actor_tree.py

Each level is owned by a block in the level above. An error climbs through the calls that wait for it, a death climbs
through the blocks that own what died; both arrive as the original exception, with a note from every level on the way.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

import trimesh
from trimesh import Actor, endpoint, this_host


class Node(Actor):
    """Owns the two nodes of the next level, if there is one."""

    def __init__(self, below: list[str]) -> None:
        self.below = below

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Keep the level below for as long as this node lives."""
        if not self.below:
            yield
            return
        label, *rest = self.below
        async with this_host().spawn_procs({label: 2}) as procs:
            self.children = await procs.spawn(label, Node, rest)
            yield

    @endpoint
    async def total(self, numbers: list[str]) -> int:
        """Return the sum of this node's share of `numbers`."""
        share = numbers[trimesh.current_rank() :: trimesh.current_size()]
        if not self.below:
            return sum(int(number) for number in share)
        return sum((await self.children.total.call(share)).values())

    @endpoint
    async def leaf_pids(self) -> list[int]:
        """Return the ids of all processes at the end of this node's branches."""
        if not self.below:
            return [os.getpid()]
        return [pid for pids in (await self.children.leaf_pids.call()).values() for pid in pids]


def show(error: BaseException, depth: int = 1) -> None:
    """Print an error, or a group with all that is in it, and what each says of its place."""
    print(f"{'   ' * depth}{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", []):
        print(f"{'   ' * depth}   ({note})")
    for inner in getattr(error, "exceptions", []):
        show(inner, depth + 1)


async def main() -> None:
    numbers = [str(number) for number in range(1, 101)]
    try:
        async with this_host().spawn_procs({"branch": 2}) as procs:
            branches = await procs.spawn("branch", Node, ["twig", "leaf"])
            print("the sum is", sum((await branches.total.call(numbers)).values()))

            try:
                await branches.total.call([*numbers[:50], "fifty-one", *numbers[51:]])
            except* ValueError as group:
                print("an error goes to its caller, level by level:")
                show(group)
            print("the tree lives on, the sum is", sum((await branches.total.call(numbers)).values()))

            pids = await branches.leaf_pids.call()
            os.kill(pids.item(branch=1)[0], signal.SIGKILL)
            await trio.sleep_forever()
    except* trimesh.ProcDied as group:
        print("a death goes to its owner, level by level:")
        show(group)


if __name__ == "__main__":
    trio.run(main)
