"""Moves the fragments of `changelog.d/` into the part `Unreleased` of the changelog: `make changelog`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "changelog.d"

KINDS = {"renamed": "Renamed", "added": "Added", "changed": "Changed", "removed": "Removed", "fixed": "Fixed"}
"""The end of a fragment's name, and its heading, in the order of the changelog."""

UNRELEASED = "## Unreleased\n"
_NAME = re.compile(r"[a-z0-9-]+\.([a-z]+)\.md")
_LINE = re.compile(r"- \S|  \S")


def complaints(name: str, text: str) -> list[str]:
    """Return what is wrong with a fragment."""
    named = _NAME.fullmatch(name)
    if named is None or named[1] not in KINDS:
        return [
            f"{name}: a fragment is called NAME.KIND.md, in small letters and hyphens; kinds are {', '.join(KINDS)}"
        ]
    lines = text.splitlines()
    if not lines or not lines[0].startswith("- "):
        return [f"{name}: a fragment is items of a list, which begin with `- `"]
    return [f"{name}:{number}: {line!r}" for number, line in enumerate(lines, 1) if not _LINE.match(line)]


def assembled(changelog: str, fragments: Mapping[str, str]) -> str:
    """Return a changelog with fragments at the end of the sections of `Unreleased` that they belong to.

    Args:
        changelog: Its text.
        fragments: Text by file name.

    Raises:
        ValueError: It has no such part, or a fragment is wrong.
    """
    wrong = [one for name, text in fragments.items() for one in complaints(name, text)]
    if wrong:
        raise ValueError("\n".join(wrong))
    before, heading, after = changelog.partition(UNRELEASED)
    if not heading:
        raise ValueError(f"the changelog must have a heading {UNRELEASED.strip()!r}")
    part, next_heading, rest = after.partition("\n## ")
    intro, *written = re.split(r"^### (\w+)\n", part, flags=re.MULTILINE)
    sections = dict(zip(written[::2], written[1::2], strict=True))
    for kind, title in KINDS.items():
        new = "".join(f"{text.rstrip()}\n" for name, text in sorted(fragments.items()) if name.endswith(f".{kind}.md"))
        if new:
            items = f"{sections.get(title, '').strip()}\n{new}".strip()
            sections[title] = f"\n{items}\n\n"
    order = [title for title in KINDS.values() if title in sections]
    order += [title for title in sections if title not in order]
    body = "".join(f"### {title}\n{sections[title]}" for title in order)
    return before + heading + intro + body.rstrip() + "\n" + next_heading + rest


def fragments() -> dict[str, str]:
    """Return the fragments that there are, by file name."""
    return {path.name: path.read_text() for path in sorted(FOLDER.glob("*.md")) if path.name != "README.md"}


def main() -> None:
    """Do it, or end with what is wrong."""
    found = fragments()
    changelog = ROOT / "CHANGELOG.md"
    try:
        changelog.write_text(assembled(changelog.read_text(), found))
    except ValueError as error:
        sys.exit(f"changelog: {error}")
    for name in found:
        (FOLDER / name).unlink()
    print(f"{len(found)} fragments are in CHANGELOG.md")


if __name__ == "__main__":
    main()
