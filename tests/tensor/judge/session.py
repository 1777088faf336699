"""Meshes that are kept for many programs, and the verdict on each program."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import msgspec
import torch
import trio
from tests.tensor.judge.comparison import Expected, Finding
from tests.tensor.judge.interpreter import MeshRun, RecordedRun, fails_at_first
from tests.tensor.judge.program import Extent, Program
from tests.tensor.judge.writing_table import OLDER_VIEWS

import trimesh
from trimesh import this_host

PRELOAD: Final = (
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._decomp",
    "torch._subclasses.fake_tensor",
)

BATCH: Final = 12
"""Programs that are issued before their values are fetched."""

BATCH_SECONDS: Final = 240.0
"""A batch that takes longer hangs."""


GONE_VIEW: Final = "changed in place"
"""In the words, or the notes, of errors of views that gradients cannot follow."""

UNREPEATABLE_VIEW: Final = re.compile("view size is not compatible|expects a tensor with|out of (bounds|range)")
"""In the words of torch for such a view, when it repeats the operation that made the view on the changed base."""


class Verdict(msgspec.Struct, frozen=True):
    """What came of one program.

    Attributes:
        program: The program.
        findings: How the mesh differs from plain torch, in the order in which tensors were made.
        before: How many programs the same processes had run.
        is_ill_posed: Whether roundings decide what it computes, so that it was not compared.
    """

    program: Program
    findings: tuple[Finding, ...]
    before: int
    is_ill_posed: bool = False

    @property
    def kind(self) -> str:
        """ "right", "refused", or "wrong"."""
        kinds = {one.kind for one in self.findings}
        return "right" if not kinds else "refused" if kinds == {"refusal"} else "wrong"


class Bench:
    """The processes of one mesh, and what they have run so far.

    Args:
        procs: The processes.
        runs: How they run a program.
    """

    def __init__(self, procs: Any, runs: type[MeshRun] = MeshRun) -> None:
        self._procs = procs
        self._runs = runs
        self.history: list[Program] = []
        self.is_broken = False

    @property
    def before(self) -> int:
        """How many programs ran here."""
        return len(self.history)

    async def judge_one(self, program: Program) -> Verdict:
        """Run one program, and compare what it computes."""
        return (await self.judge([program]))[0]

    async def judge(self, programs: Iterable[Program]) -> list[Verdict]:
        """Run programs, one after the other, and compare what they compute."""
        prepared = [(Expected(program), program) for program in programs]
        runs: list[tuple[Expected, MeshRun | None, list[Finding]]] = []
        verdicts: list[Verdict] = []
        with trio.move_on_after(BATCH_SECONDS) as scope:
            for expected, program in prepared:
                runs.append(self._issue(expected, program))
            values = await self._fetched([run for _, run, _ in runs if run is not None])
            for expected, run, findings in runs:
                self.history.append(expected.program)
                if run is not None:
                    findings.extend(self._judged(expected, run, values.get(id(run), {})))
                verdicts.append(Verdict(expected.program, tuple(findings), self.before - 1, not expected.is_well_posed))
        if scope.cancelled_caught:
            self.is_broken = True
            return [Verdict(program, (Finding("hang", "", "no answer", ""),), self.before) for _, program in prepared]
        self.is_broken = any("ProcDied" in one.text for verdict in verdicts for one in verdict.findings)
        return verdicts

    def _issue(self, expected: Expected, program: Program) -> tuple[Expected, MeshRun | None, list[Finding]]:
        if not expected.is_well_posed or (expected.draws and self._runs is RecordedRun):
            return expected, None, []  # numbers of other calls are others
        if self._runs is RecordedRun and fails_at_first(program):
            return expected, None, []  # of a size that follows from values, for example
        try:
            run = self._runs(program, self._procs)
        except Exception as error:  # noqa: BLE001 - of any kind: it is reported
            return expected, None, [failed(error, "input", None, program)]
        run.run()
        return expected, run, []

    async def _fetched(self, runs: list[MeshRun]) -> dict[int, dict[str, Any]]:
        """Return the values of all tensors of the runs; where one has failed, its error in its place."""
        wanted = [
            (id(run), name, leaf)
            for run in runs
            for name, leaf in run.leaves().items()
            if isinstance(leaf, trimesh.tensor.MeshTensor)
        ]
        found: dict[int, dict[str, Any]] = {}
        for (number, name, _), value in zip(wanted, await fetch_each([one[2] for one in wanted]), strict=True):
            found.setdefault(number, {})[name] = value
        return found

    def _judged(self, expected: Expected, run: MeshRun, values: dict[str, Any]) -> Iterator[Finding]:
        steps = run.program.steps
        wanted = expected.failure()
        errors = [value for value in values.values() if isinstance(value, BaseException)]
        first = next(iter(errors), None)
        if run.failure is not None and first is None:
            first = run.failure.error
            if isinstance(first, BaseExceptionGroup):  # of the ranks that were waited for
                first = next(iter(trimesh.leaves(first)), first)
            operation = steps[run.failure.step].operation
        else:
            operation = "" if first is None else step_of(first, run.program)
        if wanted is not None and run.failure is not None and run.failure.step < len(steps) - 1:
            yield failed(
                first or run.failure.error, operation, wanted, run.program
            )  # at another place: the rest was not run here
            return
        if wanted is not None:
            yield from self._both_raise(wanted, first, run.program)
        elif first is not None:
            yield failed(first, operation, None, run.program)
            if run.failure is not None:  # what the step that was refused writes is not written here
                return
        healthy = {name: value for name, value in values.items() if not isinstance(value, BaseException)}
        yield from expected.compare(run, healthy)

    def _both_raise(self, wanted: BaseException, found: BaseException | None, program: Program) -> Iterator[Finding]:
        operation = program.steps[-1].operation
        if found is None:
            if isinstance(wanted, (IndexError, RuntimeError, TypeError, ValueError)):
                yield Finding(
                    "error", "", f"no error, should be {type(wanted).__name__}: {first_line(wanted)}", operation
                )
        elif type(found) is not type(wanted):
            yield failed(found, operation, wanted, program)


async def fetch_each(tensors: list[Any]) -> list[Any]:
    """Return the value of each tensor, or why it has none; by halves, so that few failures cost little."""
    if not tensors:
        return []
    try:
        return list(await trimesh.fetch([one.detach() for one in tensors]))
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - it is reported
        if len(tensors) == 1:
            return [next(iter(trimesh.leaves(error)), error) if isinstance(error, BaseExceptionGroup) else error]
    middle = len(tensors) // 2
    return [*await fetch_each(tensors[:middle]), *await fetch_each(tensors[middle:])]


def failed(error: BaseException, operation: str, wanted: BaseException | None, program: Program) -> Finding:
    """Return a finding for an error."""
    text = f"{type(error).__name__}: {first_line(error)}"
    if wanted is not None:
        text += f", should be {type(wanted).__name__}: {first_line(wanted)}"
    is_ours = isinstance(error, trimesh.RecordingError) or "trimesh." in text
    is_ours = is_ours or GONE_VIEW in "\n".join([str(error), *getattr(error, "__notes__", ())])
    has_older_view = any(step.operation in OLDER_VIEWS for step in program.steps)
    is_ours = is_ours or (has_older_view and UNREPEATABLE_VIEW.search(str(error)) is not None)
    refused = is_ours or (isinstance(error, NotImplementedError) and "aten." not in text)
    return Finding("refusal" if refused else "error", "", text, operation)


def first_line(error: BaseException) -> str:
    """Return how an error begins."""
    lines = str(error).strip().splitlines()
    return lines[0][:240] if lines else ""


def step_of(error: BaseException, program: Program) -> str:
    """Return the operation whose step an error of the ranks names."""
    for note in getattr(error, "__notes__", []):
        found = note.partition("<step ")[2].partition(">")[0]
        if found.isdigit() and int(found) < len(program.steps):
            return program.steps[int(found)].operation
    return ""


class Session:
    """Meshes of all extents that were needed so far.

    Attributes:
        runs: How they run programs.
        spent: Seconds that programs took on the mesh.
    """

    def __init__(
        self, host: Any, stack: Any, setup: Callable[[], None] | None = None, runs: type[MeshRun] = MeshRun
    ) -> None:
        self.runs = runs
        self._host = host
        self._setup = setup
        self._stack = stack
        self._benches: dict[Extent, Bench] = {}
        self._spares: dict[Extent, Bench] = {}
        self.spent = 0.0

    def planted(self, setup: Callable[[], None]) -> Session:
        """Return a session of processes that run a function before anything else; they end with this one."""
        return Session(self._host, self._stack, setup, self.runs)

    def _procs(self, extent: Extent) -> Any:
        setup = self._setup or self.runs.setup
        return self._host.spawn_procs(
            dict(extent), grace=10, supervision=trimesh.Isolate(), output="discard", setup=setup
        )

    async def bench(self, extent: Extent) -> Bench:
        """Return the bench of an extent, a new one if the last one does not answer any more."""
        found = self._benches.get(extent)
        if found is None or found.is_broken:
            procs = await self._stack.enter_async_context(self._procs(extent))
            found = self._benches[extent] = Bench(procs, self.runs)
        return found

    async def spare(self, extent: Extent) -> Bench:
        """Return a bench of an extent that is kept for the shrinker, so that the history of the others stays theirs."""
        found = self._spares.get(extent)
        if found is None or found.is_broken:
            procs = await self._stack.enter_async_context(self._procs(extent))
            found = self._spares[extent] = Bench(procs, self.runs)
        return found

    @asynccontextmanager
    async def fresh(self, extent: Extent) -> AsyncIterator[Bench]:
        """Have processes that have run nothing, for a block."""
        async with self._procs(extent) as procs:
            yield Bench(procs, self.runs)

    async def judge(self, programs: Iterable[Program]) -> AsyncGenerator[Verdict, None]:
        """Yield the verdict on each program; they run in batches of one extent, otherwise in order."""
        waiting: dict[Extent, list[Program]] = {}
        for program in programs:
            batch = waiting.setdefault(program.extent, [])
            batch.append(program)
            if len(batch) == BATCH:
                for verdict in await self._batch(waiting.pop(program.extent)):
                    yield verdict
        for batch in waiting.values():
            for verdict in await self._batch(batch):
                yield verdict

    async def _batch(self, batch: list[Program]) -> list[Verdict]:
        bench = await self.bench(batch[0].extent)
        started = time.perf_counter()
        found = await bench.judge(batch)
        self.spent += time.perf_counter() - started
        return await self._apart(batch) if bench.is_broken else found

    async def _apart(self, batch: list[Program]) -> list[Verdict]:
        """Run programs one at a time, after one of them has hung or ended a process: which one is not known."""
        found = []
        for program in batch:
            bench = await self.spare(program.extent)
            found.append(await bench.judge_one(program))
        return found


@asynccontextmanager
async def session(runs: type[MeshRun] = MeshRun) -> AsyncIterator[Session]:
    """Open a session, whose processes end with the block."""
    torch.set_num_threads(1)
    gc.freeze()  # each recording collects garbage, and need not look at all of torch for it
    async with this_host().warm(preload=PRELOAD) as host, AsyncExitStack() as stack:
        yield Session(host, stack, runs=runs)
