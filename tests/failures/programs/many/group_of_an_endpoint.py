"""Two tasks of one endpoint raise.

Words: ValueError: the second shard is empty
"""

import trio

from trimesh import Actor, endpoint, this_host


class Loader(Actor):
    @endpoint
    async def load(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.read, "first")
            nursery.start_soon(self.read, "second")

    async def read(self, name: str) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(0.01 if name == "first" else 0.1)
        raise ValueError(f"the {name} shard is empty")


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        loader = await procs.spawn("loader", Loader)
        await loader.load.call_one()


trio.run(main)
