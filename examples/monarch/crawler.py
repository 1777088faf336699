"""Monarch's crawler: one frontier of pages, many crawlers that take from it and add to it, until no page is left.

Without `--url` it crawls a site of its own, which this program serves on the loopback interface.

Run it: python examples/monarch/crawler.py [--crawlers 4] [--depth 3] [--url https://example.com/docs/]
"""

from __future__ import annotations

import argparse
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import URLError
from urllib.parse import urldefrag, urljoin
from urllib.request import urlopen

import trio

from trimesh import Actor, Reply, current_rank, endpoint, this_host, this_proc

Page = tuple[str, int]
"""A link, and how many links further the crawl goes from there."""

FETCH_SECONDS = 30.0


class Frontier(Actor):
    """The pages that are to be read. Who asks while there is none is answered when there is."""

    def __init__(self, url: str, depth: int) -> None:
        self.pages: deque[Page] = deque([(url, depth)])
        self.seen = {url}
        self.under_way = 0
        self.idle: deque[Reply[Page | None]] = deque()

    @endpoint(reply="later")
    async def take(self, reply: Reply[Page | None]) -> None:
        """Answer with a page, or None once all are read: nothing is waiting and no crawler can add any."""
        self.idle.append(reply)
        self._answer()

    @endpoint
    async def add(self, links: list[str], depth: int) -> None:
        """Take in the links of a page, of which those that are new will be read, and note that it has been read."""
        for link in links:
            if link not in self.seen:
                self.seen.add(link)
                self.pages.append((link, depth))
        self.under_way -= 1
        self._answer()

    def _answer(self) -> None:
        while self.idle and self.pages:
            self.under_way += 1
            self.idle.popleft().send(self.pages.popleft())
        if not self.under_way:
            while self.idle:
                self.idle.popleft().send(None)


class Crawler(Actor):
    """Reads page after page."""

    def __init__(self, frontier: Frontier, base: str) -> None:
        self.frontier = frontier
        self.base = base

    @endpoint
    async def crawl(self) -> Counter[str]:
        """Read until no page is left; return how many were read, and how many could not be."""
        done: Counter[str] = Counter()
        while (page := await self.frontier.take.call_one()) is not None:
            url, depth = page
            try:
                # A cancel leaves the thread to its end and goes on at once: it does nothing but read.
                text = await trio.to_thread.run_sync(fetch, url, abandon_on_cancel=True)
            except URLError as error:
                print(f"crawler {current_rank()}: {url}: {error}")
                done["broken"] += 1
                links = []
            else:
                print(f"crawler {current_rank()}: {url}, {len(text)} characters, depth {depth}")
                done["read"] += 1
                links = [link for link in links_of(url, text) if link.startswith(self.base)] if depth else []
            await self.frontier.add.call_one(links, depth - 1)
        return done


def fetch(url: str) -> str:
    """Return the text of a page."""
    with urlopen(url, timeout=FETCH_SECONDS) as response:
        data: bytes = response.read()
    return data.decode(errors="replace")


def links_of(url: str, text: str) -> list[str]:
    """Return the pages that a page links, without fragments."""
    found: list[str] = []

    class Anchors(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            href = dict(attrs).get("href")
            if tag == "a" and href:
                found.append(urldefrag(urljoin(url, href))[0])

    Anchors().feed(text)
    return found


async def main(url: str, depth: int, crawlers: int) -> None:
    async with (
        this_proc().spawn("frontier", Frontier, url, depth) as frontier,
        this_host().spawn_procs({"procs": crawlers}) as procs,
    ):
        team = await procs.spawn("crawlers", Crawler, frontier, url)
        counts = await team.crawl.call()
    total = sum(counts.values(), Counter())
    print(f"pages read: {total['read']}, broken: {total['broken']}, by {len(counts)} crawlers")


# ---- a site to crawl -------------------------------------------------------------------------------------------------

SITE_PAGES = 40


class Site(BaseHTTPRequestHandler):
    """Page n links pages 2n + 1 and 2n + 2, the first page, and others' sites; the last pages link nothing there is."""

    def do_GET(self) -> None:
        """Answer with a page."""
        name = self.path.strip("/") or "0"
        if not name.isdigit() or int(name) >= SITE_PAGES:
            self.send_error(404)
            return
        number = int(name)
        links = ["/", f"/{2 * number + 1}#part", f"/{2 * number + 2}", "https://example.com/elsewhere"]
        body = "".join(f'<p><a href="{link}">{link}</a></p>' for link in links).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Say nothing."""


@contextmanager
def served_site() -> Iterator[str]:
    """Serve a site while the block runs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="where to begin; pages below it are read (default: a site of this program)")
    parser.add_argument("--depth", type=int, default=3, help="how many links away (default: %(default)s)")
    parser.add_argument("--crawlers", type=int, default=4, help="processes that crawl (default: %(default)s)")
    options = parser.parse_args()
    if options.url is not None:
        trio.run(main, options.url, options.depth, options.crawlers)
    else:
        with served_site() as own:
            trio.run(main, own, options.depth, options.crawlers)
