"""The command line of an agent on another machine, for the shell of whoever has an account there; PURE.

A login shell may be sh, csh or fish: the command is one line, quoted by single quotes, with no quote, backslash or `!`
in what is quoted, and hands over to sh at once.
"""

from __future__ import annotations

import re
import shlex
from typing import Final

NO_PYTHON: Final = 78
"""Exit code where no Python is found that could be an agent (EX_CONFIG)."""

_NUMBER: Final = re.compile(r"trimesh-agent (\d+)\s*")
_RUN: Final = 'exec "$p" -m trimesh.jobs.agent'
_SAY: Final = 'echo "trimesh-agent $$" >&2'
_FIND: Final = (
    'for n in "$@"; do p=$(command -v "$n") || { t="$t; $n is not there"; continue; }; '
    f'if w=$("$p" -c "$0" 2>&1); then {_SAY}; {_RUN}; fi; t="$t; $n: $w"; done; '
    f'echo "no Python here can be an agent$t" >&2; exit {NO_PYTHON}'
)
_CHECK: Final = (
    "import sys, importlib.util as u; v = sys.version_info[:2]; "
    'sys.exit("it is Python %d.%d" % v if v != ({major}, {minor}) else '
    'None if u.find_spec("trimesh") else "it has no trimesh")'
)


def agent_command(python: str | None, executable: str, version: tuple[int, int]) -> str:
    """Return what starts an agent there, and writes its process id before it does.

    Args:
        python: The interpreter; None takes the first of some that has trimesh and the version of this program.
        executable: The interpreter of this program: the first one that is tried.
        version: Of this program, its first two numbers.
    """
    if python is not None:
        return f"exec /bin/sh -c {shlex.quote(f'p=$0; {_SAY}; {_RUN}')} {shlex.quote(python)}"
    major, minor = version
    # `!` is the history of csh, so `!=` is written by its other name.
    check = _CHECK.format(major=major, minor=minor).replace("v != (", "not v == (")
    names = dict.fromkeys((executable, f"python{major}.{minor}", "python3", "python"))
    words = " ".join(shlex.quote(name) for name in names if name)
    return f"exec /bin/sh -c {shlex.quote(_FIND)} {shlex.quote(check)} {words}"


def agent_number(line: str) -> int | None:
    """Return the process id that a line says, or None."""
    found = _NUMBER.fullmatch(line)
    return None if found is None else int(found[1])
