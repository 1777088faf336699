"""The agent of a host is killed.

Words: HostLost
"""

import os
import signal

import trio

from trimesh import Actor, endpoint
from trimesh.jobs import LocalJob


class Trainer(Actor):
    @endpoint
    async def step(self) -> int:
        return os.getppid()


async def main() -> None:
    async with LocalJob(hosts=2) as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        spawner = await trainers.slice(hosts=1).step.call_one()
        status = await trio.Path(f"/proc/{spawner}/stat").read_text()
        agent = int(status.rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)
        await trio.sleep_forever()


trio.run(main)
