"""Picture of `procs.live()` for docs/operate.md: a training with a stuck rank, below the cell that waits for it.

python -m tests.examples.screenshot docs/pictures/notebook.png
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

import trio
from tests.dashboard.browser import running_chromium, visiting

import trimesh
from trimesh import Actor, Isolate, endpoint, limits, this_host
from trimesh.observe.live import look
from trimesh.observe.overview import Overview

CELL = "with procs.live():\n    trainers.train.call(steps=1_000)"
PAGE = """<body style="margin:8px;font:14px system-ui,sans-serif"><pre style="background:#f4f4f4;border:1px solid #ddd;
padding:6px 8px;margin:0 0 8px">{cell}</pre>{shown}"""
WIDTH = 880
SECONDS = 14
"""A rank is stuck for 6 s then."""


class Trainer(Actor):
    @endpoint
    async def train(self, steps: int) -> None:
        for step in range(steps):
            await trio.sleep(0.05)
            if step == 120 and trimesh.current_rank() == 21:
                compute()
            values = {"loss": 3 / (1 + step / 40) + random.random() * 0.2, "reward": 1 - math.exp(-step / 100)}
            trimesh.log(values, step=step)


def compute() -> None:
    while True:  # never comes to an await
        time.sleep(0.01)


class Generator(Actor):
    @endpoint
    async def generate(self) -> None:
        while True:
            await trio.sleep(0.02)
            trimesh.telemetry.counter("tokens").add(50 + random.randrange(20))


async def shoot(path: Path) -> None:
    overview = Overview("trainers")
    async with (
        this_host().spawn_procs({"hosts": 4, "gpus": 8}, name="trainers", supervision=Isolate(), grace=0.5) as procs,
        this_host().spawn_procs({"replica": 8}, name="generators", supervision=Isolate(), grace=0.5) as others,
        trio.open_nursery() as nursery,
    ):
        trainers = await procs.spawn("trainer", Trainer)
        generators = await others.spawn("generator", Generator)
        nursery.start_soon(trainers.train.call_settled, 1_000)
        nursery.start_soon(generators.slice(replica=slice(0, 6)).generate.call)
        for _ in range(SECONDS):
            await look(overview, limits.OBSERVE_SECONDS)
            await trio.sleep(1)
        with tempfile.TemporaryDirectory() as name, running_chromium(Path(name)) as chromium:
            async with visiting(chromium) as browser:
                tab = await browser.new_tab()
                shown = overview.html().replace(__file__, "train.py")
                page = json.dumps(PAGE.format(cell=CELL, shown=shown))
                height = await tab.eval(
                    f"document.write({page}), document.body.lastChild.getBoundingClientRect().bottom + 8"
                )
                await tab.picture(path, width=WIDTH, height=math.ceil(height))
        await procs.kill(procs.points())
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(shoot, Path(sys.argv[1]))
