"""The search of the site in a real browser, served and as a folder of files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trio
from tests.dashboard.browser import MISSING, running_chromium, visiting
from tests.patience import HANG_SECONDS
from website import outside

pytest.importorskip("mkdocs", reason="comes with the extra `docs`")

pytestmark = [pytest.mark.real, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]


PAGES = {
    "index.md": "# Begin\n\nThis page links [another](reference/api/actors.md).\n",
    "reference/api/actors.md": "# Actors\n\nRestarts have an intensity and a period.\n",
}
CONFIG = f"""
INHERIT: {outside.ROOT}/website/mkdocs.yml
docs_dir: docs
site_dir: site
hooks: []
nav: null
plugins: [search, offline]
"""
"""The site as it is, of a few pages: `make site` builds all."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a site."""
    folder = tmp_path_factory.mktemp("site")
    worker = (outside.ROOT / "website" / "iframe-worker.js").read_text()
    for name, text in {**PAGES, "assets/iframe-worker.js": worker}.items():
        path = folder / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "mkdocs.yml").write_text(CONFIG)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    subprocess.run(command, cwd=folder, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder / "site"


class Handler(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Log nothing."""


@contextmanager
def served(site: Path) -> Generator[str]:
    """Serve the site below an address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


QUERY = "document.querySelector('[data-md-component=search-query]')"
READY = "!document.querySelector('.md-search-result__meta').innerText.startsWith('Initializing')"
"""Before it has its index, the search ignores what is typed."""
RESULT = "document.querySelector('.md-search-result__item a')"


async def test_search_finds_a_word_and_leads_to_its_page(site: Path, tmp_path: Path) -> None:
    """From the first page and from one below a folder."""
    with trio.fail_after(HANG_SECONDS), running_chromium(tmp_path) as chromium, served(site) as address:
        async with visiting(chromium) as browser:
            for base in (address, site.as_uri()):
                for page in ("index.html", "reference/api/actors.html"):
                    tab = await browser.new_tab()
                    await tab.open(f"{base}/{page}")
                    await tab.until(f"document.readyState === 'complete' && {QUERY}")
                    await tab.eval(f"{QUERY}.focus()")
                    await tab.until(READY)
                    await tab.send("Input.insertText", text="intensity")
                    await tab.send("Input.dispatchKeyEvent", type="keyUp", key="y")  # at which the search looks
                    await tab.until(RESULT)
                    await tab.eval(f"{RESULT}.click()")
                    await tab.until("document.querySelector('article mark')?.innerText.startsWith('intensity')")
                    assert (await tab.eval("location.href")).startswith(f"{base}/")
                    assert tab.said == []
