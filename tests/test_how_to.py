"""The listings of the how-to pages run, and those of three other pages."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.program_template import Run, executed
from tests.test_docs import LOGGED

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = [*sorted((DOCS / "how-to").glob("*.md")), DOCS / "guide.md", DOCS / "index.md", DOCS / "torchrun.md"]
LISTING = re.compile(r'^```python(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)

PROGRAM_SECONDS = 100.0

OTHERS = ("ibis", "lightning", "peft", "polars", "transformers")
"""Packages of listings that no extra has: installed by hand, they run, and may print warnings of their own."""

STALLED = re.compile(r"^\S+ \(pid \d+\) is stalled: .*\n(?:(?:  |Stack ).*\n)*", re.MULTILINE)
"""What is logged where a worker takes five seconds to import torch."""

SUITES = ("test_real.py", "test_store.py")
SERVICE = "service.py"

ASK_THE_SERVICE = """
import asyncio, aiohttp, uvicorn
from service import app

async def main():
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.get("/square/7") as response:
            assert await response.json() == {"square": 49}
        async with session.get("/pool/ready") as response:
            assert (response.status, (await response.text()).strip()) == (200, "ready")
    server.should_exit = True
    await serving

asyncio.run(main())
"""


def listings() -> dict[str, str]:
    """Return name and text of each listing; one without a name is called for its page."""
    found = {}
    for page in PAGES:
        for index, (name, text) in enumerate(LISTING.findall(page.read_text())):
            found[name or f"{page.parent.name}_{page.stem}_{index}.py".replace("-", "_")] = text
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All listings, as files."""
    made = tmp_path_factory.mktemp("how-to")
    for name, text in listings().items():
        (made / name).write_text(text)
    return made


@pytest.mark.real
@pytest.mark.parametrize("name", [name for name in listings() if name not in (*SUITES, SERVICE)])
def test_program_runs(name: str, run_program: Run, folder: Path) -> None:
    others = {one for one in OTHERS if re.search(rf"^(import|from) {one}\b", (folder / name).read_text(), re.MULTILINE)}
    if missing := [one for one in sorted(others) if importlib.util.find_spec(one) is None]:
        pytest.skip(f"the listing needs {', '.join(missing)}, which no extra has")

    done = run_program(folder / name, cwd=folder, seconds=PROGRAM_SECONDS)

    assert done.returncode == 0, done.stderr
    if not others:
        said = STALLED.sub("", done.stderr).splitlines()
        assert [line for line in said if not LOGGED.fullmatch(line)] == []  # of meshes that go on


@pytest.mark.real
def test_service_answers(folder: Path) -> None:
    (folder / "ask.py").write_text(ASK_THE_SERVICE)

    done = executed(folder / "ask.py", cwd=folder, seconds=PROGRAM_SECONDS)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.real
def test_suites_pass(folder: Path) -> None:
    """With one seed."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "trimesh.testing.plugin", "-c", "/dev/null", "--mesh-seeds", "1"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(folder), *SUITES]

    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    assert "7 passed" in done.stdout, done.stdout
