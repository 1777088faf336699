"""`SPMDActor`: starts the program of one rank, watches it and ends it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio

from trimesh import limits
from trimesh._runtime.meshes import Rendezvous
from trimesh._runtime.system import host_name, run_process
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.errors import add_note
from trimesh.spmd import child
from trimesh.spmd.environment import HostPlace
from trimesh.spmd.failure import ScriptFailed


class SPMDActor(Actor):
    """Runs the program of one rank in an interpreter of its own, below the process that it lives in.

    `trimesh.spmd.run` uses it; a program of yours may spawn it to put its own environment together.
    """

    def __init__(self) -> None:
        self._rendezvous: Rendezvous | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Keep the port, if there is one."""
        try:
            yield
        finally:
            if self._rendezvous is not None:
                self._rendezvous.close()

    @endpoint
    def place(self) -> HostPlace:
        """Return where this rank is."""
        host = host_name()
        return HostPlace(host, host)

    @endpoint
    def get_host_port(self) -> tuple[str, int]:
        """Return this host's address, and a port that no other process gets for as long as the actor lives."""
        self._rendezvous = self._rendezvous or Rendezvous()
        return host_name(), self._rendezvous.port

    @endpoint
    async def main(self, command: Sequence[str], env: Mapping[str, str], grace: float = limits.GRACE_SECONDS) -> int:
        """Run a command to its end; return its exit code, 0.

        Args:
            command: Program and arguments.
            env: Added to the environment of this process.
            grace: Seconds from SIGTERM to SIGKILL when the call is cancelled.

        Raises:
            ScriptFailed: Its exit code is not 0, or a signal has ended it.
            OSError: It could not be started.
        """
        await self._run(command, env, grace, " ".join(command[1:]) or command[0])
        return 0

    @endpoint
    async def call(self, work: bytes, name: str, env: Mapping[str, str], grace: float = limits.GRACE_SECONDS) -> bytes:
        """Run a function in an interpreter of its own; see `trimesh.spmd.child` for what comes and goes.

        Raises:
            ScriptFailed: It has ended without a result.
            BaseException: What the function has raised.
        """
        reader, writer = os.pipe()
        answer = bytearray()
        failed: ScriptFailed | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read, reader, answer)
            try:
                command = [sys.executable, child.__file__, str(writer)]
                await self._run(command, env, grace, name, stdin=work, pass_fds=(writer,))
            except* ScriptFailed as group:
                [failed] = cast("tuple[ScriptFailed]", group.exceptions)
            finally:
                os.close(writer)
        if failed is None:
            return bytes(answer)
        if answer:
            error: BaseException = pickle.loads(answer)
            add_note(error, failed.stderr_tail.rstrip())
            raise error
        raise failed

    async def _run(
        self, command: Sequence[str], env: Mapping[str, str], grace: float, name: str, **options: Any
    ) -> None:
        """Run a command with its standard error going two ways: to that of this process, and into an error."""
        tail = _Tail()
        with tempfile.TemporaryDirectory(prefix="trimesh-spmd-") as folder:
            error_file = Path(folder) / "error.json"
            reader, writer = os.pipe()
            options.setdefault("stdin", subprocess.DEVNULL)
            variables = {**_defaults(env), **env, "TORCHELASTIC_ERROR_FILE": str(error_file)}
            done: list[subprocess.CompletedProcess[bytes]] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_tee, reader, tail)
                try:
                    done.append(
                        await run_process(command, grace=grace, check=False, env=variables, stderr=writer, **options)
                    )
                finally:
                    os.close(writer)
            if done[0].returncode:
                text = _recorded(error_file) or tail.text
                raise ScriptFailed(name, done[0].returncode, text)


def _defaults(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program, without what it is given."""
    defaults = {"PYTHONUNBUFFERED": "1"}  # lines come when they are printed
    if env.get("LOCAL_WORLD_SIZE", "1") != "1":
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun: each rank would take all cores
    return {**defaults, **os.environ}


def _recorded(path: Path) -> str:
    """Return what torch's `record` has written of the error of a program, or ""."""
    try:
        message = json.loads(path.read_bytes())["message"]
        return str(message if isinstance(message, str) else message["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class _Tail:
    """The last of what a program has written."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, more: bytes | bytearray) -> None:
        """Add something, and forget what is too old."""
        self._bytes += more
        del self._bytes[: -limits.SPMD_STDERR_TAIL_BYTES]

    @property
    def text(self) -> str:
        """What is left, decoded."""
        return self._bytes.decode(errors="replace")


async def _tee(reader: int, tail: _Tail) -> None:
    """Pass the standard error of a program on, until no process has it open any more."""
    write = partial(os.write, sys.stderr.fileno())
    async with trio.lowlevel.FdStream(reader) as stream:
        async for some in stream:
            tail.add(some)
            await trio.to_thread.run_sync(write, some)  # it may be a slow pipe


async def _read(reader: int, into: bytearray) -> None:
    async with trio.lowlevel.FdStream(reader) as stream:
        async for some in stream:
            into += some
