r"""Collection of metrics by the controller: samples of all processes, for its readers.

    process: ring --Observed--> its owner: `below` --Observed--> ... --> controller: newest samples --> sinks, readers

SA-1 Nothing is collected while there is neither a sink nor a reader.
SA-2 A process that does not answer is not asked again until it does; none is asked by a signal.
SA-3 A sink that is slow, or fails, delays no call: its oldest batches are dropped and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.snapshot import take_samples

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._wire.observed import ProcView, SampleRow


_log = logging.getLogger("trimesh")


class SampleBatch(msgspec.Struct, frozen=True):
    """What was collected at once.

    Attributes:
        at: Unix time.
        views: Reports of the processes that answered, the controller's first.
        samples: New samples, in the order in which they arrived.
    """

    at: float
    views: Sequence[ProcView]
    samples: Sequence[SampleRow]


class MetricSink(Protocol):
    """Receiver of batches, in the Trio thread; it must not wait."""

    def take(self, batch: SampleBatch) -> None: ...


class Sampling:
    """Collects samples once a second, while there are sinks or readers."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._sinks: list[MetricSink] = []
        self._rows: deque[SampleRow] = deque(maxlen=limits.METRIC_SAMPLES_COLLECTED)
        self._count = 0
        self._read_until = 0.0
        self._is_running = False
        self._lock = trio.Lock()

    def add(self, sink: MetricSink) -> None:
        self._sinks.append(sink)
        self._start()

    def remove(self, sink: MetricSink) -> None:
        self._sinks.remove(sink)

    def read(self, after: int) -> tuple[int, list[SampleRow]]:
        """Return the number of the newest sample, and those after number `after`; keep collecting for a while."""
        self._read_until = self._proc.now() + limits.SAMPLING_READER_SECONDS
        self._start()
        missing = min(len(self._rows), max(0, self._count - after))
        return self._count, list(self._rows)[len(self._rows) - missing :]

    async def collect(self) -> None:
        """Collect samples once, now."""
        async with self._lock:
            views = await self._proc.inquiries.ask(takes=True)
            samples = take_samples(self._proc)
            self._rows.extend(samples)
            self._count += len(samples)
            batch = SampleBatch(self._proc.metrics.now(), views, samples)
            for sink in list(self._sinks):
                sink.take(batch)

    def _start(self) -> None:
        if not self._is_running:
            self._is_running = self._proc.serve(self._run)

    @trio.lowlevel.enable_ki_protection
    async def _run(self) -> None:
        try:
            while self._sinks or self._proc.now() < self._read_until:
                began_at = time.thread_time()
                await self.collect()
                spent = 0.0 if self._proc.is_simulated else time.thread_time() - began_at
                await trio.sleep(max(limits.SAMPLING_SECONDS, spent / limits.SAMPLING_SHARE))
        except Exception as error:  # noqa: BLE001 - observers must not end the run
            _log.warning("metrics of this run are not collected any more", exc_info=error)
        finally:
            self._is_running = False


def sampling_of(proc: Proc) -> Sampling:
    """Return the collector of a controller."""
    found = proc.above.get(Sampling)
    if not isinstance(found, Sampling):
        found = proc.above[Sampling] = Sampling(proc)
    return found


class SinkThread:
    """A sink that writes batches in a thread; at once in a simulation, whose clock does not wait for threads.

    Args:
        write: Writes one batch; may block.
        name: Where to, for the warning about a failure.
    """

    def __init__(self, write: Callable[[SampleBatch], None], name: str, *, is_inline: bool = False) -> None:
        self.dropped = 0
        self._write = write
        self._name = name
        self._has_failed = False
        self._batches = queue.Queue[SampleBatch | None](limits.SAMPLING_BATCHES)
        self._thread: threading.Thread | None = None
        self._last: Callable[[], None] = lambda: None
        if not is_inline:
            self._thread = threading.Thread(target=self._run, name="trimesh metrics", daemon=True)
            self._thread.start()

    def take(self, batch: SampleBatch) -> None:
        if self._has_failed:
            return
        if self._thread is None:
            self._write_safely(batch)
            return
        while True:
            try:
                self._batches.put_nowait(batch)
            except queue.Full:
                self._drop_oldest()
            else:
                return

    def drop_all(self) -> None:
        """Drop what is not written yet: no reader will need it."""
        self._has_failed = True

    def end(self, seconds: float, last: Callable[[], None] = lambda: None) -> None:
        """Write what is left, call `last` and end the thread. Blocking: at most `seconds`."""
        self._last = last
        if self._thread is None:
            last()
        else:
            ends_at = time.monotonic() + seconds
            try:
                self._batches.put(None, timeout=seconds)
            except queue.Full:
                self._drop_oldest()
                self._batches.put_nowait(None)
            self._thread.join(max(0.0, ends_at - time.monotonic()))
        if self.dropped:
            _log.warning("%d batches of metrics were not written to %s: it is too slow", self.dropped, self._name)

    def _drop_oldest(self) -> None:
        try:
            self._batches.get_nowait()
        except queue.Empty:
            return
        self.dropped += 1

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            self._write_safely(batch)
        try:
            self._last()
        except Exception as error:  # noqa: BLE001 - as below
            _log.warning("the end of the metrics is missing in %s: %s: %s", self._name, type(error).__name__, error)

    def _write_safely(self, batch: SampleBatch) -> None:
        if self._has_failed:
            return
        try:
            self._write(batch)
        except Exception as error:  # noqa: BLE001 - a full disk must not end the run
            self._has_failed = True
            _log.warning("no more metrics are written to %s: %s: %s", self._name, type(error).__name__, error)
