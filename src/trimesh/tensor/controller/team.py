"""Teams: ranks that hold tensors together, and the commands in flight to them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import attrs
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh._transport.interface import Buffer
from trimesh.shape.region import Region
from trimesh.tensor.controller.recording import check_not_compiled
from trimesh.tensor.controller.shapes import FRESH, MIXED_BITS, Line, Meta, Plan
from trimesh.tensor.controller.tensor import MeshTensor, check_views, has_changed_bases, make
from trimesh.tensor.protocol import arguments
from trimesh.tensor.protocol.arguments import BODY_SLOT, NUMBER_SLOT, SLOT
from trimesh.tensor.protocol.messages import DEFINE, FIRST_SIGNATURE, FREE, RESET

if TYPE_CHECKING:
    from trimesh._runtime.peers import Peer
    from trimesh.errors import Origin
    from trimesh.tensor.controller.engine import Engine


@attrs.define(eq=False)
class TeamFailure:
    """A command that is the root cause of a failure.

    Attributes:
        line: Line that issued it.
        what: The operation and its error, as text.
        is_told: Whether the error was raised.
    """

    line: str
    what: str
    is_told: bool = False


_OWN = __file__.rsplit("/", 2)[0]

# Batches end by content, not after a count. So the same operations make the same batches, whatever was issued before,
# and ranks recognise them. A hash of the latest four operations ends a batch after one operation in 64 on average: bits
# of the latest and, shifted, of the three before it.
_SHIFT: Final = MIXED_BITS // 4
_END_OF_BATCH: Final = 0b111111


@attrs.define(eq=False)
class Team:
    """A view of a mesh of processes that holds tensors.

    Attributes:
        engine: Engine of the mesh.
        number: Number in messages.
        region: The view.
        peers: The processes, by place in the view.
        issued: Number of commands so far, including those in `stream`.
        stream: Commands that have not been sent.
        first: Number of the first command in `stream`.
        bodies: Bodies of the commands in `stream`.
        done: Number of commands executed, by process.
        lines: Issuing lines of commands that some rank has not executed: (number of the first, lines).
        failed: Root-cause failures, by number of the command.
        is_lost: Set when a process of the team has ended: its tensors are lost.
        origins: Origins for errors of its processes, by place in the view.
        living: Number of tensors that are held.
        freed: Refs of tensors that are not held any more, and that ranks have yet to free.
    """

    engine: Engine
    number: int
    region: Region
    peers: Sequence[Peer]
    origins: Sequence[Origin]
    issued: int = 0
    stream: list[Any] = attrs.field(factory=list[Any])
    first: int = 0
    bodies: list[Buffer] = attrs.field(factory=list[Buffer])
    done: dict[Peer, int] = attrs.field(factory=dict["Peer", int])
    lines: deque[tuple[int, list[Line]]] = attrs.field(factory=deque[tuple[int, list[Line]]])
    failed: dict[int, TeamFailure] = attrs.field(factory=dict[int, TeamFailure])
    is_lost: bool = False
    living: int = 0
    freed: list[int] = attrs.field(factory=list[int])
    _defined: set[int] = attrs.field(factory=set[int])
    _generation: int = 0
    _latest: int = 0
    _new_lines: list[Line] = attrs.field(factory=list[Line])

    @property
    def name(self) -> str:
        """Name, for errors and logs."""
        return f"{self.engine.name}{dict(self.region.extent)!r}"

    def shares_order(self, other: Team) -> bool:
        """Return whether commands of both teams must stay in order: they share a rank, or all execution is serial."""
        engine = self.engine
        return not engine.has_values or (engine is other.engine and not set(self.peers).isdisjoint(other.peers))

    def emit(self, plan: Plan, operands: Sequence[Any], outputs: int) -> int:
        """Add a command; return the ref of its first output.

        Raises:
            ProcDied: A process of the team has ended.
            MeshStopped: The block that owns the processes is being left.
            RuntimeError: The calling thread is not the thread of the mesh.
            MeshError: A process cannot hold tensors, or has not started yet.
            trio.TooSlowError: The deadline of the task has passed while the ranks were far behind.
        """
        engine = self.engine
        if get_ident() != engine.thread:
            engine.check_thread()
        if engine.current is not self:
            engine.switch_to(self)
        if self.is_lost or engine.is_closed:
            self.check()
        stream = self.stream
        if not stream:
            self.first = self.issued
            engine.wake()
        freed: Sequence[int] = ()
        if self.freed:
            freed = self.take_freed()
        if plan.number not in self._defined:
            self._define(plan)
        shapes = engine.shapes
        first = shapes.refs
        shapes.refs = first + outputs
        stream += (plan.number, first, *operands)
        line = issuing_line(2)
        self._new_lines.append(line)
        self.issued += 1  # counted even if the recorder refuses it, as ranks execute it
        recorder = shapes.recorder
        if recorder is not None:
            recorder.took(self, plan, first, outputs, operands, line, freed)
        self._latest = recent = self._latest >> _SHIFT ^ plan.mixed
        count = self.issued - self.first
        if count >= limits.TENSOR_BATCH_COMMANDS and (
            recent & _END_OF_BATCH == 0 or count >= limits.TENSOR_BATCH_COMMANDS_MAX
        ):
            engine.flush_team(self)
        return first

    def begin(self) -> None:
        """Prepare to send to the ranks, in order after commands of other teams that share ranks.

        Raises:
            Exception: See `emit`.
        """
        engine = self.engine
        if get_ident() != engine.thread:
            engine.check_thread()
        if engine.current is not self:
            engine.switch_to(self)
        if self.is_lost or engine.is_closed:
            self.check()

    def emit_words(self, *words: Any) -> None:
        """Add a command that is not an operation, such as DEFINE; see `protocol.messages`.

        Raises:
            MeshStopped, ProcDied: See `Engine.check_open`.
        """
        self.begin()
        self.check()
        if not self.stream:
            self.first = self.issued
            self.engine.wake()
        self.stream += words
        self._new_lines.append(issuing_line())
        self.issued += 1

    def take_freed(self) -> list[int]:
        """Add a FREE command for the freed refs, and return them."""
        freed, self.freed = self.freed, []
        if not self.stream:
            self.first = self.issued
        self.living -= len(freed)
        self.stream += (FREE, freed)
        return freed

    def add_body(self, body: Buffer) -> int:
        """Add a body for the next command; return its index, for use as an operand."""
        self.bodies.append(body)
        return len(self.bodies) - 1

    def check(self) -> None:
        """Raise if the team cannot execute commands; see `Engine.check_open`."""
        self.engine.check_open(self)

    def _define(self, plan: Plan) -> None:
        generation = self.engine.shapes.generation
        if generation != self._generation:
            self._generation = generation
            self._defined.clear()
            self.stream.append(RESET)
        self._defined.add(plan.number)
        self.stream += (DEFINE, plan.number, plan.description)

    def take(self) -> tuple[int, list[Any], list[Buffer]]:
        """Remove and return the unsent commands: number of the first, commands, bodies."""
        if self.freed:
            self.take_freed()
        taken = self.first, self.stream, self.bodies
        if self._new_lines:
            self.lines.append((self.first, self._new_lines))
        self.stream, self.bodies, self._new_lines = [], [], []
        self.first = self.issued
        return taken

    def progressed(self, peer: Peer, count: int, failed: Sequence[tuple[int, str]]) -> None:
        """Record the commands that a rank has executed, and its failures."""
        for number, what in failed:
            self.failure(number, what)
        self.done[peer] = max(count, self.done.get(peer, 0))
        executed = self.executed
        while self.lines and self.lines[0][0] + len(self.lines[0][1]) <= executed:
            self.lines.popleft()

    @property
    def executed(self) -> int:
        """Number of commands that every rank has executed."""
        return min(self.done.get(peer, 0) for peer in self.peers)

    def is_behind(self, peer: Peer) -> bool:
        """Return whether a process has unexecuted commands."""
        return self.done.get(peer, 0) < self.issued

    @property
    def awaited_line(self) -> str:
        """Return the issuing line of the first command that some rank has not executed."""
        return self._line_of(self.executed)

    def failure(self, number: int, what: str = "") -> TeamFailure:
        """Return the record of a failed command; make one if the error arrived before the progress report."""
        found = self.failed.get(number)
        if found is None:
            found = TeamFailure(self._line_of(number), what)
            if len(self.failed) < limits.TENSOR_FAILURES:
                self.failed[number] = found
        return found

    def _line_of(self, number: int) -> str:
        for first, lines in self.lines:
            if first <= number < first + len(lines):
                code, line = lines[number - first]
                return f"{code.co_filename}:{line} in {code.co_qualname}"
        return "an unknown line (no longer kept)"


class _InnerFiles(dict[str, bool]):
    """For each file on a stack, whether it belongs to torch or to this package."""

    def __missing__(self, file: str) -> bool:
        found = self[file] = "/torch/" in file or file.startswith(_OWN)
        return found


_INNER: Final = _InnerFiles()


def issuing_line(callers: int = 0) -> Line:
    """Return the innermost line of the stack that is in neither torch nor this package.

    Args:
        callers: Number of calling functions that are known to be in this package.
    """
    frame: Any = sys._getframe(callers + 1)
    while frame is not None and _INNER[frame.f_code.co_filename]:
        frame = frame.f_back
    frame = frame or sys._getframe(0)
    return frame.f_code, frame.f_lineno


# ---- issuing kernels, as `issue` does operators of torch -------------------------------------------------------------

_LEAF = pytree.tree_structure(0)


def call_kernel(
    team: Team, name: str, *args: Any, outputs: Sequence[Meta] = (), writes: Sequence[int] = ()
) -> list[MeshTensor]:
    """Run a kernel on every rank of a team.

    Args:
        team: The ranks.
        name: Name of the kernel.
        args: Mesh tensors of the team, also in lists and tuples; memoryviews, which are sent as bodies; and data.
            Integers are operands, which may vary between commands.
        outputs: Metadata of its outputs.
        writes: Indices, among the tensors, bodies and numbers of `args`, of tensors that it changes.

    Returns:
        The new tensors.
    """
    check_not_compiled()
    if outputs and has_changed_bases():  # also with gradients off, as in trimesh's autograd functions
        check_views(name, [one for one in pytree.tree_leaves(args) if type(one) is MeshTensor])
    operands: list[Any] = []
    key: list[Any] = [name]

    def slot(value: Any) -> Any:
        kind = type(value)
        if kind is MeshTensor:
            operands.append(value._held.ref)
            key.append(MeshTensor)
            return SLOT
        if kind is memoryview:
            operands.append(team.add_body(value))
            key.append(memoryview)
            return BODY_SLOT
        if kind is int:
            operands.append(value)
            key.append(int)
            return NUMBER_SLOT
        if kind is list or kind is tuple:
            key.extend((kind, len(value)))
            return kind([slot(item) for item in value])
        key.extend((kind, value))
        return value

    described = [slot(value) for value in args]
    shapes = team.engine.shapes
    key += (tuple(outputs), tuple(writes))
    plan = shapes.plans.get(tuple(key))
    if plan is None:
        description = [
            f"trimesh::{name}", arguments.describe(described), ["d"], list(range(len(outputs))) or [-1], list(writes)
        ]  # fmt: skip
        number = FIRST_SIGNATURE + shapes.new_number()
        leaves = [FRESH] * len(outputs)
        plan = Plan(number, name, description, outputs, leaves, [False] * len(outputs), _LEAF)
        shapes.remember(tuple(key), plan)
    first = team.emit(plan, operands, len(outputs))
    return [make(meta, team, first + index) for index, meta in enumerate(outputs)]


# ---- `Operations`: operations on mesh tensors that higher rooms implement --------------------------------------------


@attrs.frozen
class Operations:
    """Implementations of operations on mesh tensors, registered by `assembly.py`.

    Attributes:
        issue: Runs an operator of torch on the ranks.
        make_global: Runs a factory of torch, making a global tensor.
        upload: Puts a tensor of this process on every rank.
        put_global: Distributes a tensor of this process as a global tensor.
        whole: Converts a tensor that is on each rank to a global one.
        reduce, reduce_, slice_mesh, to_mesh, to_local, to_global: See `MeshTensor`.
        list_now, text_now, formatted_now: Return the values, waiting without `await`.
    """

    issue: Callable[..., Any]
    make_global: Callable[..., Any]
    upload: Callable[..., Any]
    put_global: Callable[..., Any]
    whole: Callable[..., Any]
    reduce: Callable[..., Any]
    reduce_: Callable[..., Any]
    slice_mesh: Callable[..., Any]
    to_mesh: Callable[..., Any]
    to_local: Callable[..., Any]
    to_global: Callable[..., Any]
    list_now: Callable[..., Any]
    text_now: Callable[..., str]
    formatted_now: Callable[..., str]
