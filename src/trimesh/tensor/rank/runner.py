"""Thread of a rank, which executes its commands, so that Trio's loop never waits for an operation (rule N3)."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
import trio

from trimesh.tensor.rank.rank import Command, Rank, Replay, Step, TeamOnRank, VaryingCommand

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc

Batch = tuple[TeamOnRank, list[Step]]

_REPORT_COMMANDS: Final = 512
"""Commands after which progress is reported although more are queued; far below the limit of commands in flight."""


_COMPUTING: Final = frozenset((Command, Replay, VaryingCommand))
"""Steps that run operators of the program, whose errors they keep."""


@attrs.define(eq=False)
class Runner:
    """Executes the batches of one rank in order, in a thread; in a task if the process is simulated.

    Attributes:
        proc: The process.
        rank: The rank.
        on_progress: Called in Trio's thread when commands of a team have been executed.
    """

    proc: Proc
    rank: Rank
    on_progress: Callable[[TeamOnRank], None]
    _batches: queue.SimpleQueue[Batch | None] = attrs.field(factory=queue.SimpleQueue)
    _token: trio.lowlevel.TrioToken = attrs.field(factory=trio.lowlevel.current_trio_token)
    _reported: dict[int, int] = attrs.field(factory=dict[int, int])
    _thread: threading.Thread | None = None
    _simulated: deque[Batch] = attrs.field(factory=deque[Batch])
    _is_serving: bool = False
    _random: torch.Tensor | None = None

    def put(self, team: TeamOnRank, steps: list[Step]) -> None:
        """Queue a batch of steps."""
        if self.proc.is_simulated:
            self._simulated.append((team, steps))
            if not self._is_serving:
                self._is_serving = self.proc.serve(self._take_turns)
            return
        if self._thread is None:
            # A daemon: its last operation may never end, and the process ends by `os._exit` without joining it.
            self._thread = threading.Thread(target=self._run, name=f"tensors of {self.rank.mesh}", daemon=True)
            self._thread.start()
        self._batches.put((team, steps))

    async def _take_turns(self) -> None:
        while self._simulated:
            await trio.lowlevel.checkpoint()
            team, steps = self._simulated.popleft()
            contextvars.Context().run(self._execute_simulated, team, steps)  # in which no mesh is active
            self.on_progress(team)
        self._is_serving = False

    def _execute_simulated(self, team: TeamOnRank, steps: list[Step]) -> None:
        """Execute in the thread that all ranks share, with this rank's own state of the random generator."""
        # Call the generator directly: torch's functions for its state include generators of meshes.
        generator = torch.default_generator
        before = generator.get_state()
        try:
            if self._random is None:
                generator.manual_seed(self.rank.number)
            else:
                generator.set_state(self._random)
            with torch.no_grad():
                self._execute(team, steps)
        finally:
            self._random = generator.get_state()
            generator.set_state(before)

    def _run(self) -> None:
        try:
            self._execute_batches()
        except BaseException as error:  # noqa: BLE001 - a bug: the controller must not wait for an ended thread
            self.tell(self.proc.serve, _break_down, error)

    def _execute_batches(self) -> None:
        torch.set_grad_enabled(False)  # per thread; the controller computes gradients
        if self.rank.device.type == "cuda":
            torch.cuda.set_device(self.rank.device)  # per thread, too: the device "cuda" of remote functions
        untold: dict[int, TeamOnRank] = {}
        while (batch := self._batches.get()) is not None:
            team, steps = batch
            self._execute(team, steps)
            del batch, steps  # they may hold the memory of bodies
            untold[team.number] = team
            if self._batches.empty():
                for one in untold.values():
                    self._report(one)
                untold.clear()
            elif team.done - self._reported.get(team.number, 0) >= _REPORT_COMMANDS:
                self._report(team)

    def _report(self, team: TeamOnRank) -> None:
        if team.done > self._reported.get(team.number, 0):
            self._reported[team.number] = team.done
            self.tell(self.on_progress, team)

    def _execute(self, team: TeamOnRank, steps: list[Step]) -> None:
        rank, sites = self.rank, self.proc.sites
        if sites is None:
            for step in steps:
                step.execute(rank, team)
            return
        for step in steps:
            inside = sites.operating(self.proc.proc_id) if type(step) in _COMPUTING else None
            with inside or nullcontext():
                step.execute(rank, team)

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Schedule a function in Trio's thread; do nothing if its loop has ended."""
        if threading.current_thread() is not self._thread:
            function(*args)
            return
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            pass  # the process is ending, and its owner knows

    def run_in_trio(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run an async function in Trio's loop, from the thread, and return its result.

        Raises:
            RuntimeError: The process is simulated.
        """
        if self.proc.is_simulated:
            raise RuntimeError(
                "collectives and moves between ranks need real processes: a simulation runs all ranks in one thread, "
                "where none can wait for another"
            )
        return trio.from_thread.run(function, *args, trio_token=self._token)

    def stop(self) -> None:
        """Let the thread end after the queued batches."""
        self._batches.put(None)


async def _break_down(error: BaseException) -> None:
    """Raise an error of the rank's thread in a task of the runtime, so that the process ends and reports it."""
    raise error
