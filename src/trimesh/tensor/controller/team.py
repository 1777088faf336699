"""The ranks that hold tensors together, and the commands that are on their way to them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import attrs
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh._transport.interface import Buffer
from trimesh.shape.region import Region
from trimesh.tensor.controller.recording import check_not_compiled
from trimesh.tensor.controller.shapes import FRESH, Line, Meta, Plan
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
    """A command that has failed by itself.

    Attributes:
        line: Where it was issued.
        what: The operation and what it has raised, as text.
        is_told: Whether the error was raised.
    """

    line: str
    what: str
    is_told: bool = False


_OWN = __file__.rsplit("/", 2)[0]

# Batches end after operations, not after numbers of them: the same operations make the same batches, whatever came
# before, and ranks know them again. Some bits of the latest four, mixed, decide: one operation in 64 ends a batch.
_PLAN_BITS = 13
_LATEST = (1 << 4 * _PLAN_BITS) - 1
_MIXER = 0x9E37_79B9_7F4A_7C15
_END_OF_BATCH = 0b111111 << 56


@attrs.define(eq=False)
class Team:
    """One view of a mesh of processes that tensors live on.

    Attributes:
        engine: Of the mesh.
        number: Known to the ranks.
        region: The view.
        peers: The processes, by place in the view.
        issued: Commands so far, those in `stream` included.
        stream: Commands that have not been sent.
        first: Number of the first of them.
        bodies: What they carry.
        done: Commands executed, by process.
        lines: Where commands were issued that some rank has not executed: (number of the first, lines).
        failed: Commands that have failed by themselves, by number.
        is_lost: Set when a process of it has ended: its tensors are gone.
        origins: Of errors of its processes, by place in the view.
        living: Tensors that are held.
        freed: Those that are not, and of which the ranks have not been told.
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
        """For people."""
        return f"{self.engine.name}{dict(self.region.extent)!r}"

    def shares_order(self, other: Team) -> bool:
        """Whether commands of both must stay in order: some rank has both, or nothing runs beside anything else."""
        engine = self.engine
        return not engine.has_values or (engine is other.engine and not set(self.peers).isdisjoint(other.peers))

    def free(self, ref: int) -> None:
        """Forget a tensor, with the next commands. May be called from anywhere, by the collector, at any time."""
        self.freed.append(ref)

    def emit(self, plan: Plan, operands: Sequence[Any], outputs: int) -> int:
        """Add a command; return the ref of its first output.

        Raises:
            ProcDied: A process of the team has ended.
            MeshStopped: The block that owns the processes is being left.
            RuntimeError: This is another thread than that of the mesh.
            MeshError: One cannot hold tensors, or is not there yet.
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
        first = engine.new_refs(outputs)
        stream += (plan.number, first)
        stream += operands
        line = issuing_line()
        self._new_lines.append(line)
        self.issued += 1  # it will be executed, even if the recorder refuses it
        recorder = engine.shapes.recorder
        if recorder is not None:
            recorder.took(self, plan, first, outputs, operands, line, freed)
        self._latest = recent = (self._latest << _PLAN_BITS ^ plan.number) & _LATEST
        count = self.issued - self.first
        if count >= limits.TENSOR_BATCH_COMMANDS and (
            recent * _MIXER & _END_OF_BATCH == 0 or count >= limits.TENSOR_BATCH_COMMANDS_MAX
        ):
            engine.flush_team(self)
        return first

    def begin(self) -> None:
        """Make way for something that is sent to the ranks: it comes after what was issued to others that they are in.

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
        """Add a command that is no operation: see `protocol`.

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
        """Send word of what was freed, and return it."""
        freed, self.freed = self.freed, []
        if not self.stream:
            self.first = self.issued
        self.living -= len(freed)
        self.stream += (FREE, freed)
        return freed

    def add_body(self, body: Buffer) -> int:
        """Let the next command carry a body; return its number, an operand."""
        self.bodies.append(body)
        return len(self.bodies) - 1

    def check(self) -> None:
        """Refuse commands when no rank is left to execute them."""
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
        """Take out what is to be sent: number of the first command, commands, bodies."""
        if self.freed:
            self.take_freed()
        taken = self.first, self.stream, self.bodies
        if self._new_lines:
            self.lines.append((self.first, self._new_lines))
        self.stream, self.bodies, self._new_lines = [], [], []
        self.first = self.issued
        return taken

    def progressed(self, peer: Peer, count: int, failed: Sequence[tuple[int, str]]) -> None:
        """Learn what a rank has executed, and what of it has failed."""
        for number, what in failed:
            self.failure(number, what)
        self.done[peer] = max(count, self.done.get(peer, 0))
        executed = self.executed
        while self.lines and self.lines[0][0] + len(self.lines[0][1]) <= executed:
            self.lines.popleft()

    @property
    def executed(self) -> int:
        """Commands that every rank has executed."""
        return min(self.done.get(peer, 0) for peer in self.peers)

    def is_behind(self, peer: Peer) -> bool:
        """Whether a process has not executed all that was issued."""
        return self.done.get(peer, 0) < self.issued

    @property
    def awaited_line(self) -> str:
        """Where the first command was issued that some rank has not executed."""
        return self._line_of(self.executed)

    def failure(self, number: int, what: str = "") -> TeamFailure:
        """Return the record of a command that has failed; a rank may have said why before it reports its progress."""
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
        return "a line that is not known any more"


def issuing_line() -> Line:
    """Return the innermost line that is neither of torch nor of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.startswith(_OWN):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    here = sys._getframe(0)
    return here.f_code, here.f_lineno


# ---- issue a kernel of ours, as `issue` does an operator of torch ----------------------------------------------------

_LEAF = pytree.tree_structure(0)


def call_kernel(
    team: Team, name: str, *args: Any, outputs: Sequence[Meta] = (), writes: Sequence[int] = ()
) -> list[MeshTensor]:
    """Run a kernel on every rank of a team.

    Args:
        team: The ranks.
        name: Of the kernel.
        args: Mesh tensors of the team, in lists and tuples if need be; memoryviews, which go as bodies; and data.
            Whole numbers vary from command to command.
        outputs: Metadata of what it returns.
        writes: Places, among the tensors, bodies and numbers of `args`, of tensors that it changes.

    Returns:
        The new tensors.
    """
    check_not_compiled()
    if outputs and has_changed_bases():  # also with gradients off: so our differentiable functions call this
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


# ---- `Operations`: what a mesh tensor is asked for, and rooms above this one do --------------------------------------


@attrs.frozen
class Operations:
    """Functions that take a mesh tensor first, or what becomes one; `assembly.py` hands them in.

    Attributes:
        issue: Runs an operator of torch on the ranks.
        make_global: Runs a factory of torch, which makes a global tensor.
        upload: Puts a tensor of this process on every rank.
        put_global: Puts one on the ranks as a global tensor.
        whole: Makes a tensor that each rank has a global one.
        reduce, reduce_, slice_mesh, to_mesh, to_local, to_global: See `MeshTensor`.
        list_now, text_now, formatted_now: The values, waited for here.
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
