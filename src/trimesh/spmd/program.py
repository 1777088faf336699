"""`trimesh.spmd.run` runs a program once for each process of a mesh; `SPMDActor` runs the program of one rank.

RK-1 A rank that fails for a reason of its own (a root cause) ends the others at once.
RK-2 A rank that fails because a peer is gone has a follow-on error: the peer's own failure has
     `limits.SPMD_VERDICT_SECONDS` to arrive before the others are ended.
RK-3 Follow-on errors become a note on a root cause, and are raised only where there is none.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal as signals
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.meshes import Rendezvous, says_peer_is_gone, text_says_peer_is_gone
from trimesh._runtime.system import host_name, run_process
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import MeshError, MeshErrorGroup, add_note, leaves, origin, place_name
from trimesh.shape.value_mesh import ValueMesh
from trimesh.spmd import child
from trimesh.spmd.child import pack

R = TypeVar("R")


@overload
async def run(
    procs: ProcMesh,
    program: str | os.PathLike[str],
    /,
    *args: str,
    env: Mapping[str, str] | None = None,
    module: bool = False,
    grace: float = limits.GRACE_SECONDS,
) -> ValueMesh[int]: ...
@overload
async def run(
    procs: ProcMesh,
    program: Callable[..., R],
    /,
    *args: Any,
    env: Mapping[str, str] | None = None,
    grace: float = limits.GRACE_SECONDS,
) -> ValueMesh[R]: ...
async def run(
    procs: ProcMesh,
    program: str | os.PathLike[str] | Callable[..., Any],
    /,
    *args: Any,
    env: Mapping[str, str] | None = None,
    module: bool = False,
    grace: float = limits.GRACE_SECONDS,
) -> ValueMesh[Any]:
    """Run an unmodified script, or a function, once for each process of a mesh, as torchrun would.

    Each rank has a separate interpreter, a child of its mesh process, with torchrun's environment; it finds the
    others by `torch.distributed.init_process_group()`. Its output goes where that process's output goes.

    Args:
        procs: Processes that this program owns; their ranks are those of the program, in row-major order.
        program: Path of a script, or a function, which is pickled by cloudpickle; with `module=True` the name of a
            module, as for `python -m`.
        *args: Command line of the script, or arguments of the function.
        env: Variables for all ranks, added to those of the processes. Torchrun's variables take precedence.
        module: See `program`.
        grace: Seconds from SIGTERM to SIGKILL for ranks that are ended.

    Returns:
        The exit codes, all 0, or the results of the function.

    Raises:
        MeshErrorGroup: A rank failed: `ScriptFailed` with its traceback, or the exception of the function. The others
            were ended. Ranks that failed because a peer was gone are listed in a note on that peer's failure.
        TypeError: The function or its arguments cannot be pickled; an argument of a script is not a string.
        RuntimeError: `procs` is a reference; only the block that owns processes can spawn on them.

    Blocking: a checkpoint, cancellable. When it raises, all ranks and their child processes have ended.
    """
    if callable(program):
        work, name = pack(program, args), f"{getattr(program, '__qualname__', program)}()"
        async with launchers_on(procs, env or {}) as (launchers, variables):
            calls = [partial(one.call.call_one, work, name, own, grace) for one, own in _each(launchers, variables)]
            answers = await run_together(calls, name)
        return ValueMesh(variables.region, [pickle.loads(answer) for answer in answers])
    words = [os.fspath(program), *_arguments(args)]
    kind = "module" if module else "script"
    async with launchers_on(procs, env or {}) as (launchers, variables):
        mains = [partial(one.script.call_one, kind, words, own, grace) for one, own in _each(launchers, variables)]
        return ValueMesh(variables.region, await run_together(mains, words[0]))


def _each(launchers: SPMDActor, variables: ValueMesh[dict[str, str]]) -> Iterator[tuple[SPMDActor, dict[str, str]]]:
    """Yield the launcher of each rank, and its environment."""
    for point, own in variables.items():
        yield launchers.slice(**point), own


async def env(procs: ProcMesh) -> ValueMesh[dict[str, str]]:
    """Return torchrun's environment variables for each process of a mesh, for programs that you start.

    Its port is free now but not reserved: `spawn_procs(rendezvous=True)` reserves one while the mesh lives, and `run`
    while the program runs.

    Args:
        procs: Processes that this program owns.

    Blocking: a checkpoint, cancellable; costs an actor in each process while it runs.
    """
    async with launchers_on(procs, {}) as (_, variables):
        return variables


@asynccontextmanager
async def launchers_on(
    procs: ProcMesh, more: Mapping[str, str]
) -> AsyncGenerator[tuple[SPMDActor, ValueMesh[dict[str, str]]], None]:
    """Spawn a launcher on each process, and compute the environment of each rank."""
    async with procs.spawn("spmd", SPMDActor) as launchers:
        places = await launchers.place.call()
        first = launchers.slice(**dict.fromkeys(launchers.extent, 0))
        _, port = await first.get_host_port.call_one()
        found = environments(places.values(), port, secrets.token_hex(8))
        yield launchers, ValueMesh(places.region, [{**more, **one} for one in found])


def _arguments(args: Sequence[Any]) -> list[str]:
    for one in args:
        if not isinstance(one, str | os.PathLike):
            raise TypeError(f"arguments of a script must be strings or paths, got {one!r}: write {str(one)!r}")
    return [os.fspath(one) for one in args]


# ---- run the ranks of one program together: the first failure ends the others ----------------------------------------


async def run_together(ranks: Sequence[Callable[[], Awaitable[R]]], name: str) -> list[R]:
    """Run the ranks concurrently; return their results.

    Args:
        ranks: One function for each rank.
        name: Name of the mesh, for the error.

    Raises:
        MeshErrorGroup: Some ranks failed; the others were cancelled.
    """
    results: dict[int, R] = {}
    failures: list[Exception] = []
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope

        async def run(rank: int, work: Callable[[], Awaitable[R]]) -> None:
            try:
                results[rank] = await work()
            except Exception as error:  # noqa: BLE001 - raised below, with the others
                failures.append(error)
                if _is_follow_on(error):
                    scope.deadline = min(scope.deadline, trio.current_time() + limits.SPMD_VERDICT_SECONDS)
                else:
                    scope.cancel(reason="another rank failed")

        for rank, work in enumerate(ranks):
            nursery.start_soon(run, rank, work)
    if failures:
        raise MeshErrorGroup(f"{name} failed", _root_causes(failures), mesh=name)
    return [results[rank] for rank in range(len(ranks))]


def _is_follow_on(error: Exception) -> bool:
    return all(
        text_says_peer_is_gone(leaf.stderr_tail) if isinstance(leaf, ScriptFailed) else says_peer_is_gone(leaf)
        for leaf in leaves(error)
    )


def _root_causes(failures: Sequence[Exception]) -> list[Exception]:
    """Return the root causes, with a note that lists the follow-on errors; without a root cause, all failures."""
    causes = [error for error in failures if not _is_follow_on(error)]
    others = [error for error in failures if error not in causes]
    if not causes:
        return others
    if others:
        places = [origin(leaf) for error in others for leaf in leaves(error)]
        where = ", ".join(place_name(one.mesh, one.point) for one in places if one is not None)
        add_note(causes[0], f"ranks that failed because a peer was gone: {where}")
    return causes


# ---- `SPMDActor`: starts the program of one rank, watches it and ends it ---------------------------------------------


class HostPlace(msgspec.Struct, frozen=True):
    """Host of a rank.

    Attributes:
        host: Identifies the host: equal for all ranks on it, and only for them.
        address: Address at which other hosts reach it.
    """

    host: str
    address: str


def environments(places: Sequence[HostPlace], port: int, run_id: str) -> list[dict[str, str]]:
    """Return the environment variables of each rank, without those that only differ between launchers.

    Args:
        places: Host of each rank.
        port: Port of the store, on the host of rank 0.
        run_id: Unique to the run, and equal for all ranks.
    """
    hosts = list(dict.fromkeys(place.host for place in places))
    sizes = Counter(place.host for place in places)
    before: Counter[str] = Counter()
    found: list[dict[str, str]] = []
    for rank, place in enumerate(places):
        variables: Mapping[str, object] = {
            "RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": before[place.host],
            "LOCAL_WORLD_SIZE": sizes[place.host],
            "GROUP_RANK": hosts.index(place.host),
            "GROUP_WORLD_SIZE": len(hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": len(places),
            "MASTER_ADDR": places[0].address if len(hosts) > 1 else "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 has the store, on the port reserved for it
        }
        before[place.host] += 1
        found.append({name: str(value) for name, value in variables.items()})
    return found


class SPMDActor(Actor):
    """Runs the program of one rank in a separate interpreter, a child of the actor's process.

    `trimesh.spmd.run` uses it; spawn it yourself to build the environment yourself.
    """

    def __init__(self) -> None:
        self._rendezvous: Rendezvous | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Hold the reserved port, if there is one."""
        try:
            yield
        finally:
            if self._rendezvous is not None:
                self._rendezvous.close()

    @endpoint
    def place(self) -> HostPlace:
        """Return the host of this rank."""
        host = host_name()
        return HostPlace(host, host)

    @endpoint
    def get_host_port(self) -> tuple[str, int]:
        """Return this host's address and a port that stays reserved while the actor lives."""
        self._rendezvous = self._rendezvous or Rendezvous()
        return host_name(), self._rendezvous.port

    @endpoint
    async def main(self, command: Sequence[str], env: Mapping[str, str], grace: float = limits.GRACE_SECONDS) -> int:
        """Run a command to its end; return its exit code, 0.

        Args:
            command: Program and arguments.
            env: Variables added to the environment of this process.
            grace: Seconds from SIGTERM to SIGKILL when the call is cancelled.

        Raises:
            ScriptFailed: The exit code is not 0, or a signal ended the command.
            OSError: The command could not be started.
        """
        await self._run(command, env, grace, " ".join(command[1:]) or command[0])
        return 0

    @endpoint
    async def script(
        self, kind: str, words: Sequence[str], env: Mapping[str, str], grace: float = limits.GRACE_SECONDS
    ) -> int:
        """Run a script or module by the interpreter of this host; see `main`.

        Args:
            kind: "script" or "module".
            words: Path or name, and arguments.
            env: See `main`.
            grace: See `main`.
        """
        name = " ".join(["-m", *words] if kind == "module" else words)
        await self._run([sys.executable, child.__file__, kind, *words], env, grace, name)
        return 0

    @endpoint
    async def call(self, work: bytes, name: str, env: Mapping[str, str], grace: float = limits.GRACE_SECONDS) -> bytes:
        """Run a function in a separate interpreter; `trimesh.spmd.child` has the formats of `work` and the result.

        Raises:
            ScriptFailed: The child ended without a result.
            BaseException: Raised by the function.
        """
        reader, writer = os.pipe()
        answer = bytearray()
        failed: ScriptFailed | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read, reader, answer)
            try:
                command = [sys.executable, child.__file__, "function", str(writer)]
                await self._run(command, env, grace, name, stdin=work, pass_fds=(writer,))
            except* ScriptFailed as group:
                [failed] = cast("tuple[ScriptFailed]", group.exceptions)
            finally:
                os.close(writer)
        if failed is None:
            return bytes(answer)
        error = pickle.loads(answer) if answer else None
        if not isinstance(error, BaseException):  # it was ended before its result, or after it
            raise failed
        add_note(error, failed.stderr_tail.rstrip())
        raise error

    async def _run(
        self, command: Sequence[str], env: Mapping[str, str], grace: float, name: str, **options: Any
    ) -> None:
        """Run a command; copy its standard error to this process's, and keep its tail for an error."""
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
    """Return the environment of a program before `env` is added: defaults, and that of this process over them."""
    defaults = {"PYTHONUNBUFFERED": "1"}  # lines appear when they are printed
    if env.get("LOCAL_WORLD_SIZE", "1") != "1":
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun: each rank would take all cores
    return {**defaults, **os.environ}


def _recorded(path: Path) -> str:
    """Return the error that torch's `record` wrote for a program, or ""."""
    try:
        message = json.loads(path.read_bytes())["message"]
        return str(message if isinstance(message, str) else message["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class _Tail:
    """Tail of a program's output."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, more: bytes | bytearray) -> None:
        """Append bytes and drop the oldest ones beyond the bound."""
        self._bytes += more
        del self._bytes[: -limits.SPMD_STDERR_TAIL_BYTES]

    @property
    def text(self) -> str:
        """The tail, decoded."""
        return self._bytes.decode(errors="replace")


async def _tee(reader: int, tail: _Tail) -> None:
    """Forward the standard error of a program until no process has it open."""
    write = partial(os.write, sys.stderr.fileno())
    async with trio.lowlevel.FdStream(reader) as stream:
        async for some in stream:
            tail.add(some)
            await trio.to_thread.run_sync(write, some)  # it may be a slow pipe


async def _read(reader: int, into: bytearray) -> None:
    async with trio.lowlevel.FdStream(reader) as stream:
        async for some in stream:
            into += some


# ---- errors ----------------------------------------------------------------------------------------------------------


class ScriptFailed(MeshError):
    """The program of a rank failed.

    Attributes:
        program: The script, module or function.
        exit_code: Its exit code, or None when a signal ended it.
        signal: Number of the signal that ended it, or None.
        stderr_tail: Last lines of its standard error, at most `limits.SPMD_STDERR_TAIL_BYTES`: the traceback, or the
            error that `torch.distributed.elastic.multiprocessing.errors.record` wrote.
    """

    def __init__(self, program: str, returncode: int, stderr_tail: str = "") -> None:
        super().__init__(program, returncode, stderr_tail)
        self.program = program
        self.exit_code = returncode if returncode >= 0 else None
        self.signal = -returncode if returncode < 0 else None
        self.stderr_tail = stderr_tail

    def __str__(self) -> str:
        how = f"exited with {self.exit_code}" if self.signal is None else f"was ended by {_name(self.signal)}"
        tail = self.stderr_tail.rstrip()
        return f"{self.program} {how}" + (f"; the end of its standard error:\n{tail}" if tail else "")


def _name(signum: int) -> str:
    try:
        return signals.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
