"""`@trimesh.compile`: record the operations of a function once, replay them by one message."""

from __future__ import annotations

import functools
import gc
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, Generic, ParamSpec, TypeVar

import attrs
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh._runtime.life import current_proc
from trimesh.tensor.controller.recording import Recorder, TeamRecording, compare
from trimesh.tensor.controller.shapes import Meta
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor, make
from trimesh.tensor.protocol.messages import FORGET, RECORD, REPLAY, RecordingError
from trimesh.tensor.protocol.placement import contiguous_strides
from trimesh.tensor.session.activation import active_team
from trimesh.tensor.session.opening import shapes_of

_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_ROWS: Final = (list, tuple, set, frozenset, deque)


class WrappedFunction:
    """A callable object that wraps a function.

    Attributes:
        function: The function.
    """

    function: Callable[..., Any]


@attrs.frozen
class ReadData:
    """Snapshot of the data that a function reads from its environment: numbers, strings and containers, by name.

    SR-1 It covers the function's closure, the globals that its code names, its defaults, the attributes of its `self`,
    and the same of functions of its module, and of compiled ones, that it refers to. It covers no other objects.
    """

    by_name: Mapping[str, Any]

    @classmethod
    def of(cls, function: Any) -> ReadData:
        budget = itertools.count(limits.RECORDED_DATA_MAX, -1)
        found: dict[str, Any] = {}
        for name, value in _read_by(function, set()):
            taken = _taken(value, budget)
            if taken is not None:
                found[name] = taken
        return cls(found)

    def check_own(self, name: str, after: ReadData) -> None:
        """Refuse to record a function whose call changes the data that it reads.

        Raises:
            RecordingError: The call has changed it.
        """
        changed = self._changed(after)
        if changed is not None:
            raise RecordingError(
                "a recorded function must not change data that it reads, as a replay does not run its Python code, got "
                f"{name}, in which {changed} was {_shown(self, changed)} before a call and {_shown(after, changed)} "
                "after it: change it outside, and pass it as a tensor on the mesh"
            )

    def check(self, name: str, now: ReadData) -> None:
        """Refuse a replay if the data has changed since the recording.

        Raises:
            RecordingError: It has changed.
        """
        changed = self._changed(now)
        if changed is not None:
            raise RecordingError(
                f"{name} was recorded with {changed}={_shown(self, changed)}, and it is {_shown(now, changed)} now: a "
                f"number that changes must be a tensor on the mesh; or write {name}.reset() before the call"
            )

    def _changed(self, other: ReadData) -> str | None:
        if self.by_name == other.by_name:
            return None
        names = {**self.by_name, **other.by_name}
        return next((name for name in names if self.by_name.get(name) != other.by_name.get(name)), None)


def _shown(of: ReadData, name: str) -> str:
    if name not in of.by_name:
        return "no data"
    text = repr(_plain(of.by_name[name]))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_by(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function refers to, with names for error messages."""
    if isinstance(function, functools.partial):
        yield from (("an argument of a partial", one) for one in ((*function.args, function.keywords),))
        yield from _read_by(function.func, seen)
        return
    if isinstance(function, MethodType):
        owner = function.__self__
        yield from ((f"self.{name}", value) for name, value in getattr(owner, "__dict__", {}).items())
        yield from _read_by(function.__func__, seen)
        return
    if not isinstance(function, FunctionType):
        call = getattr(function, "__call__", None)  # noqa: B004 - its function is wanted
        if isinstance(call, MethodType):
            yield from _read_by(call, seen)
        return
    if id(function) in seen:
        return
    seen.add(id(function))
    data = dict(_named_by(function))
    yield from data.items()
    if function.__defaults__ or function.__kwdefaults__:
        yield f"a default of {function.__name__}", (*(function.__defaults__ or ()), function.__kwdefaults__)
    for value in data.values():
        if isinstance(value, WrappedFunction):
            yield from _read_by(value.function, seen)
        elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _read_by(value, seen)


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # nested functions
            yield from _names_in(constant)


def _taken(value: Any, budget: Iterator[int]) -> Any:
    """Return a copy of data, with types, because 1 equals True and 1.0; None for other objects."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, (value.hex() if kind is float else value)
    if not isinstance(value, (dict, *_ROWS)):
        return None
    if len(value) > next(budget):
        return kind, len(value)
    parts = itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value
    return kind, tuple([_taken(one, budget) if next(budget) > 0 else None for one in parts])


def _plain(taken: Any) -> Any:
    if taken is None:
        return ...
    kind, value = taken
    if kind is float:
        return float.fromhex(value)
    if kind in _PLAIN:
        return value
    return [_plain(one) for one in value] if isinstance(value, tuple) else f"{kind.__name__} of {value}"


# ---- modules and optimizers ------------------------------------------------------------------------------------------

# State of modules and optimizers that a recorded function has read: a replay runs no Python, so it must not change.


class Watched:
    """The modules that were called, and the optimizers that have stepped, while a function was recorded.

    WD-1 A replay runs only if each module has the mode (`training`), and each optimizer the settings of its groups,
    that it had at the recording.
    """

    def __init__(self) -> None:
        self._modules: dict[int, tuple[torch.nn.Module, bool]] = {}
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = {}

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Record the modules called and the optimizers stepped in this block."""
        handles = [
            register_module_forward_pre_hook(self._called),
            register_optimizer_step_pre_hook(self._stepped),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, module: torch.nn.Module, _args: Any) -> None:
        self._modules.setdefault(id(module), (module, module.training))

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizers.setdefault(id(optimizer), (optimizer, _settings(optimizer)))

    def check(self, name: str) -> None:
        """Refuse a replay that would differ from a call of the function.

        Raises:
            RecordingError: The mode of a module, or a number of an optimizer, has changed.
        """
        for module, training in self._modules.values():
            if module.training is not training:
                mode = "train()" if training else "eval()"
                raise RecordingError(
                    f"{name} was recorded with a {type(module).__name__} in {mode}, and it is in the other mode now: "
                    f"write {name}.reset() before the call, or give each mode a trimesh.compile of its own"
                )
        for optimizer, recorded in self._optimizers.values():
            for then, now in zip(recorded, _settings(optimizer), strict=False):
                changed = next((key for key in then if not _is_same(then[key], now.get(key))), None)
                if changed is not None:
                    raise RecordingError(
                        f"{name} was recorded with {changed}={then[changed]!r} of {type(optimizer).__name__}, and it "
                        f"is {now.get(changed)!r} now: a number that changes must be a tensor on the mesh, as lr= of a "
                        f"fused optimizer may be; or write {name}.reset() before the call"
                    )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other  # a replay reads its current value on the ranks
    return bool(one == other)


# ---- compiled --------------------------------------------------------------------------------------------------------

_IS_INSIDE: Final = ContextVar("_IS_INSIDE", default=False)
"""Whether a compiled function is being called."""

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def _telling_libraries() -> Generator[None, None, None]:
    """Let `torch.compiler.is_compiling()` be true, at which libraries leave out checks that read values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@attrs.frozen
class _OfTeam:
    """The recording of a function on the ranks of one view.

    Attributes:
        team: The ranks.
        number: Number of the recording there.
        places: Indices of the tensor arguments that are on these ranks.
        results: Number of tensors on these ranks that the function returns.
    """

    team: Team
    number: int
    places: Sequence[int]
    results: int


@attrs.frozen
class _Replayable:
    """A recorded function, ready for replay.

    Attributes:
        teams: Recordings by view.
        order: Order of their parts: indices into `teams`, and the part.
        moves: Number of moves in it, each of which needs a new number.
        key: Metadata and values of the arguments of the recording.
        metas: For each returned tensor, the index into `teams` and its metadata.
        leaves: The other returned values, with None in place of tensors.
        is_tensor: Whether each leaf is a tensor.
        tree: Structure of the returned value.
        watched, data: State that must be unchanged.
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
    data: ReadData


class Compiled(WrappedFunction, Generic[P, R]):
    """A function whose first call is an ordinary one; the next two are recorded, the rest replayed.

    A call from another compiled function is an ordinary one: its operations become part of that recording.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.__name__ = type(function).__name__  # for callables without a name, as a partial
        functools.update_wrapper(self, function)
        self.function = self._function = function
        self._key: Sequence[Any] | None = None
        self._before: Recorder | None = None
        self._replayable: _Replayable | None = None

    @property
    def is_recorded(self) -> bool:
        """Return whether a recording exists, so that the next call is a replay."""
        return self._replayable is not None

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, or replay its recording."""
        if _IS_INSIDE.get():
            return self._function(*args, **kwargs)
        outside = _IS_INSIDE.set(True)
        try:
            with _telling_libraries():
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
            found.data.check(self.__name__, ReadData.of(self.function))
            result: R = _replay(found, tensors)
            return result
        if key != self._key:
            self._key, self._before = key, None
            return self._function(*args, **kwargs)
        return self._record(key, tensors, lambda: self._function(*args, **kwargs))

    def reset(self) -> None:
        """Drop the recording: the next call is an ordinary one. The ranks free the tensors that it captured."""
        found, self._replayable = self._replayable, None
        self._key = self._before = None
        for one in () if found is None else found.teams:
            if not one.team.is_lost and not one.team.engine.is_closed:
                one.team.emit_words(FORGET, one.number)

    def _record(self, key: Sequence[Any], tensors: Sequence[MeshTensor], call: Callable[[], R]) -> R:
        team = tensors[0]._held.team if tensors else active_team()
        shapes = shapes_of(current_proc()) if team is None else team.engine.shapes
        recorder = shapes.recorder = Recorder({tensor._held.ref: tensor._held.team for tensor in tensors})
        watched, data = Watched(), ReadData.of(self.function)
        try:
            with watched.watching():
                result = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, call())
        finally:
            shapes.recorder = None
        before, self._before = self._before, recorder
        recorder.end()
        if not recorder.commands:
            raise RecordingError(f"a recorded function must compute on a mesh, got no operations of {self.function!r}")
        if before is not None:
            self._before = None
            result = self._keep(key, before, recorder, result, watched, data)
        given: R = result
        return given

    def _keep(
        self,
        key: Sequence[Any],
        before: Recorder,
        after: Recorder,
        result: Any,
        watched: Watched,
        data: ReadData,
    ) -> Any:
        leaves, tree = pytree.tree_flatten(result)
        outs = [leaf for leaf in leaves if isinstance(leaf, MeshTensor)]
        metas = [(out._held.team, out._meta) for out in outs]
        results = {out._held.ref: out._held.team for out in outs}
        # Detach: the next replay must not write to the results of the caller.
        given = pytree.tree_map_only(MeshTensor, torch.Tensor.detach, result)
        del outs, result
        is_tensor = [isinstance(leaf, MeshTensor) for leaf in leaves]
        values = [None if is_one else leaf for leaf, is_one in zip(leaves, is_tensor, strict=True)]
        del leaves
        gc.collect()  # tensors of an autograd graph in a reference cycle would count as kept
        freed = {ref for one in after.commands for ref in one.freed}
        teams = [team for team in after.teams if isinstance(team, Team)]
        for team in teams:
            team.engine.post_around(team)  # pending commands may use freed tensors
            freed.update(team.take_freed())
        recording = compare(before, after, results, freed, teams[0].engine.new_refs(len(after.formals)))
        data.check_own(self.__name__, ReadData.of(self.function))
        kept = [_sent(team, one) for team, one in zip(teams, recording.of_teams, strict=True)]
        places = [(teams.index(team), meta) for team, meta in metas]
        self._replayable = _Replayable(
            kept, recording.order, recording.moves, key, places, values, is_tensor, tree, watched, data
        )
        return given


def _sent(team: Team, recording: TeamRecording) -> _OfTeam:
    """Store the recording on the ranks of a team."""
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
    # Query no rank in between: if that failed, some ranks would wait for others whose part is never issued.
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
    """Return the key of a recording: metadata of tensors, identities among them, and all other values."""
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
                f"{name} must be replayed with arguments as recorded, {_show(recorded)}, got {_show(given)}: write "
                f"{name}.reset() before the call, so that the next calls record it anew, or give such arguments a "
                "trimesh.compile of their own"
            )
    raise RecordingError(f"{name} was recorded with other arguments: write {name}.reset() before the call")


def _show(part: Any) -> str:
    match part:
        case (Team() as team, Meta() as meta, place, requires_grad):
            dtype = str(meta.dtype).removeprefix("torch.")
            lies = "" if meta.stride == contiguous_strides(meta.size) else f" with strides {list(meta.stride)}"
            more = ", requires_grad" if requires_grad else ""
            return f"{dtype}{list(meta.size)}{lies} on {team.name} (argument {place}{more})"
        case _:
            return repr(part)


def compile(function: Callable[P, R]) -> Compiled[P, R]:  # noqa: A001 - as torch's own
    """Record the operations of a function on the ranks, and replay them by one message for each call.

    The first call is an ordinary one (an optimizer makes its state then), the second and third are recorded and
    compared, the rest are replayed. In a replay the ranks repeat the operations with the given tensors and the current
    values of parameters and other captured tensors. None of the Python code of the function runs again.

    Args:
        function: Takes and returns tensors on meshes, and data. It may contain a whole training step: forward,
            backward, optimizer. Data among its arguments must stay the same. While it runs, libraries find
            `torch.compiler.is_compiling()` true, and leave out checks that read values.

    Returns:
        A callable with `reset()`. Tensors that it returns are detached from autograd.

    Raises:
        RecordingError: From calls: the function reads values of tensors, its third call differs from its second, or a
            replay has other shapes or values.

    Cost: a replay sends one message of some 20 bytes for each view that the function computes on, however many
    operations it has. If overlapping views alternate, it sends one message for each part between them.
    """
    return Compiled(function)
