"""Two host agents on this machine, with two workers each, that call each other across hosts.

Run it: python examples/two_hosts.py (needs the extra `hosts`)
"""

from __future__ import annotations

import trio

from trimesh import Actor, endpoint, jobs


class Worker(Actor):
    """Greets, and lets others greet."""

    @endpoint
    def greet(self, whom: str) -> str:
        """Return a greeting."""
        return f"hello, {whom}"

    @endpoint
    async def ask(self, others: Worker, name: str) -> list[str]:
        """Let all others greet `name`."""
        return list(await others.greet.call(name))


async def main() -> None:
    async with (
        jobs.LocalJob(2) as hosts,
        hosts.spawn_procs({"gpus": 2}) as procs,
        procs.spawn("askers", Worker) as askers,
        procs.spawn("greeters", Worker) as greeters,
    ):
        print(f"{len(procs)} processes over {dict(procs.extent)}")
        greetings = await askers.slice(hosts=0).ask.call(greeters.slice(hosts=1), "host 0")
        for point, lines in greetings.items():
            print(f"{dict(point)}: {', '.join(lines)}")


if __name__ == "__main__":
    trio.run(main)
