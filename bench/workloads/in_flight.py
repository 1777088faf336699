"""Ten times as many calls in flight as `pipeline` has, and how much of their time the garbage collector takes.

CPython's collector looks at all objects that live while new ones are made, so what a call costs grows with the calls
that wait. Here with the thresholds of the interpreter, and with higher ones.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.scale import Metric, Samples, Scale

TIMES = 10
THRESHOLDS = (50_000, 20, 50)

METRICS = [
    Metric("cpu", "10,000 calls in flight, a task a call: caller's processor time of each", "us"),
    Metric("collected", "of that, the garbage collector", "%"),
    Metric("cpu_rarely", "the same, with thresholds of 50,000, 20, 50", "us"),
    Metric("collected_rarely", "of that, the garbage collector", "%"),
]

LACKS = dict.fromkeys(("monarch", "ray", "xoscar"), "the collector is that of the interpreter")


class Watch:
    """What collections have taken.

    Attributes:
        seconds: All of them together.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        """Be told of a collection, as one of `gc.callbacks`."""
        if phase == "start":
            self._began = time.process_time()
        else:
            self.seconds += time.process_time() - self._began


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch the collector."""
    watch = Watch()
    gc.callbacks.append(watch)
    try:
        yield watch
    finally:
        gc.callbacks.remove(watch)


async def trimesh_side(scale: Scale) -> Samples:
    import trio

    from bench.workloads.trimesh_actors import Sleeper
    from trimesh import this_host

    found: Samples = {metric.name: [] for metric in METRICS}
    count = scale.rate_calls * TIMES
    thresholds = gc.get_threshold()
    async with this_host().spawn_procs({"procs": 1}) as procs, procs.spawn("actors", Sleeper) as mesh:
        for kind in ("", "_rarely"):
            gc.set_threshold(*(THRESHOLDS if kind else thresholds))
            for _ in range(scale.rates):
                gc.collect()
                began = time.process_time()
                with watched() as watch:
                    async with trio.open_nursery() as nursery:
                        for _ in range(count):
                            nursery.start_soon(mesh.pid.call_one)
                took = time.process_time() - began
                found[f"cpu{kind}"].append(took / count * 1e6)
                found[f"collected{kind}"].append(100 * watch.seconds / took)
    gc.set_threshold(*thresholds)
    return found
