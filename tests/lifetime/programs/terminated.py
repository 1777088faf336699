"""A program that gets SIGTERM in an open block; its argument says how it uses trimesh, or what is odd about it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

import trimesh
from trimesh import Actor, endpoint, jobs, limits, this_host

how = sys.argv[1]


class Worker(Actor):
    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if how == "stubborn":
                print("cleaning", flush=True)
                with trio.CancelScope(shield=True):
                    await trio.sleep_forever()
            print("cleaned", flush=True)

    @endpoint
    async def stay(self) -> None:
        print("ready", flush=True)
        await trio.sleep_forever()


async def body(workers: Worker) -> None:
    if how == "busy":
        print("ready\nready", flush=True)  # output of actors may not be shown any more
        while True:
            sum(range(1000))
    if how == "forked":
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        print("child", child, flush=True)
    await workers.stay.call()


async def main() -> None:
    grace = {"stubborn": 600.0, "endless": 0.1}.get(how, 5.0)
    async with this_host().spawn_procs({"gpus": 2}, grace=grace) as procs:
        workers = await procs.spawn("workers", Worker)
        try:
            await body(workers)
        except KeyboardInterrupt:
            if how != "endless":
                raise
            with trio.CancelScope(shield=True):
                await trio.sleep_forever()
        finally:
            print("left")
    print("after the block")


async def main_on_hosts() -> None:
    async with jobs.LocalJob(2) as hosts, hosts.spawn_procs({}) as procs:
        await body(await procs.spawn("workers", Worker))


async def main_of_asyncio() -> None:
    async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
        await body(await procs.spawn("workers", Worker))


def main_of_threads() -> None:
    with trimesh.blocking.spawn_procs({"gpus": 2}) as procs:
        procs.spawn("workers", Worker).stay.call()


def handle(*_: object) -> None:
    print("own handler", flush=True)
    os._exit(5)


if how == "own handler":
    signal.signal(signal.SIGTERM, handle)
if how == "no Ctrl-C":  # as a shell starts `program &` of a script
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if how == "endless":
    limits.SIGTERM_SECONDS = 0.2  # type: ignore[misc]  # pyright: ignore[reportConstantRedefinition]
if how == "asyncio":
    asyncio.run(main_of_asyncio())
elif how == "blocking":
    main_of_threads()
else:
    trio.run(main_on_hosts if how == "hosts" else main)
