"""A constructor waits for ever, until Ctrl-C.

Words: hanging_init.py
"""

import socket
import threading
import time
import os
import signal

import trio

from trimesh import Actor, current_rank, endpoint, this_host


class Trainer(Actor):
    def __init__(self) -> None:
        self.weights = b""
        if current_rank() == 1:
            server = socket.create_server(("127.0.0.1", 0))
            self.connection, _ = server.accept()

    @endpoint
    async def step(self) -> int:
        return len(self.weights)


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        with trio.move_on_after(12):
            await procs.spawn("trainers", Trainer)


trio.run(main)
