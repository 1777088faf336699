"""Files of the repository that are pages of the site, and links between files as links between pages.

In the repository every link names a file, so that it works wherever the files are read. On the site a link to a file
that is no page becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = "docs"

FIXED = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "explanation/security.md",
}
"""Documents of the root, and where they stand on the site."""

LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^()\s]+)\)")
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE)
"""A mark for scripts; a table below it has to begin a block."""
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """Return path in the repository and path on the site of each page that does not lie in docs/."""
    found = dict(FIXED)
    for path in sorted((ROOT / "examples").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.name == "README.md":
            found[name] = name.removesuffix("README.md") + "index.md"
        elif path.suffix == ".py":
            found[name] = name.removesuffix(".py") + ".md"
    return found


def content(path: str) -> str:
    """Return the text of a page that does not lie in docs/: a document as it is, a program as a listing."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n```python\n{text}```\n"


def repository_path(page: str) -> str:
    """Return the path in the repository of a page of the site.

    Pages of public names have docstrings, whose links start at the root.
    """
    if page.startswith("reference/api/"):
        return posixpath.basename(page)
    return {site: path for path, site in pages().items()}.get(page, f"{DOCS}/{page}")


SOURCES = {
    "src/trimesh/actor": "reference/api/actors.md",
    "src/trimesh/errors.py": "reference/api/errors.md",
    "src/trimesh/events.py": "reference/events.md",
    "src/trimesh/limits.py": "reference/limits.md",
}
"""Pages that are made from sources: links in the repository lead to those, on the site to the pages."""


def site_path(path: str, generated: frozenset[str]) -> str | None:
    """Return the path on the site of a file of the repository, or None if it is no page."""
    inside = path.removeprefix(f"{DOCS}/")
    if inside != path:
        return inside if inside in generated or (ROOT / path).is_file() else None
    return pages().get(path) or SOURCES.get(path)


def rewritten(markdown: str, page: str, generated: frozenset[str] = frozenset()) -> str:
    """Return the text of a page with links between files made links between pages.

    Args:
        markdown: As it stands in the repository.
        page: Its path on the site.
        generated: Paths on the site of the pages that are made while it is built.
    """
    folder = posixpath.dirname(repository_path(page))

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if "://" in target or not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        site = site_path(path, generated)
        if site is None:  # a file that does not exist stays a link, so that the build fails
            return match["text"].removeprefix("!")[1:-1] if (ROOT / path).exists() else match[0]
        relative = posixpath.relpath(site, posixpath.dirname(page) or ".")
        return f"{match['text']}({relative}{'#' + anchor if anchor else ''})"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):  # listings are left alone
        parts += [LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return COMMENT.sub("\n", "".join([*parts, LINK.sub(link, markdown[end:])]))
