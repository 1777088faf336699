"""Screenshots of the page, for README and docs/operate.md: a training with a stuck rank and a killed generator.

python -m tests.dashboard.screenshot docs/pictures
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import trio
from tests.dashboard.browser import running_chromium, visiting

PROGRAM = """
import math
import time

import trio

import trimesh
from trimesh import Actor, Isolate, endpoint, jobs, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> None:
        await trio.sleep(0.02 + 0.01 * (trimesh.current_rank() % 5))
        trimesh.log({"loss": 0.4 + 3 * math.exp(-batch / 40) + 0.02 * (trimesh.current_rank() % 7)}, step=batch)
        while batch == 80 and trimesh.current_rank() == 21:
            time.sleep(0.01)  # never comes to an await


class Generator(Actor):
    @endpoint
    async def generate(self, step: int) -> None:
        await trio.sleep(0.05 + 0.02 * (trimesh.current_rank() % 3))
        trimesh.log({"reward": 1 - math.exp(-step / 60) - 0.01 * trimesh.current_rank()}, step=step)


async def main() -> None:
    async with (
        this_host().spawn_procs({"hosts": 4, "gpus": 8}, name="trainers") as procs,
        jobs.LocalJob(2) as hosts,
        hosts.spawn_procs({"replica": 4}, name="generators", supervision=Isolate()) as others,
        trio.open_nursery() as nursery,
    ):
        trainers = await procs.spawn("trainer", Trainer)
        generators = await others.spawn("generator", Generator)

        async def generate() -> None:
            for step in range(10_000):
                try:
                    await generators.alive().generate.call(step)
                except* trimesh.ProcDied:
                    pass

        nursery.start_soon(generate)
        for batch in range(100):
            if batch == 60:
                await others.kill([{"hosts": 0, "replica": 2}])
            await trainers.step.call(batch)


trio.run(main)
"""
WIDTH, HEIGHT = 1280, 760


async def shoot(pictures: Path) -> None:
    """Run the program and the command, and write what a browser shows: details of a rank that have no paths of ours."""
    with tempfile.TemporaryDirectory(prefix="run-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(PROGRAM)
        path_of_python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "XDG_RUNTIME_DIR": name, "PATH": path_of_python}
        program = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs meanwhile
            ["python", "train.py"], cwd=name, env=environment, stderr=subprocess.DEVNULL
        )
        await trio.sleep(12)  # it has begun, and its stuck rank counts as stuck
        dashboard = subprocess.Popen(  # noqa: ASYNC220
            ["trimesh", "dashboard"], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert dashboard.stdout is not None
        try:
            with running_chromium(folder / "chromium") as chromium:
                async with visiting(chromium) as browser:
                    tab = await browser.new_tab()
                    await tab.scheme("light")
                    await tab.open(dashboard.stdout.readline().strip())
                    await tab.until("document.body.innerText.includes('stuck for')")
                    # The first problem is the killed rank: a stuck one would show the paths of the checkout.
                    await tab.eval("document.querySelector('.problem').click()")
                    await tab.until("document.querySelector('.detail').innerText.includes('SIGKILL')")
                    await tab.until("/[1-9]\\d* messages/.test(document.querySelector('.tiles').innerText)")
                    await tab.until("document.querySelectorAll('.curves canvas').length")
                    await trio.sleep(1)  # the charts are drawn
                    await tab.picture(pictures / "page.png", width=WIDTH, height=HEIGHT)
                    await tab.press("Escape", "6")
                    await tab.until("document.querySelectorAll('.host dd').length > 3")
                    await tab.picture(pictures / "page-hosts.png", width=WIDTH, height=HEIGHT)
                    await tab.press("4")
                    seconds = "document.querySelectorAll('.controls select')[1]"
                    await tab.eval(f"({seconds}.value = 30, {seconds}.dispatchEvent(new Event('change')))")
                    await tab.until("document.querySelectorAll('.tasks tbody tr').length")
                    x, y = await tab.eval(
                        "(({ x, y }) => [x + 20, y + 30])(document.querySelector('.stream').getBoundingClientRect())"
                    )
                    for kind in ("mousePressed", "mouseReleased"):  # the first host is folded, the others are seen
                        await tab.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
                    await tab.until("document.querySelector('.tasks tbody').innerText.includes('generate')")
                    await tab.picture(pictures / "page-time-line.png", width=WIDTH, height=HEIGHT)
        finally:
            for process in (dashboard, program):
                process.kill()
                process.wait()


if __name__ == "__main__":
    trio.run(shoot, Path(sys.argv[1]))
