"""`trimesh host join` as tests start it, in the place of a scheduler."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import trio
from tests.agent_copies import CopiedProcess, open_trimesh

from trimesh import HostMesh, jobs


@asynccontextmanager
async def joining(
    door: jobs.OpenDoor, *arguments: str, token: str | None = None, env: Mapping[str, str] | None = None
) -> AsyncGenerator[trio.Process | CopiedProcess, None]:
    """Run `trimesh host join` for the body, as whoever starts hosts does; it must end by itself."""
    by = arguments or ("--token-file", "-")
    process = await open_trimesh(["host", "join", *door.addresses, *by], {**os.environ, **(env or {})})
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        if not arguments:
            await process.stdin.send_all(f"{token or door.token()}\n".encode())
        await process.stdin.aclose()
        yield process
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stderr.aclose()


@asynccontextmanager
async def hosts_at_a_door(count: int) -> AsyncGenerator[HostMesh, None]:
    """Open a door, start hosts that join there, and have them as a mesh.

    Whoever starts them is no part of the program: a cancel does not reach them.
    """
    async with trio.open_nursery() as nursery, jobs.open_door("127.0.0.1") as door:

        async def join() -> None:
            with trio.CancelScope(shield=True):
                async with joining(door):
                    pass

        for _ in range(count):
            nursery.start_soon(join)
        async with door.expect(count) as hosts:
            yield hosts
