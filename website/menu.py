"""The menu: what mkdocs.yml names, then every other page in the part that its folder stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from website import outside, reference

PART_OF = {"tutorial": "Tutorial", "how-to": "How-to", "reference": "Reference"}
"""Folder of docs/, and the part of the menu that its pages come into; all others come into the last part."""

LAST = "Explanation"


def named(menu: list[Any]) -> Iterator[str]:
    """Yield the pages that a menu names."""
    for entry in menu:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                yield from named(value)
            else:
                yield value


def completed(menu: list[Any]) -> list[Any]:
    """Return the menu with all pages."""
    parts = {title: entries for part in menu for title, entries in part.items() if isinstance(entries, list)}
    parts["Reference"].append({"Names": [{title: page} for title, page in reference.api_titles().items()]})
    docs = outside.ROOT / outside.DOCS
    examples = [page for page in outside.pages().values() if page.startswith("examples/")]
    parts["How-to"].append({"Example programs": sorted(examples)})
    known = set(named(menu))
    for path in sorted(docs.rglob("*.md")):
        page = path.relative_to(docs).as_posix()
        if page not in known:
            parts[PART_OF.get(page.partition("/")[0], LAST)].append(page)
    return [part for part in menu if any(part.values())]
