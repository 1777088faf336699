"""Print the table of rules, or write it into a page: `python -m trimesh.tensor.rules [PAGE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from trimesh.tensor.rules.table import lines, written_into


def main() -> None:
    if len(sys.argv) == 1:
        print("\n".join(lines()))  # noqa: T201 - printing is its purpose
        return
    document = Path(sys.argv[1])
    document.write_text(written_into(document.read_text()))


main()
