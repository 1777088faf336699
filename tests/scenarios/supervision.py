"""What follows from a failure: policy, units, supervisor, as the owner of a mesh puts them together.

    spawn procs replica=2 gpus=2 under Restart("one_for_one", along="replica")
    spawn actors on procs under Restart(on=(ActorFailed,))
    dies procs 1 signal=9       a process has ended (or code=0); its rank is 1
    fails actors 1 why          an actor has failed, and lives;  ends actors 1   it has ended by itself
    silent procs 1              it has not acknowledged a cancel
    down procs 1                nothing of the round of rank 1 lives any more: it rests
    wait 2.5                    so much time passes; rounds that have rested start their members
    up procs 1                  every member of the round serves;  start-fails procs 1   it could not be started
    stop procs                  its block is being left

Who calls the machine in earnest: `_runtime/meshes/proc_members.py`, `actor_members.py` and `restarts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from tests.scenarios.script import Command, Scene

from trimesh import errors
from trimesh._supervision.policy import (
    Backoff,
    Ending,
    FailFast,
    Isolate,
    MemberFailure,
    MeshState,
    Policy,
    Restart,
    Verdict,
    check_units,
    decide,
    ending_of,
    judge,
    units_of,
)
from trimesh._supervision.supervisor import Begin, Decision, GiveUp, Round, Supervisor
from trimesh.errors import ActorFailed, ProcDied, Unresponsive
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region

VOCABULARY = {
    "Backoff": Backoff,
    "FailFast": FailFast,
    "Isolate": Isolate,
    "Restart": Restart,
    **{name: getattr(errors, name) for name in ("ActorFailed", "HostLost", "LinkLost", "ProcDied", "Unresponsive")},
}


def shown(ranks: object) -> str:
    return ",".join(map(str, ranks)) or "none"  # type: ignore[call-overload]


@attrs.define(eq=False)
class Mesh:
    """A mesh of processes, or of actors on one."""

    name: str
    extent: Extent
    policy: Policy
    below: Mesh | None = None
    supervisor: Supervisor | None = None
    is_stopping: bool = False
    rests: dict[Round, float] = attrs.field(factory=dict[Round, float])
    above: list[Mesh] = attrs.field(factory=list)

    def decide(self, rank: int, failure: MemberFailure) -> Verdict:
        supervisor = self.supervisor
        state = MeshState() if supervisor is None else supervisor.state(rank, is_stopping=self.is_stopping)
        return decide(failure, self.policy, state).verdict


class SupervisionScene(Scene):
    """Meshes and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meshes: dict[str, Mesh] = {}

    # ---- set-up ----

    def spawn(self, command: Command) -> Iterator[str]:
        name = command.words[0]
        sizes, _, policy_text = command.text.partition(" under ")
        policy: Policy = eval(policy_text, VOCABULARY)
        below = self.meshes[command.words[2]] if command.words[1] == "on" else None
        pairs = [word.partition("=") for word in sizes.split() if "=" in word]
        extent = below.extent if below is not None else Extent({label: int(size) for label, _, size in pairs})
        check_units(policy, extent)
        mesh = self.meshes[name] = Mesh(name, extent, policy, below)
        if below is not None:
            below.above.append(mesh)
        if not isinstance(policy, Restart):
            yield f"{name}: ranks {shown(range(len(Region(extent))))}, nothing is restarted"
            return
        units = units_of(Region(extent), policy.along)
        mesh.supervisor = Supervisor(name, policy, units)
        yield f"{name}: units {' | '.join(map(shown, units))}"

    def _at(self, command: Command) -> tuple[Mesh, int]:
        return self.meshes[command.words[0]], int(command.words[1])

    # ---- failures ----

    def dies(self, command: Command) -> Iterator[str]:
        mesh, rank = self._at(command)
        code, signal = (int(command.options[key]) if key in command.options else None for key in ("code", "signal"))
        how = f"code {code}" if signal is None else f"signal {signal}"
        error = ProcDied(how, exit_code=code, signal=signal)
        yield from self._take(mesh, rank, error, MemberFailure(ProcDied, ending_of(code, signal)))

    def fails(self, command: Command) -> Iterator[str]:
        mesh, rank = self._at(command)
        failure = MemberFailure(ActorFailed, has_ended=False, of="actor")
        yield from self._take(mesh, rank, KeyError(command.words[2]), failure)

    def breaks(self, command: Command) -> Iterator[str]:
        mesh, rank = self._at(command)
        yield from self._take(mesh, rank, KeyError(command.words[2]), MemberFailure(ActorFailed, of="actor"))

    def ends(self, command: Command) -> Iterator[str]:
        mesh, rank = self._at(command)
        failure = MemberFailure(ActorFailed, Ending.CANCELLED, of="actor")
        yield from self._take(mesh, rank, ActorFailed("ended by itself"), failure)

    def silent(self, command: Command) -> Iterator[str]:
        mesh, rank = self._at(command)
        if judge(MemberFailure(Unresponsive, has_ended=False), mesh.policy) is Verdict.NOTE:
            yield f"{mesh.name} {rank}: Unresponsive, error: note"
        else:
            error = Unresponsive("no acknowledgement")
            yield from self._take(mesh, rank, error, MemberFailure(Unresponsive, has_ended=False, of="handed up"))

    def _take(self, mesh: Mesh, rank: int, error: Exception, failure: MemberFailure) -> Iterator[str]:
        verdict = mesh.decide(rank, failure)
        yield f"{mesh.name} {rank}: {failure.kind.__name__}, {failure.ending.value}: {verdict.value}"
        yield from self._do(mesh, rank, error, verdict, repr(error))

    def _do(self, mesh: Mesh, rank: int, error: Exception, verdict: Verdict, text: str) -> Iterator[str]:
        if verdict is Verdict.RESTART:
            assert mesh.supervisor is not None
            yield from self._act(mesh, mesh.supervisor.failed(rank, error, self.now), [rank])
        elif verdict is Verdict.FAIL:
            yield f"the block of {mesh.name} fails: {text}"

    def _act(self, mesh: Mesh, decision: Decision, ranks: list[int]) -> Iterator[str]:
        match decision:
            case Begin(round=begun, replaced=replaced):
                for other in replaced:
                    self.meshes[mesh.name].rests.pop(other, None)
                    yield f"  {mesh.name}: takes the place of the round of {shown(other.ranks)}"
                dead = f" ({shown(sorted(begun.failed))} failed)" if begun.failed else ""
                yield f"  {mesh.name}: takes down {shown(begun.ranks)}{dead}, then rests {begun.delay:g} s"
                for above in mesh.above:
                    for rank in begun.ranks:
                        if above.supervisor is not None:
                            above.supervisor.leave(rank)
            case GiveUp(error=error):
                yield f"  {mesh.name}: {error}"
                yield from (f"    cause: {cause!r}" for cause in error.causes)
                yield from self._gave_up(mesh, ranks, error)
            case None:
                yield f"  {mesh.name}: part of what is being healed"

    def _gave_up(self, mesh: Mesh, ranks: list[int], error: Exception) -> Iterator[str]:
        if mesh.below is None or mesh.supervisor is None:
            yield f"the block of {mesh.name} fails: {type(error).__name__}"
            return
        mesh.supervisor.resume()
        for rank in ranks:
            mesh.supervisor.leave(rank)
            yield f"  {mesh.name} {rank}: the policy of {mesh.below.name} takes over"
            failure = MemberFailure(type(error), has_ended=False, of="handed up")
            verdict = mesh.below.decide(rank, failure)
            yield from self._do(mesh.below, rank, error, verdict, type(error).__name__)

    # ---- rounds ----

    def _round(self, command: Command) -> tuple[Mesh, Supervisor, Round]:
        mesh, rank = self._at(command)
        assert mesh.supervisor is not None
        round_ = mesh.supervisor.round_of(rank)
        assert round_ is not None, f"rank {rank} is in no round"
        return mesh, mesh.supervisor, round_

    def down(self, command: Command) -> str:
        mesh, supervisor, round_ = self._round(command)
        mesh.rests[round_] = self.now + supervisor.is_down(round_)
        return f"{mesh.name}: {shown(round_.ranks)} rest until t={mesh.rests[round_]:g}"

    def wait(self, command: Command) -> Iterator[str]:
        self.now += float(command.words[0])
        for mesh in self.meshes.values():
            for round_, until in sorted(mesh.rests.items(), key=lambda entry: entry[1]):
                if until <= self.now:
                    del mesh.rests[round_]
                    if mesh.supervisor is not None and round_ in mesh.supervisor.rounds:
                        mesh.supervisor.rested(round_)
                        yield f"t={until:g} {mesh.name}: starts {shown(round_.ranks)}"
        yield f"t={self.now:g}"

    def up(self, command: Command) -> str:
        mesh, supervisor, round_ = self._round(command)
        supervisor.started(round_)
        return f"{mesh.name}: {shown(round_.ranks)} serve"

    def start_fails(self, command: Command) -> Iterator[str]:
        mesh, supervisor, round_ = self._round(command)
        ranks = list(round_.ranks)
        yield f"{mesh.name}: {shown(ranks)} could not be started"
        yield from self._act(mesh, supervisor.start_failed(round_, KeyError(command.words[2]), self.now), ranks)

    def stop(self, command: Command) -> str:
        mesh = self.meshes[command.words[0]]
        assert mesh.supervisor is not None
        under_way = [shown(round_.ranks) for round_ in mesh.supervisor.rounds]
        mesh.supervisor.stop()
        mesh.is_stopping = True
        mesh.rests.clear()
        return f"{mesh.name}: stops{', with the rounds of ' + ' | '.join(under_way) if under_way else ''}"

    def rounds(self, command: Command) -> Iterator[str]:
        mesh = self.meshes[command.words[0]]
        assert mesh.supervisor is not None
        for round_ in mesh.supervisor.rounds:
            yield f"{mesh.name}: {shown(round_.ranks)} {round_.phase.value}"
        if not mesh.supervisor.rounds:
            yield f"{mesh.name}: no rounds"
