"""Run by each interpreter that a wheel was installed for: it imports, and two processes answer."""

import sys

import trio

import trimesh
from trimesh import Actor, endpoint, this_host


class Adder(Actor):
    """Adds."""

    @endpoint
    async def add(self, a: int, b: int) -> int:
        """Return the sum."""
        return a + b


async def main() -> None:
    """Call two processes."""
    async with this_host().spawn_procs({"procs": 2}) as procs:
        adders = await procs.spawn("adders", Adder)
        assert (await adders.add.call(1, 2)).values() == (3, 3)


trio.run(main)
print(f"Python {sys.version.split()[0]}: {trimesh.__file__}")
