"""A mesh over the cells of a notebook: a real kernel of Jupyter, driven by nbclient (K06)."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.patience import HANG_SECONDS

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
traitlets = pytest.importorskip("traitlets", reason="traitlets is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

pytestmark = [pytest.mark.real, pytest.mark.executed("the kernel is a program of its own")]

CELLS = {
    "define": """
import os, signal, threading, trimesh, trio
import trimesh.aio
import trimesh.blocking as tb
from trimesh import Actor, endpoint

trimesh.progress(False)  # a busy machine may need longer than two seconds for any cell

class Worker(Actor):
    @endpoint
    async def step(self, number: int) -> int: return number + 1
    @endpoint
    async def say(self, text: str) -> None: print(text, flush=True)
    @endpoint
    async def pids(self): return os.getpid(), os.getppid()
    @endpoint
    async def hold(self, port) -> None:
        await port.send(None)
        await trio.sleep_forever()
    @endpoint
    async def fail(self) -> None: raise LookupError("<no>")
    @endpoint
    async def die(self) -> None: os.kill(os.getpid(), signal.SIGKILL)
""",
    "open": 'procs = tb.spawn_procs({"gpus": 2}, supervision=trimesh.Isolate()).open()',
    "spawn": 'workers = procs.spawn("workers", Worker)',
    "call": "workers.step.call(1).values()",
    "show": "workers",
    "interrupt": """
channel = tb.enter(trimesh.open_channel(capacity=4))
with channel as (port, receiver):
    def strike():
        tb.run(receiver.receive)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=strike).start()
    workers.slice(gpus=0).hold.call(port)
""",
    "call after the interrupt": "workers.step.call(2).values()",
    "error": "workers.fail.call()",
    "show an error": """
try: workers.fail.call()
except trimesh.MeshErrorGroup as failed: shown = failed
shown
""",
    "death": "workers.slice(gpus=1).die.call()",
    "show the rest": "procs",
    "call after the death": "workers.alive().step.call(3).values()",
    "await": """
async with trimesh.aio.spawn_procs({"gpus": 1}) as more:
    print((await (await more.spawn("others", Worker)).step.call(4)).values())
""",
    "call last": "workers.alive().step.call(5).values()",
}
"""The mesh is left open: the end of the kernel closes it."""


def client_of(notebook: Any, folder: Path, **options: Any) -> Any:
    """Return what drives a kernel, by sockets in a folder: a port that was free may be taken once it is bound."""
    sockets = {"KernelManager": {"transport": "ipc", "ip": str(folder / "kernel")}}
    return nbclient.NotebookClient(
        notebook, timeout=HANG_SECONDS, kernel_name="python3", config=traitlets.config.Config(sockets), **options
    )


def test_mesh_lives_over_cells(tmp_path: Path) -> None:
    """Z01, C01, E01, K04, K06, Q20: past an interrupt, an error and a death; the end of the kernel leaves nothing."""
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS.values()])
    asyncio.run(client_of(notebook, tmp_path, allow_errors=True).async_execute())
    shown = {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}

    def value_of(name: str) -> str:
        [output] = [output for output in shown[name] if output.output_type == "execute_result"]
        return str(output.data["text/plain"])

    def html_of(name: str) -> str:
        [output] = [output for output in shown[name] if output.output_type == "execute_result"]
        return str(output.data["text/html"])

    def text_of(name: str) -> str:
        return "".join(output.get("text", "") + output.get("ename", "") for output in shown[name])

    assert not shown["define"] and not shown["open"] and not shown["spawn"]  # noqa: PT018
    assert value_of("call") == "(2, 2)"
    assert [
        one for rank in (0, 1) if (one := f"<title>workers[gpus={rank}]: live</title>") not in html_of("show")
    ] == []
    assert text_of("interrupt").endswith("KeyboardInterrupt")
    assert value_of("call after the interrupt") == "(3, 3)"
    assert "LookupError: <no>" in text_of("error")
    # The first rank that fails cancels the other one, which may have failed by then.
    failed = re.findall(r">workers\[gpus=([01.]+)\]</td>.*?LookupError: &lt;no&gt;</td>", html_of("show an error"))
    assert failed in (["0"], ["1"], ["0..1"])
    assert "ProcDied" in text_of("death")
    assert re.findall(r"<title>(.*?)</title>", html_of("show the rest")) == [
        "procs[gpus=1]: ended",
        "procs[gpus=0]: live",
    ]
    assert value_of("call after the death") == "(4,)"
    assert text_of("await") == "(5,)\n"
    assert value_of("call last") == "(6,)"


def test_output_of_ranks_is_under_the_cell_that_runs(tmp_path: Path) -> None:
    """K06: not under the one in which the mesh was opened. Closing has shown all of it."""
    cells = [CELLS["define"], CELLS["open"], CELLS["spawn"], 'workers.say.call("said by a rank")\nprocs.close()']
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    asyncio.run(client_of(notebook, tmp_path).async_execute())

    said = "".join(output.text for output in notebook.cells[3].outputs)
    assert sorted(said.splitlines()) == [f"procs[gpus={rank}] | said by a rank" for rank in (0, 1)]


def test_block_of_asyncio_stays_open_over_cells(tmp_path: Path) -> None:
    """K04: cells are steps of one program on the loop of the kernel. An interrupt cancels what the cell awaits."""
    opening = """
import asyncio, contextlib
stack = contextlib.AsyncExitStack()
procs = await stack.enter_async_context(trimesh.aio.spawn_procs({"gpus": 2}))
workers = await procs.spawn("workers", Worker)
"""
    interrupting = """
async with trimesh.open_channel(capacity=4) as (port, receiver):
    held = asyncio.create_task(workers.slice(gpus=0).hold.call(port))
    await receiver.receive()
    os.kill(os.getpid(), signal.SIGINT)
    await held
"""
    after = "held.cancelled(), (await workers.step.call(1)).values()"
    cells = [CELLS["define"], opening, interrupting, after, "await stack.aclose()"]
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    asyncio.run(client_of(notebook, tmp_path, allow_errors=True).async_execute())

    *opened, interrupted, called, closed = [cell.outputs for cell in notebook.cells]
    assert [*opened, closed] == [[], [], []]
    assert [output.ename for output in interrupted] == ["CancelledError"]
    assert called[0].data["text/plain"] == "(True, (2, 2))"


def test_what_takes_long_is_shown_under_the_cell_until_it_is_done(tmp_path: Path) -> None:
    """Q9: one line of HTML."""
    waits = """
import pathlib, tempfile, time
import trimesh.blocking as tb
from trimesh import limits
from trimesh._runtime.watch import progress_view

limits.PROGRESS_SECONDS = 0
drawn = pathlib.Path(tempfile.mkdtemp()) / "drawn"
draw = progress_view.CellView.draw

def told(self, progress):
    draw(self, progress)
    if progress.title.startswith("setting up"):
        drawn.touch()

def wait():
    while not drawn.exists():
        time.sleep(0.01)

progress_view.CellView.draw = told
with tb.spawn_procs({"gpus": 2}, setup=wait):
    drawn.unlink()
"""
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(waits)])
    asyncio.run(client_of(notebook, tmp_path).async_execute())

    (shown,) = notebook.cells[0].outputs  # which was drawn at least once: the processes have waited for that
    assert (shown.output_type, shown.data["text/html"]) == ("display_data", "")


def test_overview_is_drawn_below_its_cell(tmp_path: Path) -> None:
    """Q21: in one output, which is replaced, while the cell waits for a call; an interrupt ends it with its cell.

    The curve of a counter that grew before, and not since, is of the history.
    """
    counting = """
from trimesh import limits, observe
limits.HISTORY_BEGIN_SECONDS, limits.SAMPLING_SECONDS = 0.0, 0.01
tokens = trimesh.telemetry.counter("tokens")

def await_values(count):
    values = "select value from metrics where metric = 'tokens'"
    while True:
        try:
            if len(observe.query(values).rows) >= count: return
        except trimesh.ConnectError:  # not yet
            pass
"""
    grown = """
tokens.add(0)
await_values(1)
tokens.add(7)
await_values(2)
"""
    watching = """
from trimesh.observe import overview
limits.LIVE_SECONDS = 0
drawn, times, draw = threading.Event(), [], overview.Overview.html

def told(self, **end):
    times.append(end)
    if len(times) > 2: drawn.set()
    return draw(self, **end)

overview.Overview.html = told
def strike():
    drawn.wait()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=strike).start()
channel = tb.enter(trimesh.open_channel(capacity=4))
with channel as (port, receiver), procs.live():
    workers.slice(gpus=0).hold.call(port)
"""
    after = "count = len(times); workers.step.call(1).values(), len(times) == count"
    cells = [CELLS["define"], counting, CELLS["open"], CELLS["spawn"], grown, watching, after, "procs.close()"]
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    asyncio.run(client_of(notebook, tmp_path, allow_errors=True).async_execute())

    drawn, interrupt = notebook.cells[5].outputs
    assert (drawn.output_type, interrupt.ename) == ("display_data", "KeyboardInterrupt")
    titles = re.findall(r"<title>(procs.*?\]): ", drawn.data["text/html"])
    assert sorted(titles) == ["procs[gpus=0]", "procs[gpus=1]"]
    assert "as it was at" in drawn.data["text/html"]
    [greatest] = re.findall(r" to ([^<>]*), in [^<]*, controller<", drawn.data["text/html"])
    assert float(greatest.replace(",", "")) > 0
    assert notebook.cells[6].outputs[0].data["text/plain"] == "((2, 2), True)"


MARIMO = """
import marimo
app = marimo.App()

@app.cell
def _():
    import trimesh.blocking as tb
    procs = tb.spawn_procs({"hosts": 2, "gpus": 2}).open()
    with procs.live():
        watched = tb.run(__import__("trimesh").observe.snapshot)
    procs.close()
    return
"""


@pytest.mark.skipif(importlib.util.find_spec("marimo") is None, reason="marimo is not installed")
def test_overview_is_drawn_below_its_cell_of_marimo(tmp_path: Path) -> None:
    """Q21: by a thread of its own, which has shown the last drawing when the block is left."""
    (tmp_path / "notebook.py").write_text(MARIMO)
    command = [sys.executable, "-m", "marimo", "export", "html", "notebook.py", "-o", "shown.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = (tmp_path / "shown.html").read_text()
    assert "as it was at" in shown
    assert re.search(r"procs\[hosts=1,gpus=1\]: running", shown)


@pytest.mark.parametrize("end", ["killed", "restarted", "restarted at once"])
def test_kernel_that_ends_leaves_no_process(end: str, tmp_path: Path) -> None:
    """K06: however it ends; the kernel that takes its place opens a mesh of its own."""
    asyncio.run(_end_kernel(end, tmp_path))


async def _end_kernel(end: str, folder: Path) -> None:
    sources = [CELLS["define"], CELLS["open"], CELLS["spawn"], "workers.pids.call().values()"]
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in sources])
    client = client_of(notebook, folder)
    async with client.async_setup_kernel():
        for index, cell in enumerate(notebook.cells):
            await client.async_execute_cell(cell, index)
        shown = notebook.cells[-1].outputs[0].data["text/plain"]
        children = {pid for pids in ast.literal_eval(shown) for pid in pids}
        assert len(children) == 3  # two workers and their spawner
        with ExitStack() as stack:
            ends = [os.pidfd_open(pid) for pid in children]
            for descriptor in ends:
                stack.callback(os.close, descriptor)
            if end == "killed":
                os.kill(client.km.provisioner.pid, signal.SIGKILL)
            else:
                await client.km.restart_kernel(now=end == "restarted at once")
                await client.kc.wait_for_ready(timeout=HANG_SECONDS)
            for descriptor in ends:
                assert select.select([descriptor], [], [], HANG_SECONDS)[0]
        if end != "killed":
            for index, cell in enumerate(notebook.cells):
                await client.async_execute_cell(cell, index)
