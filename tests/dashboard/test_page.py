"""The page in a real browser: how fast it is, what keys do, what shapes say, and what hostile names cannot do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
import trio
from tests.dashboard.browser import MISSING, Browser, Chromium, Tab, running_chromium, visiting
from tests.dashboard.rigged import KeepingSource, RiggedSource, WaitingSource
from tests.patience import HANG_SECONDS
from tests.runtime.test_recorder import Spec, Taken
from tests.shape.drawings import drawn, grid_of

pytest.importorskip("cyclopts")
pytest.importorskip("anycorn", reason="comes with the extra `dashboard`")

from tests.dashboard.asking import serving

from trimesh import limits
from trimesh._runtime.recording import FlightRecorder
from trimesh._wire.flight import FlightHead
from trimesh._wire.observed import EventRow, OutputRow, ProcRow, ProcView
from trimesh.cli.dashboard.site import PageServer
from trimesh.cli.dashboard.timeline import task_stream
from trimesh.mesh_drawing import mesh_card

pytestmark = [pytest.mark.real, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]

HOSTILE = "<img src=x onerror=window.owned=1>\x1b]0;x\x07\u202e"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser for the tests of this file."""
    with running_chromium(tmp_path_factory.mktemp("chromium")) as running:
        yield running


async def opened(browser: Browser, server: PageServer) -> Tab:
    """Return a tab in which the page shows a run."""
    tab = await browser.new_tab()
    await tab.send("Performance.enable", timeDomain="threadTicks")
    await tab.open(server.address)
    await tab.until("performance.getEntriesByName('trimesh:shown').length")
    return tab


async def spent(tab: Tab) -> float:
    """Return the processor time that the page has taken in its thread, drawing included, in seconds."""
    metrics = (await tab.send("Performance.getMetrics"))["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


async def test_four_thousand_ranks_are_drawn(chromium: Chromium):
    """As a whole, and again for the next snapshot. The benchmark `page` measures what that takes."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(RiggedSource(), every=0.5) as server:
            tab = await opened(browser, server)
            await tab.until("performance.getEntriesByName('trimesh:frame').length > 1")
            assert tab.said == []
            assert "4,097 processes: 1 dead, 1 silent, 1 stopped, 2 stuck" in await tab.text("header")


DIFFERENCES = """(async () => {
    const { WORDS, sprite } = await import('./static/cells.js');
    const grey = (letter, side) => {
        const { width, height } = sprite(letter, side, 1);
        const data = sprite(letter, side, 1).getContext('2d').getImageData(0, 0, width, height).data;
        const on = matchMedia('(prefers-color-scheme: dark)').matches ? 18 : 255;
        return Array.from({ length: width * height }, (_, at) => {
            const [r, g, b, a] = data.slice(at * 4, at * 4 + 4);
            return (a / 255) * (0.2126 * r + 0.7152 * g + 0.0722 * b) + (1 - a / 255) * on;
        });
    };
    const found = [];
    const letters = Object.keys(WORDS);
    for (const side of [9, 16, 32]) for (const one of letters) for (const other of letters) if (one < other) {
        const [a, b] = [grey(one, side), grey(other, side)];
        found.push([a.filter((value, at) => Math.abs(value - b[at]) > 24).length / a.length, one, other, side]);
    }
    return found.sort((a, b) => a[0] - b[0])[0];
})()"""


async def test_states_differ_without_colour(chromium: Chromium):
    """In grey, in both schemes, also in small cells: each two states differ in a part of their pixels that is seen."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(RiggedSource(1, 8)) as server:
            for scheme in ("light", "dark"):
                tab = await browser.new_tab()
                await tab.scheme(scheme)
                await tab.open(server.address)
                await tab.until("performance.getEntriesByName('trimesh:shown').length")
                share, *pair = await tab.eval(DIFFERENCES)
                assert share > 0.08, (scheme, pair, share)


PLACES = """(async () => {
    const { layOut, nameOf } = await import('./static/layout.js');
    return %s.map(([labels, sizes]) => {
        const cells = sizes.reduce((product, size) => product * size, 1);
        const layout = layOut(sizes, cells, 1400, 420, 0, 3);
        const grid = { name: 'procs', labels, sizes };
        return Array.from({ length: cells }, (_, cell) => [nameOf(grid, cell), layout.place(cell)]);
    });
})()"""
WHOLE = [{"gpus": 8}, {"ranks": 20}, {"hosts": 8, "gpus": 8}, {"replica": 3, "hosts": 2, "gpus": 4}]
BROKEN = [{"ranks": 100}, {"hosts": 64, "gpus": 8}]


def starts(line: list[int]) -> list[int]:
    """Return the ranks that begin a line, or a strip beside another one."""
    return [rank for before, rank in pairwise([-2, *line]) if rank != before + 1]


async def test_meshes_and_states_are_drawn_as_in_a_notebook(chromium: Chromium):
    """GD-5, MD-1, MD-2: the same lines of the same names, broken at multiples of 8; the same words, in one order."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(RiggedSource(1, 8)) as server:
            tab = await opened(browser, server)
            shapes = [[list(extent), list(extent.values())] for extent in WHOLE + BROKEN]
            found = await tab.eval(PLACES % json.dumps(shapes))
            words = await tab.eval("import('./static/cells.js').then(({ WORDS }) => Object.values(WORDS))")
    for extent, places in zip(WHOLE, found, strict=False):
        assert grid_of({name: (x, y) for name, (x, y) in places}) == grid_of(drawn(extent).places)
    for extent, places in zip(BROKEN, found[len(WHOLE) :], strict=True):
        row = 1 if len(extent) == 1 else extent["gpus"]
        for one in (dict(places), drawn(extent).places):
            ranks = {name: rank for rank, name in enumerate(one)}
            lines = [[ranks[name] for name in line] for line in grid_of(one)]
            assert sorted(rank for line in lines for rank in line) == list(range(len(ranks)))
            assert all(start % 8 == 0 for line in lines for start in starts(line))
            assert all(start % (8 * row) == 0 for start in starts(lines[0]))
            assert 1 < len(lines) <= len(ranks) / 8

    *shown, missing = words
    assert missing == "no member"
    card = ElementTree.fromstring(mesh_card("", {"gpus": len(shown)}, shown[::-1], shown))
    assert [span.text or span[0].tail for span in card.iter("span")] == [f" 1 {word}" for word in shown]


async def test_keys_do_what_the_mouse_does(chromium: Chromium):
    """Tabs, problems, ranks, nearer, a kill that is asked for twice; and the answer of a run that is told."""
    source = RiggedSource(4, 8, is_well=False)
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(source, every=0.1) as server:
            tab = await opened(browser, server)
            titles = {
                "2": "calls",
                "3": "waits",
                "4": "tasks",
                "5": "rates",
                "6": "hosts",
                "7": "links",
                "8": "logs",
                "9": "stacks",
                "0": "events",
            }
            for key, name in titles.items():
                await tab.press(key)
                await tab.until(f"document.querySelector('main').getAttribute('aria-label') === '{name}'")
                await tab.until("document.querySelector('main').innerText.length > 3")
            await tab.press("5")
            await tab.until("document.querySelector('.curves figcaption').innerText.includes('loss')")
            await tab.until("document.querySelector('.curves canvas')")
            await tab.press("8")
            await tab.until("document.querySelector('.logs').innerText.includes('loss')")
            await tab.press("n")
            await tab.until("document.activeElement.className === 'problem'")
            await tab.until("document.querySelector('.behind').innerText.includes('was killed by SIGKILL')")
            await tab.press("Escape", "m")
            await tab.until("document.activeElement.className === 'cells'")
            await tab.press("ArrowDown")
            name = ""
            for key, at in {"Home": 0, "ArrowRight": 1}.items():  # a key begins where the page has drawn the one before
                await tab.press(key)
                name = f"trainers[hosts=0,gpus={at}]"
                await tab.until(f"document.querySelector('.member').innerText === '{name}'")
            side = await tab.eval("document.querySelector('.cells .all').style.height")
            await tab.press("+", "+")
            await tab.until(f"document.querySelector('.cells .all').style.height !== '{side}'")
            await tab.until("[...document.querySelectorAll('.detail .danger')].length")
            await tab.eval("document.querySelector('.detail .danger').focus()")
            await tab.press("Enter")
            await tab.until("document.querySelector('dialog').open")
            assert name in await tab.text("dialog")
            await tab.press("Tab", "Enter")
            await tab.until("!document.querySelector('dialog').open")
            await tab.until("document.querySelector('.answer')")
            assert [what for what, _ in source.acts] == ["kill"]
            await tab.press("Escape")
            await tab.until("!document.querySelector('.detail')")
            await tab.press("/", "n", "o", "x")
            await tab.until("document.querySelector('.meshes').innerText.includes('no mesh has nox')")
            assert tab.said == []


LAID = """(async () => {
    const { layOut } = await import('./static/layout.js');
    return Object.fromEntries(Object.entries(%s).map(([name, sizes]) => {
        const cells = sizes.reduce((product, size) => product * size, 1);
        const { across, blocks, deep, width, place, cellAt } = layOut(sizes, cells, 1300, 420, 0, 4);
        const all = Array.from({ length: cells }, (_, cell) => place(cell));
        const back = all.every(([x, y], cell) => cellAt(x + 1, y + 1) === cell);
        return [name, [across, deep, blocks, width <= 1300, back && new Set(all.map(String)).size === cells]];
    }));
})()"""
SIZES = {
    "8x8": [8, 8], "512x8": [512, 8], "2x8x8": [2, 8, 8], "100": [100], "8": [8], "3x1000": [3, 1000], "one": [],
}  # fmt: skip


async def test_mesh_is_drawn_by_its_dimensions(chromium: Chromium):
    """GD-5: rows and columns, grids beside each other, long rows wrapped; each cell has a place, and is found there."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(RiggedSource(2, 2)) as server:
            tab = await opened(browser, server)
            found = await tab.eval(LAID % json.dumps(SIZES))
    assert all(fits and is_found for *_, fits, is_found in found.values()), found
    laid = {name: tuple(one[:3]) for name, one in found.items()}
    assert (laid["8x8"], laid["2x8x8"], laid["8"], laid["one"]) == ((8, 8, 1), (8, 8, 2), (8, 1, 1), (1, 1, 1))
    across, deep, blocks = laid["512x8"]
    assert (across, deep % 8, blocks) == (8, 0, -(-512 // deep))
    assert laid["100"][0] % 8 == laid["3x1000"][0] % 8 == 0


async def test_processes_and_their_actors_are_one_card(chromium: Chromium):
    """GD-3: with tabs; the selected rank is marked in both; the pointer shows coordinates; a controller is a button."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(RiggedSource(2, 4, is_well=True), every=0.1) as server:
            tab = await opened(browser, server)
            assert await tab.eval("document.querySelectorAll('.mesh').length") == 1
            choices = "[...document.querySelectorAll('.choices button')]"
            assert await tab.eval(f"{choices}.map((one) => one.innerText.trim())") == ["processes", "trainer Trainer"]
            await tab.eval(f"{choices}[1].click()")
            await tab.until("document.querySelector('.said').innerText.includes('trainer[hosts=0,gpus=0] · busy')")
            box = await tab.eval("(({ x, y, width, height }) => [x, y, width, height])"
                "(document.querySelector('.cells canvas').getBoundingClientRect())")  # fmt: skip
            x, y = box[0] + box[2] - 20, box[1] + box[3] - 20
            await tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            await tab.until("document.querySelector('.said').innerText.includes('trainer[hosts=1,gpus=3] · busy')")
            await tab.until("document.querySelector('.said').innerText.includes('step for 1.5 s')")
            await tab.send("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
            await tab.send("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left", clickCount=1)
            await tab.until("document.querySelector('.member').innerText === 'trainers[hosts=1,gpus=3]'")
            await tab.eval("document.querySelector('.controller').click()")
            await tab.until("document.querySelector('.member').innerText === 'controller'")
            assert tab.said == []


SHIFTED = """new Promise((done) => new PerformanceObserver((list) =>
    done(list.getEntries().reduce((most, one) => Math.max(most, one.value), 0)))
    .observe({ type: 'layout-shift', buffered: true }) || setTimeout(() => done(0), 300))"""


async def test_overview_has_sums_curves_meshes_and_events(chromium: Chromium):
    """OP-1: nothing moves when curves and boards arrive; the whole page is less than 150 KB."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(RiggedSource(2, 4), every=0.1) as server:
            tab = await opened(browser, server)
            before = await tab.eval("document.querySelector('.mesh').getBoundingClientRect().top")
            await tab.until("document.querySelector('.charts canvas')")
            await tab.until("/loss/.test(document.querySelector('figcaption').innerText)")
            assert await tab.eval("document.querySelector('.mesh').getBoundingClientRect().top") == before
            tiles = "[...document.querySelectorAll('.tile > :first-child')].map((one) => one.innerText)"
            assert await tab.eval(tiles) == ["processes", "calls/s", "errors", "bytes/s", "CPU", "memory"]
            await tab.until("/[0-9] KiB|MiB/.test(document.querySelectorAll('.tile b')[3].innerText)")
            assert "Died" in await tab.text(".last")
            frames = "performance.getEntriesByName('trimesh:frame').length"
            await tab.until(f"{frames} >= 5")
            assert await tab.eval(SHIFTED) < 0.005  # words of the legend; their sum grows with the number of boards
            loaded = "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.encodedBodySize, 0)"
            assert 50_000 < await tab.eval(loaded) < 150_000
            assert tab.said == []


class RecordedSource(RiggedSource):
    """64 ranks of a mesh on two hosts, each with a full flight record of calls in the last eight seconds."""

    def __init__(self, path: Path) -> None:
        super().__init__(8, 8, is_well=True)
        now = [0.0]
        head = FlightHead(proc=ProcRow(id="1"), started_at=1_799_999_993.0)
        recorder = FlightRecorder(path, head, lambda: now[0])
        calls = recorder.of_actor("trainer", {"hosts": 0, "gpus": 0})
        for number in range(limits.RECORD_ROWS):
            now[0] = number / 1_024
            name = "step" if number % 512 else "save"
            taken = Taken(call_id=number, received_at=now[0], spec=Spec(name=name))
            row = calls.began(taken)
            now[0] += 0.0005 if number % 512 else 0.4
            calls.ended(row, taken)
        self.record = str(path)
        recorder.end()

    def views(self) -> list[ProcView]:
        """Return what each process says."""
        [root, *rest] = super().views()
        replace = msgspec.structs.replace
        children = tuple(
            replace(one, record=self.record, host=f"node{one.point['hosts'] // 4}") for one in root.children
        )
        rows = {one.id: one for one in children}
        return [replace(root, children=children), *(replace(one, proc=rows[one.proc.id]) for one in rest)]


COLOURED = """(() => {
    const { width, height } = document.querySelector('.stream canvas');
    const data = document.querySelector('.stream canvas').getContext('2d').getImageData(200, 22, width - 200, 150).data;
    let found = 0;
    for (let at = 0; at < data.length; at += 4) found += Math.max(...data.slice(at, at + 3)) - Math.min(...data.slice(at, at + 3)) > 60;
    return found;
})()"""  # noqa: E501 - one line for each step


BAR_AT = """(() => {
    const { width } = document.querySelector('.stream canvas');
    const data = document.querySelector('.stream canvas').getContext('2d').getImageData(0, 50, width, 1).data;
    for (let x = 300; x < width; x += 1) if (data[x * 4] - data[x * 4 + 2] > 60 || data[x * 4 + 2] - data[x * 4] > 60) return x + 1;
    return -1;
})()"""  # noqa: E501 - as above


async def test_time_line_of_many_ranks(chromium: Chromium, tmp_path: Path):
    """TN-3: the first rows, others when they are scrolled to; folded hosts, zoom, one call. The goal is 0.3 s."""
    source = RecordedSource(tmp_path / "record")
    procs = [one for one in source.snapshot().procs if one.mesh][:4]
    start = time.thread_time()
    stream = task_stream(procs, 1_799_999_992.0, 10.0)
    reading = time.thread_time() - start
    assert sum(bar.count for bar in stream.rows[0].bars) > 8_000
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(source, every=60.0) as server:
            tab = await opened(browser, server)
            await tab.resize(1400, 900)
            before = await spent(tab)
            await tab.press("4")
            await tab.until("performance.getEntriesByName('trimesh:timeline').length")
            drawing = await spent(tab) - before
            await tab.until(f"{COLOURED} > 1000")
            print(f"64 ranks: records of the first rows {reading * 1e3:.0f} ms, drawing {drawing * 1e3:.0f} ms")
            await tab.until("document.querySelectorAll('.tasks tbody tr').length === 2")
            stream_height = "document.querySelector('.stream > div').offsetHeight"
            assert await tab.eval(stream_height) > 64 * 20
            await tab.eval("document.querySelector('.stream').scrollTop = 1e6")
            point = {"button": "left", "clickCount": 1}
            box = await tab.eval("(({ x, y, width, height }) => [x, y, width, height])"
                "(document.querySelector('.stream').getBoundingClientRect())")  # fmt: skip
            await tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 20, y=box[1] + box[3] - 12)
            await tab.until("document.querySelector('.said').innerText.includes('trainers[hosts=7,gpus=7]')")
            await tab.eval("document.querySelector('.stream').scrollTop = 0")
            for kind, x, y in (("mousePressed", 400, 60), ("mouseMoved", 600, 60), ("mouseReleased", 600, 60)):
                await tab.send("Input.dispatchMouseEvent", type=kind, x=box[0] + x, y=box[1] + y, **point)
            await tab.until("document.querySelector('.controls button').innerText === 'follow'")
            await tab.until(f"{COLOURED} > 1000")
            x = await tab.eval(BAR_AT)
            for kind in ("mousePressed", "mouseReleased"):
                await tab.send("Input.dispatchMouseEvent", type=kind, x=box[0] + x, y=box[1] + 50, **point)
            await tab.until("document.querySelector('.behind').innerText.includes('returned')")
            assert await tab.text(".member") == "trainers[hosts=0,gpus=0]"
            await tab.press("Escape")
            for kind in ("mousePressed", "mouseReleased"):
                await tab.send("Input.dispatchMouseEvent", type=kind, x=box[0] + 20, y=box[1] + 30, **point)
            await tab.until(f"{stream_height} < 40 * 22")
            assert tab.said == []


async def test_hosts_and_their_processes(chromium: Chromium):
    """HT-1, HT-2: a card a host, a silent one first; a click on a head sorts, one on a name opens the process."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(RiggedSource(16, 8), every=0.1) as server:
            tab = await opened(browser, server)
            await tab.press("6")
            await tab.until("document.querySelectorAll('.host').length === 17")
            await tab.until("document.querySelectorAll('main tbody tr').length === 129")
            await tab.until("document.querySelectorAll('.host')[3].innerText.includes('40 of 192 cores')")
            cards = await tab.eval("[...document.querySelectorAll('.host')].map((one) => one.innerText)")
            [silent] = [card for card in cards if card.startswith("node7")]
            assert cards[0] == silent
            assert "its agent does not answer" in silent
            for text in ("1.0 of 2.0 TiB", "89 %, 16 of 141 GiB, 60 °C", "16.0 GiB free of 1.0 TiB",
                    "16.0 MiB/s in, 1.0 MiB/s out", "agent 900 running", "Python 3.12.4"):  # fmt: skip
                assert text in cards[3]
            assert "GiB free" in await tab.text(".host dd .wrong")
            names = "[...document.querySelectorAll('main table:last-child .link')].map((one) => one.textContent)"
            wrong = ["trainers[hosts=9,gpus=5]", "trainers[hosts=9,gpus=6]"]
            assert sorted((await tab.eval(names))[:2]) == wrong
            await tab.eval("document.querySelector('.sort').click()")
            await tab.until(f"{names}[2] === 'controller'")
            assert (await tab.eval(names))[:2] == wrong
            await tab.eval("document.querySelectorAll('main .link')[0].click()")
            await tab.until(f"document.querySelector('.member').innerText === '{wrong[0]}'")
            assert tab.said == []


KINDS = "[...document.querySelectorAll('.problem .kind')].map((one) => one.innerText)"


async def test_lock_in_c_kept_version_and_unread_versions_are_shown(chromium: Chromium):
    """Each has its sign, who and what to do; a click on the first two opens the process, its line is below."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(KeepingSource(1, 8, is_well=True)) as server:
            tab = await opened(browser, server)
            await tab.until(f"{KINDS}.join() === 'silent,pinned,unread'")
            signs = "[...document.querySelectorAll('.problem .sign')].map((one) => one.innerText.trim())"
            assert (await tab.eval(signs))[1:] == ["◉", "∅"]
            details = list[str]()
            for at in range(3):
                await tab.press("n")
                title = f"document.querySelectorAll('.problem')[{at}].querySelector('.title').firstChild.data.trim()"
                await tab.until(f"document.querySelector('.behind h2').innerText.endsWith({title})")
                details.append(await tab.text(".behind"))
            silent, pinned, unread = details
            assert "in trainer[hosts=0,gpus=1].step" in silent
            assert 'File "train.py", line 88 in backward' in silent
            assert "py-spy dump --native --pid 10001 on node0" in silent
            assert "trainers[hosts=0,gpus=3] has version 1 of trainers[hosts=0,gpus=2] pinned" in pinned
            assert "which has blocked publish for 1 min 15 s" in pinned
            assert "publish waits" in pinned
            assert "trainers[hosts=0,gpus=4] has published 40 versions" in unread
            await tab.eval("document.querySelectorAll('.problem')[1].click()")
            await tab.until("document.querySelector('.member').innerText === 'trainers[hosts=0,gpus=3]'")
            await tab.press("7")
            await tab.until("document.querySelector('main').innerText.includes('1 by trainers[hosts=0,gpus=3]')")
            assert tab.said == []


async def test_problems_are_one_line_each_in_a_fifth_of_the_window(chromium: Chromium):
    """PQ-5: folded, their number stays; opened, the detail stands beside, and the lines stay where they are."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(RiggedSource(512, 8), every=60.0) as server:
            tab = await opened(browser, server)
            heights = "[...document.querySelectorAll('.problem')].map((one) => one.offsetHeight)"
            for width, height in ((1400, 900), (390, 844)):
                await tab.resize(width, height)
                await tab.until(f"{heights}.length === 5 && Math.max(...{heights}) < 32")
                before = await tab.eval("document.querySelector('.problems').offsetHeight")
                assert before <= height / 5
                await tab.eval("document.querySelectorAll('.problem')[1].click()")
                await tab.until("document.querySelector('.behind').innerText.includes('no Python code runs')")
                assert await tab.eval("document.querySelector('.problems').offsetHeight") == before
                await tab.press("Escape")
                await tab.until("!document.querySelector('.behind')")
            await tab.eval("document.querySelector('.fold').click()")
            await tab.until("!document.querySelector('.problem')")
            assert (await tab.text(".fold")).startswith("5")
            assert "failure" in await tab.text(".problems p")
            assert tab.said == []


class HostileSource(WaitingSource):
    """A run whose names, lines, errors and output are chosen by an enemy."""

    def views(self) -> list[ProcView]:
        """Return what each process says, with other words."""
        [root, *rest] = super().views()
        calls = tuple(
            msgspec.structs.replace(call, endpoint=HOSTILE, at=HOSTILE, caller=HOSTILE, stack=(HOSTILE,))
            for call in root.calls
        )
        event = EventRow(number=1, at=1.0, kind="Died", name=HOSTILE, text=HOSTILE, is_failure=True, causes=(HOSTILE,))
        job = root.job and msgspec.structs.replace(root.job, command=HOSTILE)
        changed = [
            msgspec.structs.replace(
                view,
                proc=msgspec.structs.replace(
                    view.proc, name=HOSTILE + view.proc.id, mesh=HOSTILE, host=HOSTILE, stack=HOSTILE
                ),
                actors=tuple(msgspec.structs.replace(actor, cls=HOSTILE, mesh=HOSTILE) for actor in view.actors),
                calls=(),
            )
            for view in rest
        ]
        return [msgspec.structs.replace(root, children=(), calls=calls, events=(event,), job=job), *changed]

    def output(self, after: int) -> list[OutputRow]:
        """Return one line."""
        return [] if after else [OutputRow(number=1, at=1.0, name=HOSTILE, text=HOSTILE)]


async def test_hostile_names_stay_texts(chromium: Chromium):
    """DB-3: on every tab: no element, no script, no escape is made of them, and they are shown."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(HostileSource(1, 8), every=0.1) as server:
            tab = await opened(browser, server)
            for key in "1234567890":
                await tab.press(key)
                await tab.until("document.querySelector('main').innerText.length > 3")
                if key not in "45":
                    await tab.until("document.body.innerText.includes('<img src=x onerror=window.owned=1>')")
            await tab.press("n")
            await tab.until("document.querySelector('.detail')")
            assert (
                await tab.eval(
                    "document.images.length + document.querySelectorAll('main script, iframe, object').length"
                )
                == 0
            )
            assert await tab.eval("window.owned === undefined")
            shown = str(await tab.eval("document.documentElement.outerHTML"))
            assert "\\x1b]0;x\\x07\\u202e" in shown
            assert not [char for char in ("\x1b", "\x07", "\u202e") if char in shown]
            assert tab.said == []


async def test_other_sites_in_the_same_browser_get_nothing(chromium: Chromium):
    """GU-1, GU-2: a page of another origin, with the visitor's cookies; a name that was turned to this address."""
    source = RiggedSource(1, 8)
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(source) as server, serving(RiggedSource(1, 1)) as other:
            tab = await opened(browser, server)
            here = f"http://127.0.0.1:{server.port}"
            await tab.open(f"http://localhost:{other.port}/")  # a refusal, whose policy would forbid all: it is lifted
            await tab.send("Page.setBypassCSP", enabled=True)
            await tab.open(f"http://localhost:{other.port}/?x")
            await tab.until("document.body.innerText.includes('token')")
            tried = (
                "Promise.all(['api/session', 'api/stream', 'static/page.js'].map((path) =>"
                f" fetch('{here}/' + path, {{credentials: 'include'}}).then(() => 'read', () => 'refused')))"
            )
            assert await tab.eval(tried) == ["refused"] * 3
            options = "{method: 'POST', mode: 'no-cors', credentials: 'include', body: '{\"target\": \"1\"}'}"
            assert (
                await tab.eval(f"fetch('{here}/api/kill', {options}).then((a) => a.type, () => 'refused')") == "refused"
            )
            await tab.open(f"http://rebound.test:{server.port}/?token={server.door.token}")
            await tab.until("document.body.innerText.includes('not available under this name')")
            assert source.acts == []


async def test_page_works_below_a_prefix_and_by_another_name(chromium: Chromium):
    """As by a proxy, and by `ssh -L`."""
    with trio.fail_after(HANG_SECONDS):
        async with visiting(chromium) as browser, serving(RiggedSource(1, 8), prefix="/runs/a") as server:
            tab = await browser.new_tab()
            await tab.open(server.address.replace("127.0.0.1", "localhost"))
            await tab.until("performance.getEntriesByName('trimesh:shown').length")
            assert await tab.eval("location.href") == f"http://localhost:{server.port}/runs/a/"
            await tab.press("5")
            await tab.until("document.querySelector('.chart canvas')")
            assert tab.said == []


@pytest.mark.stress
async def test_pictures_for_people(chromium: Chromium, tmp_path: Path):
    """Writes what is to be looked at: both schemes, all tabs."""
    async with visiting(chromium) as browser, serving(WaitingSource(), every=0.5) as server:
        tab = await opened(browser, server)
        for scheme in ("light", "dark"):
            await tab.scheme(scheme)
            for key in "1234567890":
                await tab.press(key)
                await tab.until("document.querySelector('main').innerText.length > 3")
                await tab.picture(tmp_path / f"{scheme}-{key}.png")
        print(f"pictures are in {tmp_path}")
        assert tab.said == []
