"""`python -m trimesh.rdma`: what carries bulk data on this machine, and why the rest does not.

    python -m trimesh.rdma --gpudirect --serve ADDRESS      on the one machine, which prints the PEER for the other
    python -m trimesh.rdma --gpudirect PEER                 whether adapters of both reach their CUDA devices

Those two end with status 0 if all they have looked at is as it must be, else with 1.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import trio

from trimesh.rdma.buffers.gpudirect import ask, serve
from trimesh.rdma.buffers.report import CARRIERS, NBYTES, describe_machine, try_carrier


async def main() -> None:
    tell("\n".join(describe_machine()))
    tell(f"\nbetween two processes of this host, reading {NBYTES >> 20} MiB:")
    for carrier in CARRIERS:
        tell(await try_carrier(carrier))


def tell(line: object) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def chosen() -> int:
    """Do what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser("python -m trimesh.rdma", description="What carries bulk data on this machine.")
    parser.add_argument(
        "--gpudirect",
        nargs="?",
        const="",
        metavar="PEER",
        help="whether RDMA adapters reach the CUDA devices of this machine and of PEER, ADDRESS:PORT/TOKEN",
    )
    parser.add_argument(
        "--serve", metavar="ADDRESS", help="with --gpudirect: listen there, and print PEER for the other"
    )
    asked = parser.parse_args()
    if asked.gpudirect is None:
        if asked.serve is not None:
            parser.error("--serve goes with --gpudirect")
        trio.run(main)
        return 0
    if bool(asked.gpudirect) == bool(asked.serve):
        parser.error("--gpudirect needs the PEER that the other machine has printed, or --serve ADDRESS to print one")
    try:
        run = partial(serve, asked.serve, tell) if asked.serve else partial(ask, asked.gpudirect, tell)
        return 0 if trio.run(run) else 1
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(chosen())
