"""Launcher of the processes of one mesh, first ones and replacements, with its options and rendezvous."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from trimesh import limits
from trimesh._runtime.actors.reports import raise_errors
from trimesh._runtime.calls.invocation import Ok, Request, invoke
from trimesh._runtime.peers.host import LaunchRequest
from trimesh._runtime.spawner.proc_options import ProcOptions
from trimesh._runtime.system.child import checked_variables
from trimesh._runtime.watch.progress_view import ShownProgress, showing
from trimesh._runtime.watch.report import describe_waiting
from trimesh._wire.exceptions.tracebacks import is_hidden
from trimesh.config import current, from_environment
from trimesh.errors import MeshErrorGroup, SpawnError, set_origin

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.meshes.member import Member
    from trimesh._runtime.meshes.proc_members import ProcMembers
    from trimesh._runtime.values.endpoint_spec import MeshInfo


class Launching:
    """Starts the processes of one mesh, and holds their common resources for as long as it lives."""

    def __init__(self, procs: ProcMembers, options: ProcOptions) -> None:
        self._procs = procs
        self._proc = procs.proc
        self._options = options
        self._seed = procs.proc.new_id() if options.seed is None else options.seed
        self._rendezvous: Rendezvous | None = None

    def request(self, member: Member) -> LaunchRequest:
        """Return the launch request of a member; runs the user's functions for its point."""
        whole = self._procs.whole
        point = whole.point(member.rank)
        options = self._options
        env = checked_variables(options.env(point) if callable(options.env) else options.env, "env")
        if options.rendezvous and not self._proc.is_simulated:
            self._rendezvous = self._rendezvous or Rendezvous()
            is_alone = options.shares is not None and options.shares.has_gpus(member.rank)
            env = {**self._rendezvous.environment(member.rank, len(whole), is_alone=is_alone), **env}
        settings = from_environment(options.settings, env)
        recorder = self._proc.recorder
        folder = "" if recorder is None or settings.record == "off" else str(recorder.path.parent)
        member.record = f"{folder}/{member.peer.proc_id:x}" if folder else ""
        output = options.output(point) if callable(options.output) else options.output
        request = LaunchRequest(
            proc_id=member.peer.proc_id,
            mesh=self._procs.name,
            whole=whole,
            rank=member.rank,
            incarnation=member.incarnation,
            env=env,
            output=output,
            python=options.python,
            preload=options.preload,
            cpus=() if options.binding is None else options.binding.cpus_of(point),
            grace=options.grace,
            seed=self._seed,
            pickled=self._proc.values.is_pickled,
            settings=settings,
            record=folder,
        )
        return request if options.shares is None else options.shares.request(request)

    async def launch_all(self, progress: ShownProgress) -> None:
        """Start the first member at each rank.

        Raises:
            MeshErrorGroup: Some could not be started.
        """
        procs = self._procs
        errors: list[Exception] = []
        async with trio.open_nursery() as nursery:
            for rank in procs.whole.ranks():
                member = procs.new_member(rank, 0)
                procs.members.append(member)
                nursery.start_soon(self._launch, member, errors, nursery.cancel_scope, progress)
        if errors:
            raise MeshErrorGroup(f"{procs.name} could not be started", errors, mesh=procs.name)

    @trio.lowlevel.enable_ki_protection
    async def _launch(
        self, member: Member, errors: list[Exception], scope: trio.CancelScope, progress: ShownProgress | None = None
    ) -> None:
        procs = self._procs
        try:
            request = self.request(member)
            if procs.proc.sites is not None:
                request = procs.proc.sites.launching(request)
            member.started(await procs.host.launch(request, member.exited))
            if progress is not None:
                progress.done += 1
        except Exception as error:  # noqa: BLE001 - collected: the errors of all members are raised together
            set_origin(error, member.origin)
            errors.append(error)
            scope.cancel(reason=f"{member.label} could not be started")

    async def setup_all(self, ranks: Sequence[int], setup: Callable[[], Any] | None) -> None:
        """Run `setup` in some processes, or with None only wait until they answer, so are ready."""
        procs = self._procs
        info = procs.info
        request = Request(procs.name, "setup", (setup, info), {}, lambda index: info.origin(ranks[index]))
        results = await invoke(procs.proc, procs.agents(ranks), request, fail_fast=True)
        raise_errors(results, f"{procs.name} could not be started", procs.name)
        for rank, result in zip(ranks, results, strict=True):
            if isinstance(result, Ok):
                procs.members[rank].stack_fd = result.value

    async def launch_next(self, ranks: Sequence[int], what: str) -> None:
        """Start the next processes at some ranks, without their actors, and run the mesh's `setup` there.

        Args:
            what: Verb of the error text: "be restarted" or "grow".

        Raises:
            MeshErrorGroup: Some could not be started.
        """
        procs = self._procs
        errors: list[Exception] = []
        with trio.move_on_after(current().spawn_seconds) as scope:
            for rank in ranks:
                before = procs.members[rank]
                procs.proc.members.pop(before.peer.proc_id, None)
                procs.members[rank] = procs.new_member(rank, before.incarnation + 1)
            for rank in ranks:
                await self._launch(procs.members[rank], errors, scope)
            if not errors:
                await self.setup_all(ranks, None)
        if scope.cancelled_caught and not errors:
            errors = [
                SpawnError(
                    f"{procs.name} was not ready within the setting spawn_seconds ({current().spawn_seconds:g} s)"
                )
            ]
        if errors:
            raise MeshErrorGroup(f"{procs.name} could not {what}", errors, mesh=procs.name)
        if self._options.setup is not None:
            await self.setup_all(ranks, self._options.setup)

    def close(self) -> None:
        """Release the rendezvous port of the processes, and their places."""
        if self._options.shares is not None:
            self._options.shares.release()
        if self._rendezvous is not None:
            self._rendezvous.close()


# ---- rendezvous of the processes of a mesh for `torch.distributed`: a port, ranks and sizes --------------------------

# The owner of the mesh binds the port and never listens there, with `SO_REUSEADDR`. So the kernel gives it to no other
# process that requests any port, but lets the store of rank 0 bind it: the store names the number and has the same
# option. The port is held for as long as the mesh lives: a restarted process, or a second group, finds it free.

_ADDRESS: Final = "127.0.0.1"
"""Address of the processes of one host for each other."""


class Rendezvous:
    """A port that is held for a mesh.

    Attributes:
        port: Its number.
    """

    def __init__(self) -> None:
        """Reserve a port.

        Raises:
            OSError: The system has no port or no descriptor left.
        """
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("", 0))  # every address: the store listens on all of them
            self.port: int = self._socket.getsockname()[1]
        except BaseException:
            self._socket.close()
            raise

    def environment(self, rank: int, size: int, *, is_alone: bool = False) -> Mapping[str, str]:
        """Return the variables with which `torch.distributed.init_process_group()` finds the others, as torchrun's.

        Args:
            rank: Rank of the process.
            size: Number of processes.
            is_alone: Whether it sees only GPUs of its own, from `cuda:0` on.
        """
        return {
            "MASTER_ADDR": _ADDRESS,
            "MASTER_PORT": str(self.port),
            "RANK": str(rank),
            "LOCAL_RANK": "0" if is_alone else str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": "1" if is_alone else str(size),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # the store of a torchrun that has started this program
        }

    def close(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()


# ---- slow spawns: shown as progress, and logged once with the state of each process that is not ready ----------------

_log = logging.getLogger("trimesh")


@contextmanager
def starting(proc: Proc, info: MeshInfo, ranks: Sequence[int]) -> Generator[None, None, None]:
    """Surround the wait for the actors of a mesh to be ready."""
    scope = trio.CancelScope()
    proc.nursery.start_soon(_log_what_it_waits_for, proc, info, ranks, scope)
    try:
        with showing(proc, f"spawning {info.name} on {len(ranks)} processes"):
            yield
    finally:
        scope.cancel(reason=f"{info.name} has started, or failed to")


@trio.lowlevel.enable_ki_protection
async def _log_what_it_waits_for(proc: Proc, info: MeshInfo, ranks: Sequence[int], scope: trio.CancelScope) -> None:
    with scope:
        await trio.sleep(limits.SPAWNING_LOG_SECONDS)
        there = {info.members[rank].proc_id for rank in ranks}
        members = [member for proc_id, member in proc.members.items() if proc_id in there]
        lines = [line for line in await describe_waiting(proc, members) if not is_hidden(line)]
        if len(lines) > limits.SPAWNING_LOG_LINES:
            left_out = len(lines) - limits.SPAWNING_LOG_LINES
            lines[limits.SPAWNING_LOG_LINES :] = [f"  and {left_out} more lines; trimesh.dump() writes all of them"]
        _log.warning(
            "spawn of %s has waited for %g s: __init__ or lifespan has not ended yet in:\n%s",
            info.name,
            limits.SPAWNING_LOG_SECONDS,
            "\n".join(lines) or "  processes of another owner",
        )
