"""What mkdocs calls while it builds the site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from website import menu, outside, reference

GENERATED = frozenset(reference.pages())


def on_config(config: Any) -> Any:
    """Add the pages to the menu that mkdocs.yml does not name."""
    config.nav = menu.completed(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add pages that lie outside of docs/, and those made from the sources."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - so that this module can be read without mkdocs

    made = reference.pages() | {site: outside.content(path) for path, site in outside.pages().items()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    worker = Path(__file__).with_name("iframe-worker.js").read_text(encoding="utf-8")
    files.append(File.generated(config, "assets/iframe-worker.js", content=worker))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links between files of the repository to pages."""
    return outside.rewritten(markdown, page.file.src_uri, GENERATED)
