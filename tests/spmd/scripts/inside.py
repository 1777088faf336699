"""A program inside of a torchrun job; its first argument names what it does."""

import os
import sys

import torch
import torch.distributed
import trio

from trimesh import Actor, endpoint, spmd


class Rank(Actor):
    @endpoint(thread=True)
    def total(self) -> float:
        torch.distributed.init_process_group("gloo")
        ones = torch.ones(1) * torch.distributed.get_rank()
        torch.distributed.all_reduce(ones)
        torch.distributed.destroy_process_group()
        return ones.item()

    @endpoint
    def variables(self) -> tuple[str, str, str, int]:
        return os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.getpid()

    @endpoint
    def fail(self) -> None:
        if os.environ["RANK"] == "1":
            raise LookupError("of rank 1")


async def main() -> None:
    async with spmd.from_torchrun(name="ranks") as procs:
        ranks = await procs.spawn("workers", Rank)
        found = (await ranks.variables.call()).values()
        assert [one[:3] for one in found] == [("0", "0", "2"), ("1", "1", "2")]
        print("mesh", *[one[3] for one in found], flush=True)
        if sys.argv[1] == "total":
            print("total", await ranks.total.call(), flush=True)
        elif sys.argv[1] == "fail":
            await ranks.fail.call()
        else:
            await trio.sleep_forever()
    print("left", os.environ["RANK"], flush=True)


trio.run(main)
