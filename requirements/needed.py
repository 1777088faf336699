"""Prints what is needed, one requirement a line: to build the package, or to run it with the extras that are named.

pip has no option to install what a project needs without the project.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def needed(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """Yield the requirements of a project with some of its extras, which may name others."""
    yield from project["dependencies"]
    ours = f"{project['name']}["
    while extras:
        for requirement in project["optional-dependencies"][extras.pop()]:
            if requirement.startswith(ours):
                extras += requirement.removeprefix(ours).removesuffix("]").split(",")
            else:
                yield requirement


EDITABLE = "editables>=0.5"
"""What hatchling asks for besides when it installs a tree in place."""

if __name__ == "__main__":
    told = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    to_build = [*told["build-system"]["requires"], EDITABLE]
    print(*(needed(told["project"], sys.argv[1:]) if sys.argv[1:] else to_build), sep="\n")
