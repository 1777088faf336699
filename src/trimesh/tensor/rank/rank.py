"""Execution of commands on the tensors of one rank, in the rank's own thread; independent of links.

A command that fails poisons its outputs and the tensors that it writes to. A command with a poisoned operand is not run
and poisons its own outputs. Nothing else is affected; the error is raised by a fetch. A poisoned in-place target keeps
its memory: a command that overwrites all of it heals the target, and tensors that share only the overwritten memory.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import torch

from trimesh import limits
from trimesh.errors import Origin
from trimesh.ids import ProcId
from trimesh.shape.extent import Extent
from trimesh.tensor.protocol.messages import MOVE_OPERANDS, Answer
from trimesh.tensor.rank.kernel import Poison, Signature, heal, kept_of, laid_out, memory_of

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc
    from trimesh._runtime.peers import Peer
    from trimesh.tensor.dtensor.local_trace import LearntReplay


_TAKEN_APART: Final = frozenset({"redistribute", "redistribute_back", "sum_together", "to_local", "to_global"})
"""Kernels of trimesh that only apply operators to parts."""


def is_of_operators(signature: Signature) -> bool:
    """Return whether an operation is an operator of torch, or a kernel made of them, that only makes tensors."""
    kernel = signature.kernel
    if signature.has_info:
        return False
    return kernel is None or kernel.operator is not None or kernel.name in _TAKEN_APART


@attrs.frozen(eq=False)
class VaryingCommand:
    """A command of a recording that differs between replays.

    Attributes:
        command: The command, with read-only bodies and a move that counts from 0.
        move: Index of the operand that is the number of a move; None if there is none.
    """

    command: Command
    move: int | None

    def execute(self, rank: Rank, team: TeamOnRank, first_move: int = 0) -> None:
        """Run the command with copies of its bodies, as tensors made from them may be written to."""
        operands: list[Any] = [
            memoryview(bytearray(operand)) if kind == "b" else operand
            for kind, operand in zip(self.command.signature.kinds, self.command.operands, strict=True)
        ]
        if self.move is not None:
            operands[self.move] += first_move
        attrs.evolve(self.command, operands=operands).execute(rank, team)


def varying(step: Step) -> Step:
    """Return a step as a recording stores it."""
    if isinstance(step, Command):
        kernel = step.signature.kernel
        move = None if kernel is None else MOVE_OPERANDS.get(kernel.name)
        if move is not None or "b" in step.signature.kinds:
            return VaryingCommand(step, move)
    return step


def execute(step: Step, rank: Rank, team: TeamOnRank, first_move: int, *, is_counted: bool = False) -> None:
    """Run a step of a recording, or, with `is_counted`, of a sequence, each command of which is counted."""
    number = team.done
    if type(step) is VaryingCommand:
        step.execute(rank, team, first_move)
    else:
        step.execute(rank, team)
    if not is_counted:
        team.done = number


@attrs.define(eq=False)
class ReplayRecord:
    """A recording: stores commands for replays.

    Attributes:
        number: Number of the recording.
        parts: The commands, in parts; commands of teams that share ranks may run between two parts.
        formals: Refs of the formal tensors, to which a replay binds its arguments.
        results: Refs of its results.
        captured: Refs of tensors from before the recording; held as long as the recording.
        carried: Pairs of refs: kept by one replay, captured by the next.
        locals: Learnt replays, one for each part, each of which runs as many steps of its part as it can.
        held: The captured tensors.
        borrowed: Refs of captured tensors that the current replay has added to the rank's tensors.
    """

    number: int
    parts: Sequence[Sequence[Step]]
    formals: Sequence[int]
    results: Sequence[int]
    captured: Sequence[int]
    carried: Sequence[tuple[int, int]]
    locals: Sequence[LearntReplay]
    held: dict[int, object] = attrs.field(factory=dict[int, object])
    borrowed: Sequence[int] = ()

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        for ref in self.captured:
            if ref in rank.values:
                self.held[ref] = rank.values[ref]
        team.recordings[self.number] = self
        team.done += 1

    def begin(self, values: dict[int, Any], formals: Sequence[int]) -> None:
        """Bind the captured, carried and formal refs that a replay reads."""
        self.borrowed = [ref for ref in self.held if ref not in values]  # the controller has dropped its handle
        for ref in self.borrowed:
            values[ref] = self.held[ref]
        for kept, captured in self.carried:
            if kept in values:
                values[captured] = values[kept]
        for formal, given in zip(self.formals, formals, strict=True):
            if given in values:
                values[formal] = values[given]

    def end(self, values: dict[int, Any], first: int) -> None:
        """Remove these refs, and give the results their own."""
        for index, ref in enumerate(self.results):
            values[first + index] = values.pop(ref)
        for ref in (*self.formals, *(captured for _, captured in self.carried), *self.borrowed):
            found = values.pop(ref, None)
            if ref in self.held and type(found) is Poison:
                self.held[ref] = found


@attrs.frozen
class Replay:
    """Replay one part of a recording.

    Attributes:
        number: Number of the recording.
        part: Index of the part.
        first: Ref of the first result; used by the last part.
        formals: Refs of the arguments; used by the first part.
        first_move: Number of the first move.
    """

    number: int
    part: int
    first: int
    formals: Sequence[int]
    first_move: int

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        recording = team.recordings[self.number]
        assert isinstance(recording, ReplayRecord)
        if self.part == 0:
            recording.begin(rank.values, self.formals)
        steps = recording.parts[self.part]
        done = recording.locals[self.part].run(rank, team, steps, self.first_move)
        for step in steps[done:]:
            execute(step, rank, team, self.first_move)
        if self.part == len(recording.parts) - 1:
            recording.end(rank.values, self.first)
        team.done += 1


@attrs.frozen
class Forget:
    """Drop a recording, with the tensors that it has captured."""

    number: int

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        del rank
        team.recordings.pop(self.number, None)
        team.done += 1


# ---- rank ------------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class TeamOnRank:
    """A team, as one of its ranks sees it.

    Attributes:
        number: Number of the team.
        extent: Extent of the view.
        ranks: Ranks in the mesh, row-major.
        procs: Processes of these ranks.
        index: Index of this rank, not counting ranks that are missing from the view.
        place: Index of this rank in the extent, counting missing ranks.
        done: Commands executed.
        steps: Operations executed, counting each operation of a recording; all ranks agree on an operation's number.
        failed: Root-cause failures that have not been reported: number of the command, description.
        recordings: Recordings, by number.
        above: State of kernels for this team, by class.
        on_failed: Called when an operation was not executed here.
    """

    number: int
    extent: Extent
    ranks: Sequence[int]
    procs: Sequence[ProcId]
    index: int
    place: int
    done: int = 0
    steps: int = 0
    failed: list[tuple[int, str]] = attrs.field(factory=list[tuple[int, str]])
    recordings: dict[int, ReplayRecord] = attrs.field(factory=dict[int, "ReplayRecord"])
    above: dict[type, Any] = attrs.field(factory=dict[type, Any])
    on_failed: list[Callable[[], None]] = attrs.field(factory=list[Callable[[], None]])


class Step(Protocol):
    """A step of a command stream."""

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        """Execute the step. Never raises."""
        ...


@attrs.frozen
class Free:
    """Forget tensors."""

    refs: Sequence[int]

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        del team
        for ref in self.refs:
            rank.values.pop(ref, None)
            if rank.results:
                rank.results.pop(ref, None)


@attrs.frozen
class Command:
    """An operation with its operands, as received.

    Attributes:
        signature: The operation.
        first: Ref of the first new tensor.
        operands: Refs, numbers, bodies.
    """

    signature: Signature
    first: int
    operands: Sequence[Any]

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        rank.execute(team, self)


class Outside(Protocol):
    """Interface of a rank to its process. Every method may be called from the rank's thread.

    Attributes:
        proc: The process.
        controller: Process that sends the rank's commands.
        engine: Number of the engine in the controller.
    """

    proc: Proc
    controller: Peer
    engine: int

    def reply(self, request: int, value: Any) -> None:
        """Send a value, or a `Poison`, to the controller."""
        ...

    def reply_packed(self, request: int, data: bytes) -> None:
        """Send packed tensors to the controller."""
        ...

    def reply_lent(self, request: int, described: list[Any], memory: memoryview, *, is_staged: bool) -> None:
        """Lend memory to the controller and send the description of its contents; see `deliver`."""
        ...

    def run_in_trio(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run an async function in the Trio loop of the process and return what it returns."""
        ...

    def ask(
        self,
        team: TeamOnRank,
        verb: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        numbers: Sequence[int] = (),
        error: BaseException | None = None,
        seconds: float = limits.COLLECTIVE_SECONDS,
    ) -> Answer:
        """Query the store of a team and wait for the answer; see `Stores.ask`."""
        ...

    def leave(self, team: TeamOnRank, error: BaseException, *, is_waited_for: bool = True) -> None:
        """Report that this rank takes no part in the current operation of a team.

        Args:
            team: The team.
            error: The reason.
            is_waited_for: Whether to return only after the store has the report.
        """
        ...

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Schedule a function in Trio's thread and return at once."""
        ...

    def origin(self, what: str) -> Origin:
        """Return the coordinates of the rank, for an error of the operation `what`."""
        ...


@attrs.define(eq=False)
class Rank:
    """One rank of a mesh of processes.

    Attributes:
        mesh: Name of the mesh.
        extent: Extent of the whole mesh.
        number: Number of this rank.
        device: Device of its tensors.
        outside: Interface to its process.
        values: Tensors, by ref.
        teams: Teams of this rank, by number.
        above: State of kernels for this rank, by class.
        results: By ref of a status tensor: refs of the results whose validity it states.
        copies_of: Returns the base of a tensor (the tensor itself if it is no view), and the base's views that have
            memory of their own: a write to one of them is carried over to all.
    """

    mesh: str
    extent: Extent
    number: int
    device: torch.device
    outside: Outside
    values: dict[int, Any] = attrs.field(factory=dict[int, Any])
    teams: dict[int, TeamOnRank] = attrs.field(factory=dict[int, TeamOnRank])
    above: dict[type, Any] = attrs.field(factory=dict[type, Any])
    results: dict[int, range] = attrs.field(factory=dict[int, range])
    copies_of: Callable[[torch.Tensor], tuple[torch.Tensor, Sequence[torch.Tensor]]] | None = None

    def execute(self, team: TeamOnRank, command: Command) -> None:
        """Run one command of a team. Never raises."""
        try:
            poison = self._run(team, command)
        except BaseException as error:  # noqa: BLE001 - kept as poison, raised by a fetch
            self.fail(team, command, error)
        else:
            if poison is not None:
                self._spoil(command, poison)
                self.leave(team, poison)
        team.done += 1
        team.steps += 1

    def _run(self, team: TeamOnRank, command: Command) -> Poison | None:
        """Run one command, unless an operand is poisoned; return the poison then."""
        signature = command.signature
        operands = command.operands
        poison: Poison | None = None
        if "r" in signature.kinds:
            operands = list(operands)
            for index, kind in enumerate(signature.kinds):
                if kind == "r":
                    found = operands[index] = self._value(team, signature, operands[index])
                    if type(found) is Poison:
                        poison = poison or found
        kernel = signature.kernel
        is_good = poison is None or (kernel is not None and kernel.takes_poison)
        if not is_good and not signature.take_kept(operands):
            return poison
        if kernel is None:
            result = signature.run(operands)
        elif kernel.learnt is not None and poison is None:
            result = kernel.learnt.run(signature, operands, self, team)
        else:
            result = signature.run(operands, self, team)
        self._keep(signature, command.first, result)
        if not is_good:
            self._kept(command, operands, poison)
        return None

    def fail(self, team: TeamOnRank, command: Command, error: BaseException) -> None:
        """Poison the outputs and targets of a failed command with its error, and report the failure.

        The frame that calls this is kept with the error, so it must hold no tensors.
        """
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        team.failed.append((team.done, _said(command.signature, error)))
        poison = Poison(team.number, team.done, command.signature.name, error)
        self._spoil(command, poison)
        self.leave(team, poison)

    def leave(self, team: TeamOnRank, poison: Poison) -> None:
        """Release ranks that wait for this one in the current operation, in which it cannot take part (rule N3)."""
        try:
            self.outside.leave(team, poison.error, is_waited_for=bool(team.on_failed))
        except BaseException as error:  # noqa: BLE001 - the process, or the team, has come to its end
            traceback.clear_frames(error.__traceback__)
        for function in team.on_failed:
            function()

    def _value(self, team: TeamOnRank, signature: Signature, ref: int) -> Any:
        found = self.values.get(ref)
        if found is None:
            return Poison(team.number, team.done, signature.name, lost())
        return found

    def _keep(self, signature: Signature, first: int, result: Any) -> None:
        outs, strides = signature.outs, signature.strides
        if isinstance(result, torch.Tensor) and len(outs) == 1:
            if outs[0] >= 0:
                self.values[first] = laid_out(result, strides[0]) if strides else result
            return
        leaves = list(_leaves(result))
        if len(leaves) != len(outs):
            raise RuntimeError(
                f"{signature.name} must return {len(outs)} values, as at the controller, got {len(leaves)}"
            )
        for leaf, out in zip(leaves, outs, strict=True):
            if out >= 0:
                made = leaf.of_result() if type(leaf) is Poison else leaf
                self.values[first + out] = laid_out(made, strides[out]) if strides else made
        if signature.has_info:
            self.results[first + max(outs)] = range(first, first + max(outs) + 1)

    def _spoil(self, command: Command, poison: Poison) -> None:
        poison = poison.of_result()
        for out in command.signature.outs:
            if out >= 0:
                self.values[command.first + out] = poison
        signature = command.signature
        for index in signature.writes:
            self._spoil_storage(command.operands[index], poison)
        is_of_torch = signature.kernel is None or signature.kernel.operator is not None
        if is_of_torch and max(signature.outs, default=-1) < 0 and not signature.writes:
            # A check has no output that could carry the error: poison the tensors that it has checked.
            for ref in [ref for ref, kind in zip(command.operands, signature.kinds, strict=True) if kind == "r"]:
                self.values.update(dict.fromkeys(self.values.keys() & self.results.get(ref, (ref,)), poison))

    def _spoil_storage(self, ref: int, poison: Poison) -> None:
        """Poison the target of a failed or skipped write, and all tensors that share its memory."""
        written = kept_of(self.values.get(ref))
        memories = {memory_of(written)}
        if self.copies_of is not None and isinstance(written, torch.Tensor):
            base, copies = self.copies_of(written)
            memories.update(memory_of(one) for one in (base, *copies))
        memories.discard(None)
        if memories:
            for table in self._tables():
                for other, found in table.items():
                    kept = kept_of(found)
                    if memory_of(kept) in memories:
                        table[other] = attrs.evolve(poison, kept=kept)
        self.values[ref] = attrs.evolve(poison, kept=written)

    def _kept(self, command: Command, operands: Sequence[Any], poison: Poison | None) -> None:
        """Heal tensors that a command has overwritten; poison views that it has made of a poisoned tensor."""
        assert poison is not None
        for out in command.signature.outs:
            if out >= 0:
                made = self.values[command.first + out]
                self.values[command.first + out] = attrs.evolve(poison, kept=made)
        for index in command.signature.writes:
            written = operands[index]
            healed = [written]
            if self.copies_of is not None and isinstance(written, torch.Tensor):
                # Copied views of it are made again before they are read.
                healed += [one for one in self.copies_of(written)[1] if self.copies_of(one)[0] is written]
            for table in self._tables():
                for one in healed:
                    heal(table, one)

    def _tables(self) -> Iterator[dict[int, Any]]:
        """Yield the tables of tensors: of this rank, and of each recording."""
        yield self.values
        for team in self.teams.values():
            for recording in team.recordings.values():
                yield recording.held


def lost() -> LookupError:
    """Return the error for a tensor that a rank does not have."""
    return LookupError("the tensor was lost with a process that has been restarted since")


def _said(signature: Signature, error: BaseException) -> str:
    lines = traceback.format_exception_only(error)
    return f"{signature.name}: {''.join(lines).strip()}"[: limits.REASON_CHARS_MAX]


def _leaves(result: Any) -> Iterator[Any]:
    if isinstance(result, list | tuple):
        for part in result:
            yield from _leaves(part)
    else:
        yield result
