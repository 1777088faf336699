"""Files of metrics, written while a block is open: JSON lines, and event files of TensorBoard."""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.life import lease_proc
from trimesh._runtime.sampling import SampleBatch, SinkThread, sampling_of
from trimesh._runtime.tasks import in_trio_block
from trimesh.context_managers import asynccontextmanager

_log = logging.getLogger("trimesh")
JSONL_FILE: Final = "metrics.jsonl"


def log_to(path: str | os.PathLike[str], /, *formats: str) -> AbstractAsyncContextManager[None]:
    """Write the metrics of all processes into files while a block is open: `async with trimesh.log_to("runs/x"):`.

    Open it in the controller, around the blocks that log: leaving it writes what is there. Files are appended to.

    Args:
        path: Folder of the files, made if missing.
        formats: "jsonl": `metrics.jsonl`, a line for each call of `log`, and once a second for each changed counter,
            gauge and histogram. "tensorboard": event files, a run for each member, of at most
            `limits.TENSORBOARD_MEMBERS` of them. Without any, "jsonl".

    Raises:
        ValueError: A format is unknown.
        ModuleNotFoundError: On entering: the package tensorboard is not installed.
        OSError: On entering: the folder cannot be made or written to.
        RuntimeError: On entering: in an actor.

    Blocking: entering for the import of tensorboard; leaving until all is written, at most some seconds; cancellable
        only before. A disk that fails later is logged, and ends no run.
    """
    chosen = formats or ("jsonl",)
    for one in chosen:
        if one not in _WRITERS:
            raise ValueError(f"log_to writes {' and '.join(map(repr, _WRITERS))}, got {one!r}")
    return in_trio_block(_log_to(Path(path), tuple(dict.fromkeys(chosen))))


@asynccontextmanager
async def _log_to(path: Path, formats: tuple[str, ...]) -> AsyncGenerator[None, None]:
    async with lease_proc() as (proc, family):
        if family.root is not None:
            raise RuntimeError(
                "log_to writes the metrics of a whole run, so it is opened in the controller: an actor logs"
            )
        writers = _opened(path, formats) if proc.is_simulated else await trio.to_thread.run_sync(_opened, path, formats)
        series = _ChangedSeries()

        def write(batch: SampleBatch) -> None:
            for record in series.records(batch):
                for writer in writers:
                    writer.add(record)
            for writer in writers:
                writer.flush()

        def close() -> None:
            for writer in writers:
                writer.close()

        sink, sampling = SinkThread(write, str(path), is_inline=proc.is_simulated), sampling_of(proc)
        sampling.add(sink)
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                await sampling.collect()
                sampling.remove(sink)
                if proc.is_simulated:
                    sink.end(0.0, close)
                else:
                    await trio.to_thread.run_sync(sink.end, limits.SAMPLING_END_SECONDS, close)


def _opened(path: Path, formats: tuple[str, ...]) -> list[Any]:
    path.mkdir(parents=True, exist_ok=True)
    return [_WRITERS[one](path) for one in formats]


class MetricRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a JSONL file.

    Attributes:
        at: Unix time.
        name, mesh, point, incarnation: As in `SampleRow`.
        values: Values by name; of a histogram its sum.
        kind: "value", "counter", "gauge" or "histogram".
        step: Step of logged values.
        bounds, counts: Buckets of a histogram.
    """

    at: float
    name: str
    values: dict[str, float]
    kind: str = "value"
    step: int | None = None
    mesh: str = ""
    point: dict[str, int] = {}
    incarnation: int = 0
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


class _ChangedSeries:
    """Turns batches into records: logged values, and other series that have changed since the last batch."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str, str], tuple[float, tuple[int, ...]]] = {}

    def records(self, batch: SampleBatch) -> Iterator[MetricRecord]:
        for one in batch.samples:
            place = (one.mesh, one.point, one.incarnation)
            yield MetricRecord(one.at, one.name, one.values, "value", one.step, *place)
        if len(self._last) > limits.HISTORY_SERIES:
            self._last.clear()
        for view in batch.views:
            for row in view.metrics:
                key = (row.proc, row.name, row.metric)
                if row.kind != "value" and self._last.get(key) != (row.value, row.counts):
                    self._last[key] = row.value, row.counts
                    place = (row.mesh, row.point, row.incarnation)
                    yield MetricRecord(
                        batch.at, row.name, {row.metric: row.value}, row.kind, None, *place, row.bounds, row.counts
                    )


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = open(path / JSONL_FILE, "ab")  # noqa: SIM115 - closed by its block

    def add(self, record: MetricRecord) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _EventFiles:
    """Event files of TensorBoard, which its own writer makes: a run for each member."""

    def __init__(self, path: Path) -> None:
        try:
            writer: Any = importlib.import_module("tensorboard.summary")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'log_to(..., "tensorboard") needs the package tensorboard: pip install tensorboard', name=error.name
            ) from error
        self._make: Any = writer.Writer
        self._path = path
        self._writers: dict[str, Any] = {}
        self._steps: dict[tuple[str, str], int] = {}
        self._has_warned = False

    def add(self, record: MetricRecord) -> None:
        writer = self._writer(record.name)
        if writer is None:
            return
        total = sum(record.counts)
        for name, value in record.values.items():
            shown, number = (f"{name}/mean", value / total) if total else (name, value)
            step = record.step
            if step is None:
                key = (record.name, name)
                step = self._steps[key] = self._steps.get(key, -1) + 1
            if not math.isnan(number):
                writer.add_scalar(shown, number, step, wall_time=record.at)

    def _writer(self, name: str) -> Any:
        found = self._writers.get(name)
        if found is None:
            if len(self._writers) >= limits.TENSORBOARD_MEMBERS:
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning(
                        "TensorBoard gets the metrics of the first %d members that log; %s and others are left out: "
                        '"jsonl" has them all',
                        limits.TENSORBOARD_MEMBERS,
                        name,
                    )
                return None
            found = self._writers[name] = self._make(str(self._path / re.sub(r"[^\w.=,\[\]-]", "_", name)))
        return found

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


_WRITERS: Final[dict[str, Any]] = {"jsonl": _JsonLines, "tensorboard": _EventFiles}
