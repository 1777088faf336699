"""`python -m trimesh.tensor.rules [docs/tensors.md]`: prints the table, or writes it to its place in a document."""

from __future__ import annotations

import sys
from pathlib import Path

from trimesh.tensor.rules.table import lines, written_into


def main() -> None:
    if len(sys.argv) == 1:
        print("\n".join(lines()))  # noqa: T201 - it is what was asked for
        return
    document = Path(sys.argv[1])
    document.write_text(written_into(document.read_text()))


main()
