"""`this_host()` and `this_proc()`, and the meshes of processes that start there, without `await`."""

from __future__ import annotations

import builtins
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimesh._runtime.system import Bind
from trimesh._supervision.policy import Policy
from trimesh.actor import host_mesh
from trimesh.actor.host_mesh import Output
from trimesh.actor.procs.host_services import Forwarded, Installed
from trimesh.actor.procs.host_services import Synced as AsyncSynced
from trimesh.actor.spawning import Env, Pickle
from trimesh.blocking.body import AnyBody
from trimesh.blocking.proc_mesh import ProcMesh
from trimesh.blocking.spawning import Spawning
from trimesh.blocking.work import wait
from trimesh.shape.extent import Extent
from trimesh.shape.point import Point
from trimesh.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from trimesh.shape.output_line import OutputLine


class Synced:
    """Code of the program on hosts, while its block is open; see `trimesh.HostMesh.sync`."""

    def __init__(self, inner: AsyncSynced, home: AnyBody | None = None) -> None:
        self._inner = inner
        self._home = home

    @property
    def version(self) -> int:
        """How often it has changed there: 1 when the block is entered."""
        return self._inner.version

    @property
    def digest(self) -> str:
        """Of names and contents."""
        return self._inner.digest

    @property
    def files(self) -> int:
        """How many there are."""
        return self._inner.files

    @property
    def sent_bytes(self) -> int:
        """Of contents, sent for this version."""
        return self._inner.sent_bytes

    def update(self) -> bool:
        """Bring what has changed since; return whether anything had. Waits until it is there."""
        return wait(self._inner.update, self._home)

    def __repr__(self) -> str:
        return repr(self._inner)


class HostMesh:
    """The machine that this program runs on, or the hosts of a job; see `trimesh.HostMesh`."""

    def __init__(self, inner: host_mesh.HostMesh, home: AnyBody | None = None) -> None:
        self._inner = inner
        self._home = home

    @property
    def extent(self) -> Extent:
        """Labels and sizes: empty for this machine, `{"hosts": n}` for a job."""
        return self._inner.extent

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts, in order."""
        return self._inner.names

    def __len__(self) -> int:
        return len(self._inner)

    def slice(self, **selection: int | builtins.slice) -> HostMesh:
        """Return a part of the hosts; see `trimesh.HostMesh.slice`."""
        return HostMesh(self._inner.slice(**selection), self._home)

    def __getitem__(self, name: str) -> HostMesh:
        """Return the hosts that the job has given a name; see `trimesh.HostMesh.__getitem__`."""
        return HostMesh(self._inner[name], self._home)

    def spawn_procs(
        self,
        per_host: Mapping[str, int],
        *,
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
        """Start processes: `with this_host().spawn_procs({"gpus": 4}) as procs:`, or `.open()`.

        See `trimesh.HostMesh.spawn_procs`. On a warm host `.adopt()` gives them to the host's block.
        """
        make = functools.partial(
            self._inner.spawn_procs,
            per_host,
            name=name,
            preload=preload,
            env=env,
            setup=setup,
            python=python,
            grace=grace,
            output=output,
            supervision=supervision,
            pickle=pickle,
            seed=seed,
            rendezvous=rendezvous,
            bind=bind,
            shared=shared,
        )
        return Spawning(f"spawn_procs({dict(per_host)})", make, ProcMesh, self._home)

    def warm(
        self, *, preload: Sequence[str] | None = None, grace: float | None = None, pickle: Pickle | None = None
    ) -> Spawning[HostMesh]:
        """Keep the process that forks workers for many meshes; see `trimesh.HostMesh.warm`."""
        make = functools.partial(self._inner.warm, preload=preload, grace=grace, pickle=pickle)
        return Spawning("warm()", make, HostMesh, self._home)

    def replace(self, point: Mapping[str, int]) -> None:
        """Have another host at a place; see `trimesh.HostMesh.replace`."""
        wait(functools.partial(self._inner.replace, point), self._home)

    def grow(self, count: int) -> HostMesh:
        """Have more hosts, and return all of the job; see `trimesh.HostMesh.grow`."""
        return HostMesh(wait(functools.partial(self._inner.grow, count), self._home), self._home)

    def wait_notice(self) -> str:
        """Wait until the job says that its hosts are about to end; see `trimesh.HostMesh.wait_notice`."""
        return wait(self._inner.wait_notice, self._home)

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        output: Callable[[OutputLine], object] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        check: bool = False,
        grace: float | None = None,
    ) -> ValueMesh[int]:
        """Run a command on each host: `hosts.run(["nvidia-smi", "-L"], output=print)`.

        See `trimesh.HostMesh.run`. `output` is called in the thread of Trio, which must not wait.
        """
        work = functools.partial(self._inner.run, command, output=output, env=env, cwd=cwd, check=check, grace=grace)
        return wait(work, self._home)

    def shell(
        self,
        command: Sequence[str | os.PathLike[str]] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        terminal: str | os.PathLike[str] | None = None,
    ) -> int:
        """Run a shell on one host, at this terminal; see `trimesh.HostMesh.shell`. Its size stays as it is."""
        return wait(functools.partial(self._inner.shell, command, env=env, cwd=cwd, terminal=terminal), self._home)

    def forward(self, *, local: int = 0, remote: int | str) -> Spawning[Forwarded]:
        """Let a port of this machine lead to one of a host: `with hosts.slice(hosts=0).forward(remote=8888):`.

        See `trimesh.HostMesh.forward`.
        """
        make = functools.partial(self._inner.forward, local=local, remote=remote)
        return Spawning(f"forward(remote={remote!r})", make, lambda forwarded, _: forwarded, self._home)

    def sync(
        self, *paths: str | os.PathLike[str], watch: bool = False, exclude: Sequence[str] = ()
    ) -> Spawning[Synced]:
        """Bring code to the hosts: `with hosts.sync("src", "configs"):`. See `trimesh.HostMesh.sync`."""
        make = functools.partial(self._inner.sync, *paths, watch=watch, exclude=exclude)
        return Spawning(f"sync({', '.join(map(repr, paths))})", make, Synced, self._home)

    def install(self, file: str | os.PathLike[str]) -> Spawning[Installed]:
        """Install packages on the hosts: `with hosts.install("uv.lock"):`. See `trimesh.HostMesh.install`."""
        make = functools.partial(self._inner.install, file)
        return Spawning(f"install({os.fspath(file)!r})", make, lambda installed, _: installed, self._home)

    def points(self) -> Iterator[Point]:
        """Yield the coordinates of the hosts, in this view of them."""
        return self._inner.points()

    def close(self) -> None:
        """End a warm host that was opened; see `ProcMesh.close`."""
        if self._home is None or self._home.owns is not self._inner:
            raise RuntimeError(f"{self!r} has no block of its own: close what it belongs to, or shows a part of")
        self._home.close()

    def __repr__(self) -> str:
        return repr(self._inner)


def this_host() -> HostMesh:
    """Return the machine that this program runs on; starts nothing."""
    return HostMesh(host_mesh.this_host())


def this_proc() -> ProcMesh:
    """Return this process as a mesh of one member; its actors run in the thread of Trio."""
    return ProcMesh(host_mesh.this_proc())
