"""An argument is a lambda that uses a socket.

Words: report
"""

import socket

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def train(self, report) -> None:
        report(b"done")


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        connection, _ = socket.socketpair()
        await trainers.train.call(report=lambda text: connection.send(text))


trio.run(main)
