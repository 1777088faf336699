"""The program's side of `HostMesh.install`."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from typing import Any, Final

import trio

from trimesh import limits
from trimesh._runtime.life import HostCode, JobHosts, Proc, current_proc
from trimesh._runtime.watch import showing
from trimesh.actor.channel import open_channel
from trimesh.actor.host_mesh import HostMesh
from trimesh.context_managers import asynccontextmanager
from trimesh.jobs.packages.installer import Installer, Said
from trimesh.jobs.packages.requirements import Requirements, read_requirements

_KIND: Final = "install"
Made = list[tuple[list[str], dict[str, str], bool]]


class Installation:
    """Packages on hosts, while their block is open; see `HostMesh.install`.

    Attributes:
        digest: Of the file, and what it takes in.
        made: On how many hosts it was made; the others had it.
    """

    def __init__(self, digest: str, made: int) -> None:
        self.digest = digest
        self.made = made

    def __repr__(self) -> str:
        return f"<installed packages {self.digest[:12]}>"


@asynccontextmanager
async def install(
    hosts: HostMesh, job: JobHosts | None, file: str | os.PathLike[str]
) -> AsyncGenerator[Installation, None]:
    """Install packages on hosts; see `HostMesh.install`."""
    if job is None:
        raise ValueError("packages are installed on the hosts of a job; this host has its own: use uv or pip")
    proc = current_proc()
    if proc.is_simulated:  # its hosts are this process
        yield Installation(read_requirements(file).digest, 0)
        return
    found = await trio.to_thread.run_sync(read_requirements, file)
    job.check_no_code(_KIND)
    async with hosts.spawn_procs({}, name="packages") as procs, procs.spawn("packages", Installer) as installers:
        made = await _make(hosts, proc, installers, found)
        codes = [HostCode((), env, tuple(map(os.fsencode, paths))) for paths, env, _ in made]
        job.set_code(_KIND, codes)
        try:
            yield Installation(found.digest, sum(is_made for _, _, is_made in made))
        finally:
            job.set_code(_KIND, [None] * len(hosts))


async def _make(hosts: HostMesh, proc: Proc, installers: Installer, found: Requirements) -> Made:
    outcomes = list[Made | Exception]()
    item: Any = Said
    channel = open_channel(item, capacity=limits.COMMAND_BATCHES)
    with showing(proc, f"installing {found.name} on the hosts") as progress:
        async with channel as (port, receiver), trio.open_nursery() as nursery:

            async def call() -> None:
                try:
                    outcomes.append(list(await installers.make.call(found.files, found.digest, found.name, port)))
                except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it
                    outcomes.append(error)
                finally:
                    port.close()

            nursery.start_soon(call)
            async for rank, text in receiver:
                progress.title = f"installing {found.name}, {hosts.names[rank]}: {text[: limits.INSTALL_WORDS_MAX]}"
    [outcome] = outcomes
    if isinstance(outcome, Exception):
        try:
            raise outcome
        finally:
            del outcome, outcomes
    return outcome
