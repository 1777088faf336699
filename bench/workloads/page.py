"""The page with 4,096 ranks in a headless Chromium: until something is seen, until all is, and each frame after that.

Snapshots are made before, so that the figures are those of folding, sending and drawing. A frame is the processor time
of the page's thread from one board to the next, layout and painting included; the longest one counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from bench.scale import Metric, Samples, Scale

if TYPE_CHECKING:
    from tests.dashboard.browser import Tab

METRICS = [
    Metric("page_paint", "page of 4,096 ranks: first paint", "ms", goals=(1000,)),
    Metric("page_shown", "page of 4,096 ranks: until all are shown", "ms"),
    Metric("page_frame", "page of 4,096 ranks: a frame of the overview", "ms", quantiles=(0.5, 1.0), goals=(50, 50)),
    Metric("page_hosts_frame", "page of 4,096 ranks: a frame of the hosts", "ms", quantiles=(0.5, 1.0), goals=(50, 50)),
    Metric("page_fold", "board of 4,096 ranks: processor time at the page's server", "ms"),
]

LACKS = dict.fromkeys(("monarch", "ray", "xoscar"), "it is the page of trimesh")

HOSTS, SMOKE_HOSTS = 512, 16
FRAMES, SMOKE_FRAMES = 10, 2
EVERY = 0.5
"""Seconds between boards; the page of a user gets one a second."""

_NEXT_FRAME = """new Promise((done) => new PerformanceObserver((list, observer) => {
    if (!list.getEntriesByName('trimesh:frame').length) return;
    observer.disconnect();
    done();
}).observe({ entryTypes: ['measure'] }))"""


async def trimesh_side(scale: Scale) -> Samples:
    from tests.dashboard.asking import serving
    from tests.dashboard.browser import MISSING, running_chromium, visiting
    from tests.dashboard.rigged import RiggedSource

    from trimesh.cli.dashboard.board import see
    from trimesh.cli.dashboard.detail import page_json
    from trimesh.observe import RunSnapshot

    if MISSING is not None:
        sys.stdout.write(f"the page is left out: {MISSING}\n")
        return {}

    count = SMOKE_FRAMES if scale.is_smoke else FRAMES

    class ReadySource(RiggedSource):
        """A run whose snapshots are ready."""

        def __init__(self, hosts: int) -> None:
            super().__init__(hosts)
            self._ready = [RiggedSource.snapshot(self) for _ in range(2 if scale.is_smoke else 6)]
            self._next = 0

        def snapshot(self) -> RunSnapshot:
            self._next += 1
            return self._ready[self._next % len(self._ready)]

    found: Samples = {metric.name: [] for metric in METRICS}
    source = ReadySource(SMOKE_HOSTS if scale.is_smoke else HOSTS)
    earlier, later = source.snapshot(), source.snapshot()
    for _ in range(scale.rates):
        start = time.thread_time()
        page_json(see(later, earlier).board)
        found["page_fold"].append((time.thread_time() - start) * 1e3)
    with tempfile.TemporaryDirectory(prefix="trimesh-page-") as folder, running_chromium(Path(folder)) as chromium:
        async with visiting(chromium) as browser, serving(source, every=EVERY) as server:
            for _ in range(1 if scale.is_smoke else 2):
                tab = await browser.new_tab()
                await tab.send("Performance.enable", timeDomain="threadTicks")
                await tab.open(server.address)
                await tab.until("performance.getEntriesByName('trimesh:shown').length")
                paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                found["page_paint"].append(await tab.eval(paint))
                found["page_shown"].append(await tab.eval("performance.getEntriesByName('trimesh:shown')[0].startTime"))
                found["page_frame"] += await frames(tab, count)
                await tab.press("6")
                await tab.until("document.querySelectorAll('.host').length")
                found["page_hosts_frame"] += await frames(tab, count)
    return found


async def frames(tab: Tab, count: int) -> list[float]:
    """Return the processor time of each of the next frames, in milliseconds."""
    found = list[float]()
    await tab.eval(_NEXT_FRAME)
    await trio.sleep(EVERY / 2)  # layout, painting and the answers to requests come after
    before = await spent(tab)
    for _ in range(count):
        await tab.eval(_NEXT_FRAME)
        await trio.sleep(EVERY / 2)
        now = await spent(tab)
        found.append((now - before) * 1e3)
        before = now
    return found


async def spent(tab: Tab) -> float:
    """Return the processor time that the page has taken in its thread, in seconds."""
    metrics = (await tab.send("Performance.getMetrics"))["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))
