"""`python -m trimesh.rdma`: what carries bulk data on this machine, and why the rest does not."""

from __future__ import annotations

import sys

import trio

from trimesh.rdma.buffers.report import CARRIERS, NBYTES, describe_machine, try_carrier


async def main() -> None:
    """Print the report."""
    tell("\n".join(describe_machine()))
    tell(f"\nbetween two processes of this host, reading {NBYTES >> 20} MiB:")
    for carrier in CARRIERS:
        tell(await try_carrier(carrier))


def tell(line: object) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main)
