"""The mutants that mean the same as what they change, or change what no test is to see; each with its reason."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

LIST: Final = Path(__file__).with_name("explained.toml")

Explained = dict[tuple[str, str, str], str]
"""Why, by file, function and the text of the mutant."""


def read_explained() -> Explained:
    """Return what the list says."""
    return {
        (path, one["where"], one["mutant"]): one["why"]
        for path, some in tomllib.loads(LIST.read_text(encoding="utf-8")).items()
        for one in some
    }
