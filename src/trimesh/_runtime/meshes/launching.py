"""What each process of one mesh is started with, the first and every later time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimesh._runtime.meshes.rendezvous import Rendezvous
from trimesh._runtime.peers.host import LaunchRequest
from trimesh._runtime.spawner.proc_options import ProcOptions
from trimesh.config import from_environment
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.meshes.member import Member, OwningProc


class Launching:
    """Makes the requests for the processes of one mesh, and holds what they need for as long as it lives."""

    def __init__(self, proc: OwningProc, name: str, whole: Region, options: ProcOptions) -> None:
        self._proc = proc
        self._name = name
        self._whole = whole
        self._options = options
        self._seed = proc.new_id() if options.seed is None else options.seed
        self._rendezvous: Rendezvous | None = None

    def request(self, member: Member) -> LaunchRequest:
        """Return what starts a member; runs the functions that the user has given for its point."""
        point = self._whole.point(member.rank)
        options = self._options
        env = dict((options.env(point) if callable(options.env) else options.env) or {})
        if options.rendezvous and not self._proc.is_simulated:
            self._rendezvous = self._rendezvous or Rendezvous()
            env = {**self._rendezvous.environment(member.rank, len(self._whole)), **env}
        settings = from_environment(options.settings, env)
        recorder = self._proc.recorder
        folder = "" if recorder is None or settings.record == "off" else str(recorder.path.parent)
        member.record = f"{folder}/{member.peer.proc_id:x}" if folder else ""
        output = options.output(point) if callable(options.output) else options.output
        return LaunchRequest(
            proc_id=member.peer.proc_id,
            mesh=self._name,
            whole=self._whole,
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

    def close(self) -> None:
        """Let go of the port at which processes have met."""
        if self._rendezvous is not None:
            self._rendezvous.close()
