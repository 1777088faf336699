"""Two actors in two processes pass a ball to and fro; prints how long a round trip takes.

Run it: python examples/ping_pong.py [--rounds 2000]
"""

from __future__ import annotations

import argparse
import statistics
import time

import trio

from trimesh import Actor, endpoint, this_host


class Player(Actor):
    """Knows how to return a ball, and how to play against another player."""

    @endpoint
    def hit(self, ball: int) -> int:
        """Return the ball, one hit older."""
        return ball + 1

    @endpoint
    async def play(self, opponent: Player, rounds: int) -> list[float]:
        """Play with `opponent` and return the seconds that each round trip took."""
        ball = 0
        times: list[float] = []
        for _ in range(rounds):
            began = time.perf_counter()
            ball = await opponent.hit.call_one(ball)
            times.append(time.perf_counter() - began)
        assert ball == rounds
        return times


async def main(rounds: int) -> None:
    async with this_host().spawn_procs({"side": 2}) as procs:
        players = await procs.spawn("players", Player)
        left, right = players.slice(side=0), players.slice(side=1)
        # `right` travels to the left process as a reference; the ball then goes straight from process to process.
        times = await left.play.call_one(right, rounds)
    microseconds = statistics.quantiles((1e6 * seconds for seconds in times), n=100)
    print(f"{rounds} round trips: half within {microseconds[49]:.0f} us, 99 % within {microseconds[98]:.0f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="how often to pass the ball (default: %(default)s)")
    trio.run(main, parser.parse_args().rounds)
