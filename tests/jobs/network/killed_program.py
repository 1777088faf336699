"""A program with hosts in namespaces, which a test kills whenever it likes; it says how far it has come."""

from __future__ import annotations

import trio

from trimesh import Actor, endpoint
from trimesh.testing import NetworkJob, open_host_network


class Worker(Actor):
    """Works for ever."""

    @endpoint
    async def work(self) -> None:
        while True:  # noqa: ASYNC110 - it works
            await trio.sleep(0.001)


def say(word: str) -> None:
    print(word, flush=True)


async def main() -> None:
    with open_host_network(3) as network:
        say("network")
        async with NetworkJob(network) as hosts:
            say("hosts")
            async with hosts.spawn_procs({"gpus": 2}) as procs, procs.spawn("workers", Worker) as workers:
                say("workers")
                await workers.work.call()


if __name__ == "__main__":
    trio.run(main)
