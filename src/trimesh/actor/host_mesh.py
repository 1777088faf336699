"""`this_host()` and `this_proc()`, and the meshes of processes that start there."""

from __future__ import annotations

import builtins
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import trio

from trimesh._runtime import life
from trimesh._runtime.spawner import ProcOptions
from trimesh._runtime.system import Bind, checked_bind, checked_output, host_name
from trimesh._runtime.tasks import in_trio
from trimesh._runtime.values import HostsInfo
from trimesh._supervision.policy import FailFast, Policy, check_units, checked_policy
from trimesh._wire.memory import Sink
from trimesh._wire.typed.codec import DecodeSource, ValueKind, register_kind
from trimesh.actor import mesh_kinds
from trimesh.actor.options import suggests_keywords
from trimesh.actor.proc_mesh import ModuleAbove, ProcMesh, borrowed_procs
from trimesh.actor.spawning import (
    Env,
    Pickle,
    Spawning,
    checked_env,
    checked_grace,
    checked_name,
    checked_pickle,
    checked_preload,
    checked_seed,
    with_substitutes,
)
from trimesh.config import reread
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import ProtocolError
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import ValueMesh, drawing_of

if TYPE_CHECKING:
    from trimesh._runtime.life import JobHosts, OwnedHost, ShownHosts
    from trimesh.actor.placement.placement import Need, Placement, Places, Resources
    from trimesh.jobs import on_hosts
    from trimesh.jobs.code import CodeSync
    from trimesh.jobs.on_hosts import Forwarding
    from trimesh.jobs.packages import Installation
    from trimesh.shape.value_mesh import OutputLine


Output = Any
"""`"forward"`, `"inherit"`, `"discard"` or a path object; or a function of the point that returns one of them."""


hosts_module = ModuleAbove()
if not TYPE_CHECKING:
    on_hosts = hosts_module

mesh_kinds.register()


class HostMesh:
    """Hosts: this machine, as a mesh of one point without dimensions, or the hosts of a job.

    Hosts of a job that is opened with `shared=True` can be sent to actors, which spawn on them.
    """

    def __init__(self, owned: OwnedHost | None = None, hosts: ShownHosts | None = None) -> None:
        self._owned = owned
        self._hosts = hosts

    @property
    def extent(self) -> Extent:
        """Labels and sizes: empty for this machine, `{"hosts": n}` for a job."""
        return Extent() if self._hosts is None else self._hosts.region.extent

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts, in order."""
        if self._hosts is None:
            return (host_name(),)
        return self._hosts.names

    def __len__(self) -> int:
        return self.extent.nelements

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Travel as a reference, if the hosts are those of a job that shares them.

        Raises:
            TypeError: They are not.
        """
        del protocol
        return refer_hosts, self._sent()

    def _sent(self) -> tuple[HostsInfo, Region]:
        if self._hosts is None:
            raise TypeError(
                "this_host() cannot be sent to another process, as it is the machine of its caller: call this_host() "
                "in the actor"
            )
        owned, hosts = self._owned, self._job("hosts")
        if owned is None or not owned.shared_as:
            raise TypeError(
                "hosts of a job cannot be sent to another process, as the job does not share them: open it with "
                "shared=True, as in jobs.LocalJob(2, shared=True), or send a mesh of `hosts.spawn_procs(...)`"
            )
        return hosts.info(owned), hosts.region

    def _job(self, verb: str) -> JobHosts:
        """Return the hosts of a job of this program, for methods that need their owner.

        Raises:
            ValueError: This is the machine of the program.
        """
        if self._hosts is None:
            raise ValueError(f"{verb} needs the hosts of a job, got this_host(), which runs the program: open a job")
        return cast("JobHosts", self._hosts)

    def points(self) -> Iterator[Point]:
        """Yield the coordinates of the hosts in this view."""
        return (Region(Extent()) if self._hosts is None else self._hosts.region).points()

    def slice(self, /, **selection: int | builtins.slice) -> HostMesh:
        """Return a part of the hosts: `hosts.slice(hosts=0)`, `hosts.slice(hosts=slice(0, 2))`.

        Raises:
            ShapeError: There is no such label or index; this machine has no label.
        """
        if self._hosts is None:
            Region(Extent()).slice(**selection)
            return self
        return self._seen(self._hosts.part(self._hosts.region.slice(**selection)))

    def __getitem__(self, name: str) -> HostMesh:
        """Return the hosts that the job names so: `hosts["trainers"]`.

        Raises:
            KeyError: There is no such name.
        """
        parts: Mapping[str, tuple[int, int]] = {} if self._hosts is None else self._hosts.parts
        if self._hosts is None or name not in parts:
            known = ", ".join(map(repr, parts)) or "none, as only a job made from a mapping has them"
            raise KeyError(f"no hosts are named {name!r}; names: {known}")
        start, stop = parts[name]
        return self._seen(self._hosts.part(self._hosts.whole.slice(hosts=slice(start, stop))))

    def _seen(self, hosts: ShownHosts) -> HostMesh:
        return HostMesh(self._owned, hosts)

    @suggests_keywords
    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        *,
        on: Places | None = None,
        name: str = "procs",
        preload: Sequence[str] | None = None,
        env: Env | None = None,
        setup: Callable[[], Any] | None = None,
        python: str | None = None,
        grace: float | None = None,
        output: Output = None,
        supervision: Policy | None = None,
        pickle: Pickle | None = None,
        seed: int | None = None,
        rendezvous: bool = False,
        bind: Bind | None = None,
        shared: bool = False,
    ) -> Spawning[ProcMesh]:
        """Start processes: `async with this_host().spawn_procs({"gpus": 4}) as procs:`.

        `preload`, `grace`, `output` and `pickle` default to the settings of `trimesh.config` if None or omitted.

        Args:
            per_host: Dimensions of the mesh, label to size; of a job, those on each host. With `on=` those of the whole
                mesh, by default `{"procs": count}`.
            on: Places reserved by `place`: process r of the mesh starts at place r, with its GPUs and CPUs.
            name: Name of the mesh, for messages and errors.
            preload: Modules imported once, before the processes are forked; their memory is shared.
            env: Environment variables set over those of this program; or a function of the point that returns them.
            setup: Sync or async function run in each process before any actor.
            python: Path of another interpreter, which is executed instead of a fork.
            grace: Seconds for clean-up when the block is left; then the process is killed. `math.inf` waits.
            output: Destination of standard output and error: "forward" (line by line, with coordinates),
                "inherit", "discard", or a path object: the file that all of them append to; or a function of the point
                that returns one of these.
            supervision: Policy for the end of a process: `FailFast()`, the default, cancels the block, which raises it;
                `Isolate()` continues without the process; `Restart(...)` restarts it.
            pickle: "off" unpickles nothing in the family, the processes of one outermost block: values travel by the
                annotations of endpoints, and classes by name. All meshes of a family have the same.
            seed: Seed of random numbers, so that a run can be repeated. None draws one. Each process seeds `random`,
                numpy and torch from it, the mesh's name, its rank and its number of restarts. Meshes that are spawned
                inside do not inherit it.
            rendezvous: Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun
                does, and hold the port while the mesh lives: `torch.distributed.init_process_group()` finds the others.
                A process on a place with GPUs (`on=`) sees only its own, and has LOCAL_RANK 0 of LOCAL_WORLD_SIZE 1.
            bind: CPUs of each process, among those of this one. "cores" gives each process its own share of the cores,
                with their hardware threads; "numa" a share of the NUMA nodes, which several may have in common; a
                function of the point and the cores (a tuple of sets of CPUs) returns a set of CPUs. None leaves all.
            shared: Let actors that hold a handle on this mesh, such as `context().procs`, spawn on it.

        Returns:
            An object to enter (the block owns the mesh) or, on a warm host, to await (the host's block owns it).

        Raises:
            ValueError: An argument is invalid; or, on entering, `pickle` differs from that of the family.
            ConfigError: A setting is invalid.
            MeshErrorGroup: On entering, a process could not be started; has its coordinates. None of them is left.
        """
        name, extent = checked_name(name), self._checked_extent(per_host, on, bind, rendezvous=rendezvous)
        settings = reread()
        options = ProcOptions(
            checked_env(env),
            with_substitutes(setup, pickle or settings.pickle),
            python,
            settings.preload if preload is None else checked_preload(preload),
            settings.grace if grace is None else checked_grace(grace),
            settings.output if output is None else _checked_output(output),
            pickled=checked_pickle(pickle),
            seed=checked_seed(seed),
            rendezvous=rendezvous,
            settings=settings,
            bind=checked_bind(bind),
            shared=shared,
        )
        policy = None if supervision is None else checked_policy(supervision)
        check_units(policy or FailFast(), extent)
        return self._spawning(f"spawn_procs({dict(per_host or extent)})", name, extent, options, policy, on)

    def _checked_extent(
        self, dims: Mapping[str, int] | None, on: Places | None, bind: Bind | None, *, rendezvous: bool
    ) -> Extent:
        """Return the extent of processes on these hosts, all of them together."""
        if self._hosts is not None:
            if bind is not None and on is None:
                raise ValueError(
                    "bind= works on this host only, got the hosts of a job: leave it out there, or use place()"
                )
            if rendezvous:
                raise ValueError(
                    "rendezvous= is for the processes of one host, got the hosts of a job: give each actor the "
                    "variables of its rank, `await actors.join.call(trimesh.per_rank(await trimesh.spmd.env(procs)))`, "
                    "where `join` calls os.environ.update(variables) and init_process_group()"
                )
        if on is not None:
            return _extent_on(on, dims, bind)
        if dims is None:
            raise TypeError("spawn_procs needs the dimensions of the mesh, as in {'gpus': 4}, unless on= is given")
        extent = life.check_per_host(dims)
        return extent if self._hosts is None else self._hosts.extent_of(extent)

    def _spawning(
        self, what: str, name: str, extent: Extent, options: ProcOptions, said: Policy | None, on: Places | None
    ) -> Spawning[ProcMesh]:
        owned, fixed_by, policy = self._owned, "", said or FailFast()
        job = None if self._hosts is None else self._job("spawn_procs")
        if on is not None:
            owned = on.owner_for(owned, job)
        elif job is not None:
            owned = job.owned(owned)
            fixed_by = "its first dimensions are those of its hosts"

        @asynccontextmanager
        async def open_() -> AsyncGenerator[ProcMesh, None]:
            with nullcontext(options) if on is None else on.claimed(name, options) as used:
                async with life.open_procs(name, extent, used, policy, owned) as procs:
                    procs.fix_size(fixed_by)
                    yield ProcMesh(procs, procs.whole)

        async def adopt() -> ProcMesh:
            if owned is None:
                raise RuntimeError(
                    "awaiting spawn_procs() needs a block that owns the processes, and this_host() has none: "
                    "write `async with this_host().spawn_procs(...) as procs:`"
                )
            with nullcontext(options) if on is None else on.claimed(name, options) as used:
                procs = await life.adopt_procs(owned, name, extent, used, policy)
            procs.fix_size(fixed_by)
            return ProcMesh(procs, procs.whole)

        return Spawning(what, open_, adopt)

    def warm(
        self, *, preload: Sequence[str] | None = None, grace: float | None = None, pickle: Pickle | None = None
    ) -> Spawning[HostMesh]:
        """Keep the process that forks workers for all meshes of a block.

        `async with this_host().warm(preload=("torch",)) as host:` imports torch once for all of them.

        Meshes that are awaited on it belong to its block. The arguments are those of `spawn_procs`.

        Raises:
            ValueError: These are the hosts of a job, or an argument is invalid.
        """
        if self._hosts is not None:
            raise ValueError(
                "warm() is for this host, got the hosts of a job, which stay warm until its block is left: "
                "call spawn_procs() on them"
            )
        settings = reread()
        modules = settings.preload if preload is None else checked_preload(preload)
        seconds = settings.grace if grace is None else checked_grace(grace)
        pickled = checked_pickle(pickle)

        @asynccontextmanager
        async def open_() -> AsyncGenerator[HostMesh, None]:
            async with life.open_warm_host(modules, seconds, pickled=pickled) as owned:
                yield HostMesh(owned)

        async def adopt() -> HostMesh:
            raise RuntimeError("warm() must be entered, not awaited: `async with this_host().warm(...) as host:`")

        return Spawning("warm()", open_, adopt)

    async def resources(self) -> ValueMesh[Resources]:
        """Inspect the hosts: CPUs, memory, GPUs, labels, and what placements of this program have taken.

        Only what the agent of a host may use counts: its affinity, the limits of its cgroup, and
        `CUDA_VISIBLE_DEVICES`. GPUs are those of NVML; without it `no_gpus` has the reason.

        Returns:
            One `Resources` for each host: `(await hosts.resources())[0].gpus`.

        Raises:
            MeshErrorGroup: A host was lost.

        Blocking: a checkpoint, cancellable.

        Cost: a process on each host, about 0.1 s.
        """
        from trimesh.actor.placement import placement  # noqa: PLC0415 - few programs place

        job = None if self._hosts is None else self._job("resources")
        return await in_trio(partial(placement.resources, self, job))()

    def place(self, needs: Mapping[str, Need]) -> Spawning[Placement]:
        """Reserve places for processes, all or none: `async with hosts.place({"t": Need(gpus=1)}) as placement:`.

        `hosts.spawn_procs(on=placement["t"])` starts the processes, with the CPUs and `CUDA_VISIBLE_DEVICES` of their
        places, which `context().share` has. A restarted or replaced process has those of the first one. A block that is
        entered owns the reservation, and meshes that are awaited on it; if it is awaited, the block of the job, or of
        the warm host, does.

        What other programs use, and meshes without `on=`, are not accounted.

        Args:
            needs: A `Need` for each name.

        Returns:
            An object to enter or to await; it gives a mapping of the names to places.

        Raises:
            SpawnError: There is no room; the text has what is short, and which placement has it.
            MeshErrorGroup: A host was lost.
            TypeError, ValueError: A need is invalid.

        Blocking: no checkpoint; entering and awaiting are, cancellable.

        Cost: that of `resources`, and a search, for which `limits.PLACEMENT_CHECKS_MAX` is the bound.
        """
        from trimesh.actor.placement import placement  # noqa: PLC0415 - few programs place

        job = None if self._hosts is None else self._job("place")
        chosen = self, self._owned, job, placement.checked_needs(needs)
        opened, adopted = partial(placement.open_placement, *chosen), partial(placement.adopt_placement, *chosen)
        return Spawning(f"place({', '.join(needs)})", opened, adopted)

    def _of_rank(self, rank: int) -> HostMesh:
        """Return one host by its rank among all of the job; this machine is its own."""
        hosts = self._hosts
        return self if hosts is None else self._seen(hosts.part(hosts.whole.slice(hosts=rank)))

    def _on(self, owned: OwnedHost) -> HostMesh:
        return HostMesh(owned, self._hosts)

    async def replace(self, point: Mapping[str, int]) -> None:
        """Replace the host at a point: `await hosts.replace({"hosts": 3})`, or the `.point` of a `HostLost`.

        A spare host of the job takes the place; if none is left, an agent is started on the same machine again. A live
        host, and the processes on it, are lost with the reason `replaced`; `Restart` starts them again, on the new
        host. A lost host needs no call: starting a process there replaces it.

        Raises:
            SpawnError: The job has no host for it, or the host could not be started.
            ShapeError: The point is not that of one host.
            ValueError: This is not the mesh of a job.

        Blocking: a checkpoint, cancellable; at most `limits.HOST_JOIN_SECONDS`.
        """
        await in_trio(partial(self._job("replace").replace, point))()

    async def grow(self, count: int) -> HostMesh:
        """Add hosts: `hosts = await hosts.grow(2)`; the new ones are `hosts.slice(hosts=slice(-2, None))`.

        New hosts follow the existing ones; spawns on the returned mesh use them. Running meshes of processes, and this
        handle, stay as they are. A `LocalJob` starts more agents, an `SSHJob` takes its spares, a `KubernetesJob`
        makes more pods, a `SlurmJob` takes unused nodes of its allocation, and an open door waits for as many to join.

        Args:
            count: Number of hosts to add.

        Returns:
            All hosts of the job. Named parts keep the hosts that they had.

        Raises:
            SpawnError: The job has no more hosts; the text has the remedy.
            MeshErrorGroup: A host could not be added; contains its last output. The others are released.
            ValueError: `count` is not a number of hosts, or too large; or this is only a part of a job's hosts, or
                `this_host()`.

        Blocking: a checkpoint, cancellable, for as long as a scheduler queues the request; a cancel withdraws it and
        leaves the job unchanged. A second call waits for the first.
        """
        hosts, owned = self._job("grow"), self._owned
        assert owned is not None

        async def grow() -> JobHosts:
            with owned.block.entering():
                return await hosts.grow(count)
            raise AssertionError("entering() has raised")

        return HostMesh(owned, await in_trio(grow)())

    async def wait_notice(self) -> str:
        """Wait for the notice that the hosts of the job will end soon; return the reason: `await hosts.wait_notice()`.

        Save state then; the program may go on. When only the grace of the block is left of the time limit, the block
        is cancelled, and raises a `HostLost` with the reason "time limit". Only a `SlurmJob` with a time limit and a
        kept job give notice; otherwise this waits for ever.

        Blocking: a checkpoint, cancellable. A caller that comes after the notice gets it at once.
        """
        notice = None if self._hosts is None else self._job("wait_notice").notice
        return await in_trio(_wait_for_ever if notice is None else notice.wait)()

    async def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        output: Callable[[OutputLine], object] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        check: bool = False,
        grace: float | None = None,
    ) -> ValueMesh[int]:
        """Run a command on each host: `await hosts.run(["nvidia-smi", "-L"], output=print)`.

        A process is started on each host to run it, with the environment of the host and an empty standard input.
        Nothing that the command starts outlives the call.

        Args:
            command: Program and arguments. No shell reads them: write `["sh", "-c", "..."]` for one.
            output: Function called in the task of the caller with each line of standard output and standard error, an
                `OutputLine` with the coordinates of its host. While it is slow, the command waits in its writes;
                nothing is lost. None discards the lines.
            env: Environment variables set over those of each host.
            cwd: Working directory; by default that of this program, or, where a host has no folder of that name, that
                of its agent.
            check: Raise if the command exits with another code than 0 on a host, and end it on the others.
            grace: Seconds from SIGTERM to SIGKILL, for its process group, when the call is cancelled; None takes the
                setting.

        Returns:
            Exit codes, over these hosts; a negative one is the number of the signal that ended the command.

        Raises:
            MeshErrorGroup: With the coordinates of hosts: an `OSError` where the command could not be started, a
                `subprocess.CalledProcessError` where it failed (`check=True`), a `HostLost`.
            TypeError, ValueError: An argument is wrong; nothing was started.
            Exception: Error of `output`; the commands have ended.

        Blocking: a checkpoint, cancellable; a cancel returns when the commands have ended, at most about `grace` later.

        Cost: a process on each host, a fork of its spawner: about 0.1 s.
        """
        work = partial(on_hosts.run, self, command, output=output, env=env, cwd=cwd, check=check, grace=grace)
        return await in_trio(work)()

    async def shell(
        self,
        command: Sequence[str | os.PathLike[str]] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        terminal: str | os.PathLike[str] | None = None,
    ) -> int:
        """Run a shell on one host, at this terminal: `await hosts.slice(hosts=0).shell()`.

        Keys, Ctrl-C included, go to the host unchanged; the terminal there follows the size of this one. Bytes travel
        over the links of the mesh, without sshd. Leave it by `exit` or Ctrl-D.

        Args:
            command: Program and arguments, as `["htop"]`; None for the shell of the user there.
            env: Environment variables set over those of the host; `TERM` is that of this program.
            cwd: Working directory; None for the home of the user.
            terminal: File name of a terminal of this machine; None for that of standard input.

        Returns:
            Exit code of the shell; a negative one is the number of the signal that ended it.

        Raises:
            ValueError: These are several hosts, or standard input is no terminal.
            OSError: The terminal cannot be opened; or the shell cannot be started, with the host's coordinates.
            HostLost: The host was lost, in a `MeshErrorGroup`.

        Blocking: a checkpoint, cancellable; a cancel hangs up, and restores the terminal.

        Cost: a process on the host; a message a key.
        """
        work = partial(on_hosts.shell, self, command, env=env, cwd=cwd, terminal=terminal)
        return await in_trio(work)()

    def forward(self, *, local: int = 0, remote: int | str) -> Spawning[Forwarding]:
        """Forward a port of this machine to one of a host: `async with hosts.slice(hosts=0).forward(remote=8888):`.

        For each connection to the local port the host connects to the service; bytes travel over the links of the
        mesh. Each direction ends by itself and has back-pressure. If the host cannot connect, the connection is reset,
        and `failures` has the reason. Leaving the block resets open connections.

        Args:
            local: Port on 127.0.0.1 of this machine; 0 lets the system choose one, which `as forwarded` has as `.port`.
            remote: Port of the host's 127.0.0.1, or `"name:port"` as the host resolves it.

        Raises:
            ValueError: On entering: these are several hosts, or a port is invalid.
            OSError: On entering, in a `MeshErrorGroup`: the local port cannot be opened.
            MeshErrorGroup: The host was lost.

        Blocking: no checkpoint; entering and leaving are.
        """

        async def adopt() -> Forwarding:
            raise RuntimeError("forward() must be entered, not awaited: `async with host.forward(...) as forwarded:`")

        return Spawning(f"forward(remote={remote!r})", lambda: on_hosts.forward(self, local, remote), adopt)

    def sync(
        self, *paths: str | os.PathLike[str], watch: bool = False, exclude: Sequence[str] = ()
    ) -> Spawning[CodeSync]:
        """Copy code to the hosts: `async with hosts.sync("src", "configs"):`.

        Processes spawned on these hosts while the block is open import from the copy first: the given folders, and
        the folders of given files, begin their `sys.path`, before packages installed there.
        `trimesh.jobs.synced("configs/small.yaml")` is the path of a file there. A host caches contents in
        `~/.cache/trimesh/code`; what any job has copied before is not sent again.

        Args:
            paths: Files and folders. Those below the working directory keep their relative path, others only their last
                name. In a repository, files that git ignores are left out, as are `.git` and `__pycache__`. Symbolic
                links stay links.
            watch: Copy each change while the block is open, as a new version, for processes spawned after it.
            exclude: Patterns of names to leave out, as `["*.pt", "runs"]`.

        Returns:
            A context manager; `as synced` has `.version`, and `await synced.update()` copies changes.

        Raises:
            TypeError, ValueError: On entering, also in a `MeshErrorGroup`: a path does not exist; two have one name;
                they exceed `limits.CODE_BYTES_MAX` or `limits.CODE_FILES_MAX`; this is no host of a job.
            RuntimeError: On entering: another open block has copied code to one of these hosts.
            MeshErrorGroup: A host was lost, or cannot write the files.

        Blocking: no checkpoint; entering and leaving are.

        Cost: a process on each host; there a hard link for each file and version; each new content is sent once to
        each host.
        """

        async def adopt() -> CodeSync:
            raise RuntimeError("sync() must be entered, not awaited: write `async with hosts.sync(...) as synced:`")

        job = None if self._hosts is None else self._job("sync")
        opened = partial(on_hosts.sync, self, job, paths, exclude, watch=watch)
        return Spawning(f"sync({', '.join(map(repr, paths))})", opened, adopt)

    def install(self, file: str | os.PathLike[str]) -> Spawning[Installation]:
        """Install packages on the hosts: `async with hosts.install("requirements.txt"):`, or `"uv.lock"`.

        Processes spawned on these hosts while the block is open import from there first, before packages of the host;
        commands find their programs. A host makes one environment for each content of the file, in
        `~/.cache/trimesh/environments`, for all jobs of its user: with uv if it is there, else with venv and pip, in
        their configuration on that host. It is removed when unused for `limits.ENVIRONMENT_KEPT_SECONDS`.

        Args:
            file: Requirements in pip's format, with files included by `-r` and `-c`; or a `uv.lock` beside its
                `pyproject.toml`: all its packages except the project itself, which `sync` copies.

        Returns:
            A context manager; `as installed` has `.made`, the number of hosts that had to make the environment.

        Raises:
            OSError, ValueError: On entering: the file cannot be read, or names files that are only on this machine.
            RuntimeError: On entering: another open block has installed packages on one of these hosts.
            MeshErrorGroup: On entering: a host could not make it, a `SpawnError` with the last output of uv or pip and
                the coordinates of the host; or a host was lost.

        Blocking: no checkpoint; entering and leaving are. A cancel stops an installation and removes it.

        Cost: a process on each host; the first time uv's or pip's own time, seconds to minutes.
        """

        async def adopt() -> Installation:
            raise RuntimeError("install() must be entered, not awaited: `async with hosts.install(...) as installed:`")

        job = None if self._hosts is None else self._job("install")
        opened = partial(on_hosts.install, self, job, file)
        return Spawning(f"install({os.fspath(file)!r})", opened, adopt)

    def __repr__(self) -> str:
        if self._hosts is not None:
            return f"<hosts {', '.join(self.names)}>"
        return "<this host>" if self._owned is None else "<this host, warm>"

    def _repr_html_(self) -> str:
        """Return a drawing for notebooks: the hosts, and which of them are lost."""
        region = Region(Extent()) if self._hosts is None else self._hosts.region
        lost = self._hosts.lost if isinstance(self._hosts, life.JobHosts) else frozenset[int]()
        texts = [
            f"{'lost' if rank in lost else 'live'} on {name}"
            for rank, name in zip(region.ranks(), self.names, strict=True)
        ]
        return drawing_of("this host" if self._hosts is None else f"hosts{dict(self.extent)}", "hosts", region, texts)


class _HostsReference(HostMesh):
    """Shared hosts of a job that another process opened."""

    def __init__(self, info: HostsInfo, region: Region) -> None:
        super().__init__(None, life.ReferredHosts(info.whole, region, info.parts, info))
        self._info = info
        self._region = region

    def _sent(self) -> tuple[HostsInfo, Region]:
        return self._info, self._region

    def _job(self, verb: str) -> JobHosts:
        raise RuntimeError(
            f"{self!r} came from another process, so it is only a reference: call {verb} in the program that opened "
            "the job"
        )

    def _seen(self, hosts: ShownHosts) -> HostMesh:
        return _HostsReference(self._info, hosts.region)

    def _spawning(
        self, what: str, name: str, extent: Extent, options: ProcOptions, said: Policy | None, on: Places | None
    ) -> Spawning[ProcMesh]:
        if on is not None:
            self._job("spawn_procs(on=...)")
        plan = life.HostsPlan(self._info, self._region, name, extent, options, said)

        @asynccontextmanager
        async def open_() -> AsyncGenerator[ProcMesh, None]:
            async with life.open_borrowed_procs(plan) as borrowed:
                yield borrowed_procs(borrowed)

        async def adopt() -> ProcMesh:
            raise RuntimeError(
                f"{self!r} belongs to another process, whose block cannot adopt processes of this one: write "
                "`async with hosts.spawn_procs(...) as procs:`"
            )

        return Spawning(what, open_, adopt)


def refer_hosts(info: HostsInfo, region: Region) -> HostMesh:
    """Return a reference to shared hosts of another process."""
    return _HostsReference(info, region)


def _take_hosts_apart(hosts: HostMesh, _: Sink) -> tuple[Any, ...]:
    info, region = hosts.__reduce_ex__(2)[1]
    return region, *(getattr(info, field) for field in info.__struct_fields__)


def _put_hosts_together(_: DecodeSource, region: Any, *fields: Any) -> HostMesh:
    info = mesh_kinds.put_hosts_info_together(*fields)
    if not isinstance(region, Region) or not set(region.ranks()) <= set(info.whole.ranks()):
        raise ProtocolError("a handle on hosts must be a view of them")
    return refer_hosts(info, region)


register_kind(ValueKind("hosts", HostMesh, _take_hosts_apart, _put_hosts_together))


def this_host() -> HostMesh:
    """Return the machine that this program runs on; starts nothing, and works outside of `trio.run`."""
    return HostMesh()


def this_proc() -> ProcMesh:
    """Return this process as a mesh of one member; starts nothing, and works outside of `trio.run`.

    Its actors run here, under the block that spawns them; their arguments are copied as everywhere.
    """
    return ProcMesh(None, None)


async def _wait_for_ever() -> str:
    await trio.sleep_forever()
    raise AssertionError("unreachable")


def _extent_on(on: Any, dims: Mapping[str, int] | None, bind: Bind | None) -> Extent:
    """Return the extent of processes on reserved places.

    Raises:
        TypeError: `on` is something else.
        ValueError: `bind` is given, too.
        ShapeError: The dimensions do not fit the places.
    """
    from trimesh.actor.placement.placement import Places  # noqa: PLC0415 - few programs place

    if not isinstance(on, Places):
        raise TypeError(
            f'on= takes places of a placement, got {on!r:.200}: write on=placement["name"] with one of its names'
        )
    if bind is not None:
        raise ValueError("bind= must be left out with on=, whose places have CPUs: write cpus= in the Need")
    return on.extent_for(dims)


def _checked_output(output: Any) -> Any:
    return output if callable(output) else checked_output(output)


# ---- device mesh -----------------------------------------------------------------------------------------------------

# `DeviceMesh`: a mesh of processes for tensors in one constructor. `heal`: replaces its ended processes.

_FOR_TENSORS: Final = ("torch", "torch.distributed.tensor")


class DeviceMesh(Spawning[ProcMesh]):
    """Processes for tensors: `async with trimesh.DeviceMesh({"gpus": 4}) as mesh:` owns them, and is a `ProcMesh`.

    It is `this_host().spawn_procs(...)` with torch preloaded; that method has more options.

    Args:
        extent: Dimensions of the mesh: label to size.
        name: Name of the mesh, for messages and errors.
        hosts: Hosts on which the processes start, each with this extent; None for this machine.
        preload: Modules imported once, before the processes are forked.
        supervision: Policy for the end of a process; see `spawn_procs`. `heal` needs `Isolate()` or `Restart(...)`.

    Raises:
        ShapeError: The extent is invalid.
        MeshErrorGroup: On entering, a process could not be started, or a module of `preload` is missing.

    Example:
        >>> async with trimesh.DeviceMesh({"dp": 2, "tp": 2}) as mesh:
        ...     w = trimesh.distribute(torch.randn(8, 4), mesh, sharding_spec={"tp": 1})
    """

    def __init__(
        self,
        extent: Mapping[str, int],
        *,
        name: str = "mesh",
        hosts: HostMesh | None = None,
        preload: Sequence[str] = _FOR_TENSORS,
        supervision: Policy | None = None,
    ) -> None:
        host = this_host() if hosts is None else hosts
        spawning = host.spawn_procs(extent, name=name, preload=preload, supervision=supervision)
        spawning._use()  # noqa: SLF001 - this object starts it
        super().__init__(f"DeviceMesh({dict(extent)})", spawning._open, spawning._adopt)  # noqa: SLF001


async def heal(mesh: ProcMesh) -> ProcMesh:
    """Replace the ended processes of a view by new ones, with the actors that lived there.

    Handles address the new ones from then on. Tensors on dead processes are lost, and raise `ProcDied` when used: make
    them again from the last state that you saved.

    Args:
        mesh: Processes that a block of this process owns, or a view of them. Restarts under way are awaited first.

    Returns:
        The same view.

    Raises:
        MeshErrorGroup: A process could not be started; then none of the new ones lives.
        TypeError: `mesh` is no mesh of processes.
        RuntimeError: `mesh` is a reference, `this_proc()`, or a `FailFast` mesh.

    Blocking: a checkpoint, cancellable; see `ProcMesh.replace`.

    Example:
        >>> try:
        ...     loss = await trimesh.fetch(step(batch))
        ... except trimesh.DeviceMeshError:
        ...     await trimesh.heal(mesh)
    """
    if not isinstance(mesh, ProcMesh):
        raise TypeError(f"heal takes a mesh of processes, got {mesh!r}: actors come back with their processes")
    await mesh.settled()
    living = set(mesh.alive().points())
    await mesh.replace([point for point in mesh.points() if point not in living])
    return mesh
