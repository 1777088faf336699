"""A service that publishes its actors, and programs that connect to it.

`python examples/two_programs.py serve` runs until Ctrl-C; `python examples/two_programs.py` asks it, from another
terminal, as often as you like. Without a service the second one starts one for itself, and ends it.
"""

import signal
import subprocess
import sys

import trio

import trimesh
from trimesh import Actor, ConnectError, endpoint, this_host


class Judge(Actor):
    """Says how good an answer is."""

    @endpoint
    async def score(self, answer: str) -> float:
        """Return a number from 0 to 1."""
        return min(len(answer) / 20, 1.0)


async def serve() -> None:
    with trimesh.cancel_on(signal.SIGTERM):
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            judges = await procs.spawn("judges", Judge)
            async with trimesh.publish_as("example-judge", judges):
                print("serving", flush=True)
                await trio.sleep_forever()


async def ask() -> None:
    async with trimesh.connect("example-judge", Judge) as judges:
        for answer in ("yes", "it depends on the case"):
            print(f"{answer!r}: {await judges.score.choose(answer):.2f}")


def main() -> None:
    if "serve" in sys.argv[1:]:
        trio.run(serve)
        return
    try:
        trio.run(ask)
    except ConnectError as error:
        print(error)
        service = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE)
        assert service.stdout is not None
        service.stdout.readline()
        try:
            trio.run(ask)
        finally:
            service.terminate()
            service.communicate()


if __name__ == "__main__":
    main()
