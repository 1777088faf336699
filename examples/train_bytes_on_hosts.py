"""Train the byte-level model of `train_bytes.py` over several hosts, lose one of them half-way, and carry on.

Run it: python examples/train_bytes_on_hosts.py [--hosts 3] [--steps 60] [--seed 0] [--no-kill]

The hosts are agents on this machine; an `SSHJob` or a `SlurmJob` in place of the `LocalJob` makes them other machines.
When an agent is killed, everything on its host ends with it, and the calls there raise `HostLost`. The policy starts
the host's processes again, as one unit, on the host that takes its place: here an agent that is started anew. So the
same mesh goes on at the very step that was lost, and ends with the loss that it would have had without the accident.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import trio
from train_bytes import PROMPT, Learner, Saboteur, Screen, Trainer, milliseconds_since

from trimesh import Backoff, HostLost, Restart, endpoint, jobs, leaves

REPLICAS = 2  # on each host
HEALING = Restart("one_for_one", along="hosts", backoff=Backoff(0.01))


class HostTrainer(Trainer):
    """A trainer that knows what its host depends on."""

    @endpoint
    def agent(self) -> int:
        """Return the process id of the agent of this host: the parent of what starts processes here."""
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])


async def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # the cores belong to the trainers
    learner = Learner(options.steps, options.seed)
    saboteur = Saboteur(options.steps // 2 if options.kill else None)
    began = time.perf_counter()
    with Screen(options.steps) as screen:
        async with (
            jobs.LocalJob(options.hosts) as hosts,
            hosts.spawn_procs(
                {"replica": REPLICAS}, supervision=HEALING, preload=("torch",), output="discard"
            ) as procs,
            procs.spawn("trainers", HostTrainer, learner.seed) as trainers,
            trio.open_nursery() as nursery,
        ):
            screen.note(f"{len(procs)} processes on {len(hosts)} hosts ready after {milliseconds_since(began)}")
            agents = await trainers.agent.call()
            while learner.step < learner.steps:
                if learner.step == saboteur.step:
                    nursery.start_soon(saboteur.strike, agents.item(hosts=1, replica=0), screen)
                try:
                    learner.learn(await trainers.gradients.call(learner.step, learner.weights))
                except* HostLost as group:
                    lost = next(leaves(group))
                    after = milliseconds_since(saboteur.struck_at)
                    screen.note(f"HostLost at hosts[hosts={lost.point['hosts']}]: {lost.reason}, {after} ago")
                    await trainers.agent.call()  # waits for the host in its place
                    screen.note(f"all processes are there {milliseconds_since(saboteur.struck_at)} after it")
                screen.advance(learner.step, learner.loss)
            text = await trainers.write.choose(learner.weights, PROMPT, 400)
        screen.note(f"{learner.steps} steps done, final loss {learner.loss:.4f}")
    screen.show_result(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="how long to train (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="train without the accident")
    options = parser.parse_args()
    if options.steps < 4 or options.hosts < 2:
        parser.error("--steps must be at least 4, and --hosts at least 2")
    trio.run(main, options)
