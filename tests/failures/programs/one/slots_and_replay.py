"""A worker of an RL loop raises while it holds a lease.

Words: ValueError: a reward must be finite
"""

import trio

from trimesh.service import ReplayBuffer, Slots, open_replay, open_slots


async def work(slots: Slots, buffer: ReplayBuffer[str]) -> None:
    async with slots.lease():
        raise ValueError("a reward must be finite")


async def main() -> None:
    async with (
        open_slots(batch=2, staleness=1) as slots,
        open_replay(capacity=10, slots=slots) as buffer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(work, slots, buffer)
        await buffer.sample(2)


trio.run(main)
