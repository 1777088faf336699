"""`profile`: what the controller has issued and what the ranks have done, as one trace.

PY-1 While nothing is profiled, nothing of this is on the way of an operation: teams change their class for as long as
     they are looked at.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from trimesh import limits
from trimesh._runtime.tasks import in_trio
from trimesh._transport.native.carriers import boot_id
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import place_name
from trimesh.tensor.controller import shapes
from trimesh.tensor.controller.engine import Engine, answers
from trimesh.tensor.controller.team import Team, call_kernel, issuing_line
from trimesh.tensor.controller.trace import named, shown, span, trace_bytes, track
from trimesh.tensor.session.opening import team_of

if TYPE_CHECKING:
    from trimesh.tensor.controller.shapes import Line, Plan


_PINGS: Final = 3
"""Questions by which the clock of another machine is found: the one that was answered fastest counts."""

_PROFILED: Final[dict[int, Profile]] = {}
"""What takes the commands of an engine that is looked at, by its identity."""


class _ProfiledTeam(Team):
    """A team whose commands are looked at."""

    __slots__ = ()

    def emit(self, plan: Plan, operands: Sequence[Any], outputs: int) -> int:
        number, begun = self.issued, time.monotonic_ns()
        first = super().emit(plan, operands, outputs)
        _PROFILED[id(self.engine)].issued(self, number, plan.name, begun)
        return first

    def emit_words(self, *words: Any) -> None:
        """Add a command that is no operation; see `Team.emit_words`."""
        number, begun = self.issued, time.monotonic_ns()
        super().emit_words(*words)
        _PROFILED[id(self.engine)].issued(self, number, "recorded", begun)


@attrs.define(eq=False)
class Profile:
    """What a mesh of tensors has done in a block of `profile`; `write` makes a file of it, when the block has ended.

    Attributes:
        missing: Events beyond `limits.TENSOR_PROFILE_EVENTS_MAX` of some process, which are not in it.
        uncertainty_seconds: By which clocks may differ: 0 between processes of one machine, half of the fastest answer
            of another one.
        own_joining: What the engine calls with new teams by itself.
    """

    missing: int = 0
    uncertainty_seconds: float = 0.0
    own_joining: Callable[[Team], None] | None = None
    _name: str = ""
    _begun: int = 0
    _lines: dict[tuple[int, int], tuple[str, Line, int, int]] = attrs.field(factory=dict)
    _ranks: list[tuple[str, list[str], list[list[int]], int]] = attrs.field(factory=list)

    def issued(self, team: Team, number: int, name: str, begun: int) -> None:
        """Take a command that the controller has issued."""
        if len(self._lines) >= limits.TENSOR_PROFILE_EVENTS_MAX:
            self.missing += 1
            return
        self._lines[team.number, number] = (name, issuing_line(), begun, time.monotonic_ns() - begun)

    def done(self, name: str, names: list[str], rows: list[list[int]], missing: int, offset: int) -> None:
        """Take what a rank has done; its clock is ahead of the one here by `offset` nanoseconds."""
        self.missing += missing
        self._ranks.append((name, names, rows, offset))

    def write(self, path: Path | str) -> None:
        """Write a trace that Perfetto shows (https://ui.perfetto.dev).

        A process for the controller, one for each rank; operations are called by the line of the program that has
        issued them, `train.py:12 aten::mm`, and have the whole of it as an argument. Collectives have a track of their
        own. Times count from the begin of the block.
        """
        other = {"missing": self.missing, "uncertainty_us": self.uncertainty_seconds * 1e6}
        with Path(path).open("wb") as file:
            file.writelines(trace_bytes(self._events(), other))

    def _events(self) -> Iterator[dict[str, Any]]:
        yield from track(1, 1, f"controller of {self._name}", ("issued",))
        for number, (name, *_) in enumerate(self._ranks, start=2):
            yield from track(number, 1, name, ("operations", "collectives"))
        for name, line, begun, took in self._lines.values():
            yield self._span(1, 1, "issued", name, line, begun, took)
        for number, (_, names, rows, offset) in enumerate(self._ranks, start=2):
            for kind, index, team, command, begun, took, sent in rows:
                by = self._lines.get((team, command), (None, None))[1]
                if kind:
                    yield self._span(number, 2, "collective", names[index], by, begun - offset, took, sent_bytes=sent)
                else:
                    yield self._span(number, 1, "operation", names[index], by, begun - offset, took)

    def _span(
        self, process: int, thread: int, kind: str, name: str, line: Line | None, begun: int, took: int, **more: int
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = dict(more) if line is None else {"line": shown(line), **more}
        return span(process, thread, kind, named(name, line), (begun - self._begun) / 1e9, took / 1e9, arguments)


@asynccontextmanager
async def profile(mesh: ProcMesh, path: Path | str | None = None) -> AsyncGenerator[Profile]:
    """Look at what is issued to a mesh and at what its ranks do, in a block, and write a trace of it.

    One trace has both, on one clock, with operations named by the line of the program that issued them, and each
    collective with the bytes that it sends. What is not profiled costs nothing; what is costs a few microseconds an
    operation. Processes of one machine have one clock; that of another is compared by asking, and the trace says how
    exactly that is known.

    Args:
        mesh: The processes, or a view of them. Operations on all views of the mesh are seen, on the ranks of this one.
        path: Where the trace is written when the block is left. None: `profile.write(path)` does it after that.

    Yields:
        What takes it all.

    Raises:
        RuntimeError: The mesh is profiled already; or it is a reference, or `this_proc()`.
        MeshErrorGroup: A process has ended.

    Blocking: entering and leaving are checkpoints, cancellable; leaving waits until the ranks have done what was
    issued.

    Example:
        >>> async with trimesh.tensor.profile(procs, "step.json"):
        ...     step(batch)
    """
    team = team_of(mesh, "a profile is of")
    engine, found = team.engine, Profile()
    if id(engine) in _PROFILED:
        raise RuntimeError(f"{engine.name} is profiled already, in a block that has not ended: leave that first")
    found._name = engine.name
    call_kernel(team, "profile_begin")
    offsets = await in_trio(_clocks)(team, found)
    found._begun = time.monotonic_ns()
    _look(engine, found)
    try:
        yield found
    finally:
        _look_away(engine)
        await in_trio(_take)(team, found, offsets)
    if path is not None:
        found.write(path)


def _look(engine: Engine, found: Profile) -> None:
    _PROFILED[id(engine)] = found
    for one in engine.teams:
        one.__class__ = _ProfiledTeam
    own = engine.on_team

    def joined(team: Team) -> None:
        team.__class__ = _ProfiledTeam
        own(team)

    found.own_joining = own
    engine.on_team = joined


def _look_away(engine: Engine) -> None:
    found = _PROFILED.pop(id(engine))
    if found.own_joining is not None:
        engine.on_team = found.own_joining
    for one in engine.teams:
        one.__class__ = Team


async def _clocks(team: Team, found: Profile) -> list[int]:
    """Return by how many nanoseconds the clock of each rank is ahead of the one here."""
    places = range(len(team.peers))
    best = [(0.0, 0)] * len(places)
    for ping in range(_PINGS):
        asked = time.monotonic_ns()
        request = team.engine.ask(team, places, lambda number: call_kernel(team, "profile_clock", number), shapes.CLOCK)
        told = await answers(request)
        now = time.monotonic_ns()
        for place in places:
            boot, at = told[place]
            if boot == boot_id():
                best[place] = (0.0, 0)
            elif not ping or (now - asked) / 2 < best[place][0]:
                best[place] = ((now - asked) / 2, at - (asked + now) // 2)
    found.uncertainty_seconds = max(half for half, _ in best) / 1e9
    return [offset for _, offset in best]


async def _take(team: Team, found: Profile, offsets: Sequence[int]) -> None:
    places = range(len(team.peers))
    request = team.engine.ask(team, places, lambda number: call_kernel(team, "profile_end", number), shapes.PROFILE)
    told = await answers(request)
    for place, origin in zip(places, team.origins, strict=True):
        names, rows, missing = told[place]
        found.done(place_name(team.engine.name, origin.point), names, rows.tolist(), missing, offsets[place])


# ---- what the ranks of a mesh have sent to each other in collectives -------------------------------------------------


@attrs.frozen
class Collectives:
    """Collectives of one kind along one dimension of a mesh.

    Attributes:
        label: The dimension; several with commas between them.
        name: As methods of torch's process groups are called: `"allreduce"`, `"_allgather_base"`.
        count: How many.
        sent: Bytes that the first rank has sent in them, counted as a ring sends them: to bring B bytes together among
            n ranks, or to scatter them, B (n - 1) / n; to add B bytes up for all twice that.
    """

    label: str
    name: str
    count: int
    sent: int


class Traffic(tuple[Collectives, ...]):
    """What the first rank of a mesh has sent in collectives in its life; `sent` adds it up."""

    __slots__ = ()

    def sent(self, label: str | None = None) -> int:
        """Return the bytes along one dimension of the mesh, or along all."""
        return sum(one.sent for one in self if label in (None, one.label))


async def traffic(mesh: ProcMesh) -> Traffic:
    """Return what collectives the first rank of a mesh took part in, and the bytes that it has sent, so far.

    Those of global tensors, of `reduce` and of remote functions with a process group; tensors that `to_mesh` and
    `fetch` move are read from memory, and not counted. Ask before a step and after it.

    Args:
        mesh: The processes. Counts are of the life of the first of them.

    Raises:
        MeshErrorGroup: A process has ended.
        RuntimeError: The mesh is a reference, or `this_proc()`.

    Blocking: a checkpoint, cancellable.

    Example:
        >>> (await trimesh.tensor.traffic(procs)).sent("dp")
        1288
    """
    team = team_of(mesh, "collectives are counted on")
    found: Traffic = await in_trio(_asked)(team)
    return found


async def _asked(team: Team) -> Traffic:
    request = team.engine.ask(team, [0], lambda number: call_kernel(team, "traffic", number), shapes.TRAFFIC)
    return Traffic(Collectives(*one) for one in (await answers(request))[0])


# ---- which operators ran on whole tensors, for the table has no rule for them ----------------------------------------


class Fallbacks(dict[str, int]):
    """How often each operator was run on whole tensors, by name.

    Attributes:
        operators: How many operators on global tensors there were in all.
    """

    def __init__(self, found: dict[str, int], operators: int) -> None:
        super().__init__(found)
        self.operators = operators


async def fallbacks(mesh: ProcMesh) -> Fallbacks:
    """Return which operators on global tensors had no rule for parts, and how often they ran.

    Their arguments were gathered, every rank computed the whole, and results were cut again: right, and slow. What was
    asked of tensors of which all ranks had the whole anyhow does not count.

    Args:
        mesh: The processes; the first of them tells, as all run the same operators. Counts are of its life.

    Raises:
        MeshErrorGroup: A process has ended.
        RuntimeError: The mesh is a reference, or `this_proc()`.

    Blocking: a checkpoint, cancellable.

    Example:
        >>> await trimesh.tensor.fallbacks(procs)
        {'aten::_linalg_eigh': 1}
    """
    team = team_of(mesh, "the operators without a rule are asked of")
    found: Fallbacks = await in_trio(_asked_fallbacks)(team)
    return found


async def _asked_fallbacks(team: Team) -> Fallbacks:
    request = team.engine.ask(team, [0], lambda number: call_kernel(team, "fallbacks", number), shapes.FALLBACKS)
    found: tuple[Any, Any] = (await answers(request))[0]
    return Fallbacks(*found)
