"""What metrics cost the code that logs them, beside a counter of prometheus_client and a line of logging.

In one process, in turn, so that all see the same neighbours; the line goes to a stream in memory. `history` is the
processor time of a controller for collecting and writing what 8 processes log, twice a second each.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable

from bench.scale import Metric, Samples, Scale

METRICS = [
    Metric("metrics_log", "log of three values", "us", goals=(2,)),
    Metric("metrics_count", "counter: add", "us", goals=(2,)),
    Metric("metrics_log_line", "log of three values / one line of logging", "x", goals=(1,)),
    Metric("metrics_count_prometheus", "counter: add / prometheus_client's inc", "x", goals=(2,)),
    Metric("metrics_history", "history of 8 processes: processor time a second", "ms", goals=(10,)),
]

LACKS = dict.fromkeys(("monarch", "ray", "xoscar"), "it is the cost of a function here")

HISTORY_SECONDS = 4.0


def each(calls: int, work: Callable[[int], object]) -> float:
    """Return the microseconds of a call."""
    start = time.perf_counter()
    for number in range(calls):
        work(number)
    return (time.perf_counter() - start) / calls * 1e6


async def trimesh_side(scale: Scale) -> Samples:
    import prometheus_client

    import trimesh
    from trimesh import telemetry

    counter, others = telemetry.counter("tokens"), prometheus_client.Counter("tokens", "Tokens.")
    logger = logging.getLogger("bench.metrics")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    stream = io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    values = {"loss": 0.25, "reward": 3, "rate": 0.001}

    def line(number: int) -> None:
        logger.info("step %d loss %f reward %f rate %f", number, 0.25, 3, 0.001)

    found: Samples = {metric.name: [] for metric in METRICS}
    for _ in range(10 * scale.rates):
        stream.seek(0)
        log = each(scale.calls, lambda number: trimesh.log(values, step=number))
        count = each(scale.calls, lambda _: counter.add(512))
        found["metrics_log"].append(log)
        found["metrics_count"].append(count)
        found["metrics_log_line"].append(log / each(scale.calls, line))
        found["metrics_count_prometheus"].append(count / each(scale.calls, lambda _: others.inc(512)))
    found["metrics_history"].append(await history_cost() * 1e3)
    return found


async def history_cost() -> float:
    """Return seconds of processor time of the controller for each second of an idle run that logs, over one without."""
    import trio

    from bench.workloads.trimesh_actors import Logging
    from trimesh import configured, limits, this_host

    took = dict[float, float]()
    for seconds in (limits.HISTORY_SECONDS, 0.0):
        with configured(history=seconds):
            async with this_host().spawn_procs({"ranks": 8}) as procs:
                loggers = await procs.spawn("loggers", Logging)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(loggers.run.call)
                    await trio.sleep(limits.HISTORY_BEGIN_SECONDS + 0.5)
                    start = time.process_time()
                    await trio.sleep(HISTORY_SECONDS)
                    took[seconds] = (time.process_time() - start) / HISTORY_SECONDS
                    nursery.cancel_scope.cancel()
    return max(0.0, took[limits.HISTORY_SECONDS] - took[0.0])
