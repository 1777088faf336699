"""`@trimesh.compile`: a function whose operations are sent once and run again by one message."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, Generic, ParamSpec, TypeVar

import attrs
import torch
from torch.utils import _pytree as pytree

from trimesh._runtime.life import current_proc
from trimesh.tensor.controller.plan import Meta
from trimesh.tensor.controller.recording import Recorder, TeamRecording, compare
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor, make
from trimesh.tensor.issue.watched import Watched
from trimesh.tensor.ops.surroundings import Surroundings, WrappedFunction
from trimesh.tensor.protocol.errors import RecordingError
from trimesh.tensor.protocol.messages import FORGET, RECORD, REPLAY
from trimesh.tensor.session.activation import active_team
from trimesh.tensor.session.opening import shapes_of

_IS_INSIDE: Final = ContextVar("_IS_INSIDE", default=False)
"""Whether a compiled function is being called."""

P = ParamSpec("P")
R = TypeVar("R")


@attrs.frozen
class _OfTeam:
    """What the ranks of one view keep of a function.

    Attributes:
        team: The ranks.
        number: Of the recording there.
        places: Which of the tensors among the arguments are theirs.
        results: How many tensors of theirs it returns.
    """

    team: Team
    number: int
    places: Sequence[int]
    results: int


@attrs.frozen
class _Replayable:
    """What the ranks keep of a function.

    Attributes:
        teams: By view.
        order: In which order their parts run: places in `teams`, and the part.
        moves: How many numbers of moves it takes.
        key: What it was recorded with: metadata and values of the arguments.
        metas: Of what it returns: the place in `teams`, and the metadata.
        leaves: What else it returns, with None in the place of tensors.
        is_tensor: By leaf, whether it is one.
        tree: How they are put together.
        watched, surroundings: What must be as it was.
    """

    teams: Sequence[_OfTeam]
    order: Sequence[tuple[int, int]]
    moves: int
    key: Sequence[Any]
    metas: Sequence[tuple[int, Meta]]
    leaves: Sequence[Any]
    is_tensor: Sequence[bool]
    tree: pytree.TreeSpec
    watched: Watched
    surroundings: Surroundings


class Compiled(WrappedFunction, Generic[P, R]):
    """A function that is recorded: its first call is an ordinary one, the next two are recorded, the rest replayed.

    A call by another such function is an ordinary one: its operations are part of the recording of that one.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.__name__ = type(function).__name__  # of what has no name of its own, as a partial
        functools.update_wrapper(self, function)
        self.function = self._function = function
        self._key: Sequence[Any] | None = None
        self._before: Recorder | None = None
        self._replayable: _Replayable | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the next call is a replay."""
        return self._replayable is not None

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, or let the ranks run again what it did."""
        if _IS_INSIDE.get():
            return self._function(*args, **kwargs)
        outside = _IS_INSIDE.set(True)
        try:
            return self._called(*args, **kwargs)
        finally:
            _IS_INSIDE.reset(outside)

    def _called(self, *args: P.args, **kwargs: P.kwargs) -> R:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, MeshTensor)]
        key = _key(leaves, tree)
        found = self._replayable
        if found is not None:
            _check(self.__name__, found, key)
            found.watched.check(self.__name__)
            found.surroundings.check(self.__name__, Surroundings.of(self.function))
            result: R = _replay(found, tensors)
            return result
        if key != self._key:
            self._key, self._before = key, None
            return self._function(*args, **kwargs)
        return self._record(key, tensors, lambda: self._function(*args, **kwargs))

    def reset(self) -> None:
        """Forget what was recorded: the next call is an ordinary one. The ranks let go of what it had captured."""
        found, self._replayable = self._replayable, None
        self._key = self._before = None
        for one in () if found is None else found.teams:
            if not one.team.is_lost and not one.team.engine.is_closed:
                one.team.emit_words(FORGET, one.number)

    def _record(self, key: Sequence[Any], tensors: Sequence[MeshTensor], call: Callable[[], R]) -> R:
        team = tensors[0]._held.team if tensors else active_team()
        shapes = shapes_of(current_proc()) if team is None else team.engine.shapes
        recorder = shapes.recorder = Recorder({tensor._held.ref: tensor._held.team for tensor in tensors})
        watched, around = Watched(), Surroundings.of(self.function)
        try:
            with watched.watching():
                result = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, call())
        finally:
            shapes.recorder = None
        before, self._before = self._before, recorder
        recorder.end()
        if not recorder.commands:
            raise RecordingError(f"{self.function!r} computes nothing on a mesh, so there is nothing to record")
        if before is not None:
            self._before = None
            result = self._keep(key, before, recorder, result, watched, around)
        given: R = result
        return given

    def _keep(
        self,
        key: Sequence[Any],
        before: Recorder,
        after: Recorder,
        result: Any,
        watched: Watched,
        around: Surroundings,
    ) -> Any:
        leaves, tree = pytree.tree_flatten(result)
        outs = [leaf for leaf in leaves if isinstance(leaf, MeshTensor)]
        metas = [(out._held.team, out._meta) for out in outs]
        results = {out._held.ref: out._held.team for out in outs}
        # What the caller gets must not be what the next replay writes to.
        given = pytree.tree_map_only(MeshTensor, torch.Tensor.detach, result)
        del outs, result
        is_tensor = [isinstance(leaf, MeshTensor) for leaf in leaves]
        values = [None if is_one else leaf for leaf, is_one in zip(leaves, is_tensor, strict=True)]
        del leaves
        gc.collect()  # a graph of autograd that only the collector finds would count as kept
        freed = {ref for one in after.commands for ref in one.freed}
        teams = [team for team in after.teams if isinstance(team, Team)]
        for team in teams:
            team.engine.post_around(team)  # which may use what is forgotten
            freed.update(team.take_freed())
        recording = compare(before, after, results, freed, teams[0].engine.new_refs(len(after.formals)))
        around.check_own(self.__name__, Surroundings.of(self.function))
        kept = [_sent(team, one) for team, one in zip(teams, recording.of_teams, strict=True)]
        places = [(teams.index(team), meta) for team, meta in metas]
        self._replayable = _Replayable(
            kept, recording.order, recording.moves, key, places, values, is_tensor, tree, watched, around
        )
        return given


def _sent(team: Team, recording: TeamRecording) -> _OfTeam:
    """Let the ranks of a team keep what they do."""
    team.engine.post_around(team)
    number = team.engine.new_refs(1)
    body = len(team.bodies)
    team.bodies += recording.bodies
    carried = [list(pair) for pair in recording.carried]
    team.emit_words(
        RECORD, number, body, recording.streams, recording.formals, recording.results, recording.captured, carried
    )
    return _OfTeam(team, number, recording.places, len(recording.results))


def _replay(found: _Replayable, tensors: Sequence[MeshTensor]) -> Any:
    given = list(dict.fromkeys(tensor._held.ref for tensor in tensors))
    firsts = [one.team.engine.new_refs(one.results) for one in found.teams]
    move = found.teams[0].team.engine.shapes.new_numbers(found.moves)
    for one in found.teams:
        one.team.check()
    # Nothing of the ranks is looked at meanwhile: some would wait for others whose part is not issued any more.
    for place, part in found.order:
        one = found.teams[place]
        own = [given[index] for index in one.places] if part == 0 else []
        one.team.engine.post_around(one.team)
        one.team.emit_words(REPLAY, one.number, part, firsts[place], own, move)
    for one in found.teams:
        one.team.engine.post(one.team)
    for one in found.teams:
        one.team.engine.flush_team(one.team)
    left = list(firsts)
    results: list[MeshTensor] = []
    for place, meta in found.metas:
        results.append(make(meta, found.teams[place].team, left[place]))
        left[place] += 1
    made = iter(results)
    leaves = [next(made) if is_tensor else leaf for leaf, is_tensor in zip(found.leaves, found.is_tensor, strict=True)]
    return pytree.tree_unflatten(leaves, found.tree)


def _key(leaves: Sequence[Any], tree: pytree.TreeSpec) -> list[Any]:
    """Return what a recording depends on: metadata of tensors, which of them are the same, and all other values."""
    seen: dict[int, int] = {}
    key: list[Any] = [tree, torch.is_grad_enabled()]
    for leaf in leaves:
        if isinstance(leaf, MeshTensor):
            place = seen.setdefault(leaf._held.ref, len(seen))
            key.append((leaf._held.team, leaf._meta, place, leaf.requires_grad))
        else:
            key.append(leaf)
    return key


def _check(name: str, found: _Replayable, key: Sequence[Any]) -> None:
    if key == found.key:
        return
    for recorded, given in zip(found.key, key, strict=False):
        if recorded != given:
            raise RecordingError(
                f"{name} was recorded with {_shown(recorded)} and can be replayed only so, got {_shown(given)}: write "
                f"{name}.reset() before it, so that the next calls record it anew, or give such arguments to a "
                "trimesh.compile of their own"
            )
    raise RecordingError(f"{name} was recorded with other arguments: write {name}.reset() before it")


def _shown(part: Any) -> str:
    match part:
        case (Team() as team, Meta() as meta, place, requires_grad):
            dtype = str(meta.dtype).removeprefix("torch.")
            more = ", requires_grad" if requires_grad else ""
            return f"{dtype}{list(meta.size)} on {team.name} (argument {place}{more})"
        case _:
            return repr(part)


def compile(function: Callable[P, R]) -> Compiled[P, R]:  # noqa: A001 - as torch's own
    """Record what a function does on the ranks, and run it again by one message a call.

    The first call is an ordinary one (an optimizer makes its state then), the second and third are recorded and
    compared, the rest are replayed: the ranks do what they did, with the tensors that they are given, and with what the
    calls before have left in parameters and other tensors. None of the Python code of the function runs again.

    Args:
        function: Takes and returns tensors on meshes, and data. It may contain a whole training step: forward,
            backward, optimizer. Data among its arguments must stay the same.

    Returns:
        A callable with `reset()`. What it returns is detached from autograd.

    Raises:
        RecordingError: By its calls: the function looks at values, or does something else in its third call than in its
            second; or a replay is asked for with other shapes or values.

    Cost: a replay is one message of some 20 bytes for each view that the function computes on, whatever it does there;
    one for each part between which other views that have some of the ranks compute.
    """
    return Compiled(function)
