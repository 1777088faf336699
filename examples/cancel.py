"""A deadline in this process cancels endpoints in others; prints what each side sees.

Run it: python examples/cancel.py [seconds]
"""

from __future__ import annotations

import sys

import trio

import trimesh
from trimesh import Actor, endpoint, this_host


class Cook(Actor):
    """Takes its time."""

    @endpoint
    async def roast(self, seconds: float) -> str:
        """Work for `seconds`, or until the caller has no more time."""
        began = trio.current_time()
        budget = trio.current_effective_deadline() - began
        print(f"I need {seconds} s, the caller gives me {budget:.1f} s")
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            print(f"cancelled after {trio.current_time() - began:.1f} s, cleaning up")
            with trio.CancelScope(shield=True):
                await trio.sleep(0.1)
            print("clean")
            raise
        return f"dish {trimesh.current_rank()}"


async def main(limit: float) -> None:
    async with this_host().spawn_procs({"cook": 2}) as procs:
        cooks = await procs.spawn("cooks", Cook)
        began = trio.current_time()

        with trio.move_on_after(limit) as scope:
            await cooks.roast.call(3600)
        assert scope.cancelled_caught
        # The call ended only after both endpoints had unwound: nothing that it started is still running.
        print(f"the call was cut after {trio.current_time() - began:.1f} s, clean-up included")

        with trio.fail_after(10):
            dishes = await cooks.roast.call(0.1)  # the actors live on
        print("served:", *dishes.values())


if __name__ == "__main__":
    trio.run(main, float(sys.argv[1]) if len(sys.argv) > 1 else 0.5)
