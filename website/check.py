"""Checks the site that was built, as it is served and as a folder of files.

Links and results of the search lead somewhere, pictures have words, and nothing is fetched when a page is viewed.

python -m website.check build/site
"""

from __future__ import annotations

import json
import posixpath
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
"""What a browser fetches for a page by itself."""

NOT_FETCHED = {"canonical", "next", "prev"}
"""Relations of a `link` that are a mere address."""


class Page(HTMLParser):
    """Anchors, links, sources and pictures without words of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.wordless: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take what a tag says."""
        told = dict(attrs)
        for name in ("id", "name"):
            if told.get(name):
                self.anchors.add(str(told[name]))
        if tag == "img" and not told.get("alt"):
            self.wordless.append(str(told.get("src")))
        for name in ("href", "src"):
            target = told.get(name)
            if target is None or told.get("rel") in NOT_FETCHED:
                continue
            (self.fetched if (tag, name) in FETCHED else self.links).append(target)


def complaint(site: Path, pages: dict[str, Page], name: str, target: str) -> str | None:
    """Return what is wrong with a link of a page. One to a folder shows a list of its files where none serves it."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
    if not (site / path).is_file():
        return f"{name}: leads to {target}, which is not there"
    if parts.fragment and path in pages and unquote(parts.fragment) not in pages[path].anchors:
        return f"{name}: leads to {target}, where no such anchor is"
    return None


def complaints(site: Path) -> Iterator[str]:
    """Yield what is wrong with a site."""
    pages = {path.relative_to(site).as_posix(): Page(path.read_text()) for path in site.rglob("*.html")}
    if not pages:
        yield f"{site}: no pages; build the site by `make site`"
    if not (site / "search/search_index.js").is_file():
        yield f"{site}: no search where it is opened as a file: the plugin `offline` writes search/search_index.js"
    links = [(name, target) for name, page in pages.items() for target in {*page.links, *page.fetched}]
    if (index := site / "search/search_index.json").is_file():
        links += [("the search", entry["location"]) for entry in json.loads(index.read_text())["docs"]]
    for name, target in links:
        if name != "404.html" and (found := complaint(site, pages, name, target)):  # it is served under any address
            yield found
    for name, page in pages.items():
        yield from (f"{name}: fetches {target}" for target in page.fetched if urlsplit(target).netloc)
        yield from (f"{name}: {source} needs a text in place of the picture" for source in page.wordless)


def main() -> None:
    """Print all complaints, and fail if there are any."""
    found = sorted(set(complaints(Path(sys.argv[1]))))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
