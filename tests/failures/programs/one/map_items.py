"""A map over items meets one that raises.

Words: ValueError: a text needs at least one word
"""

import trio

from trimesh import Actor, endpoint, this_host


class Counter(Actor):
    @endpoint
    async def count(self, text: str) -> int:
        if not text:
            raise ValueError("a text needs at least one word")
        return len(text.split())


async def main() -> None:
    async with this_host().spawn_procs({"workers": 2}) as procs:
        counters = await procs.spawn("counters", Counter)
        async with counters.count.map(["to be", "", "or not"]) as results:
            async for _, count in results:
                print(count)


trio.run(main)
