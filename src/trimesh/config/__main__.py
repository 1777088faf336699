"""Print docs/settings.md: `python -m trimesh.config`."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from typing import Final

from trimesh import limits
from trimesh.config.settings import SETTINGS, Setting, Settings

_HEAD: Final = """\
# Settings

Printed by `python -m trimesh.config`; change `src/trimesh/config/settings.py` instead.

Each layer overrides the one before:

1. the default;
2. a file: the table `[tool.trimesh]` of `pyproject.toml`, or all of `trimesh.toml`; the nearest one, from the working
   directory of the program upwards, `trimesh.toml` before `pyproject.toml`. It is searched for once, when the first
   setting is needed. `TRIMESH_CONFIG` names another file; empty, none;
3. variables of the environment, `TRIMESH_*`, unless empty. Each `spawn_procs` reads them again, and so does entering
   the outermost block;
4. `with trimesh.configured(grace=30):`, for the task in the block, and tasks that it starts there;
5. a parameter, such as `spawn_procs(..., grace=30)`.

Spawned processes inherit the settings of the spawning process, not those of files and variables that they find; `env=`
may set `TRIMESH_*` variables for them. `trimesh.config.current()` returns the current settings, a frozen struct. An
unknown setting, or a wrong value, raises `trimesh.ConfigError`. So does a file of another user but root, or one that
every user may write: it could make the program run code.

`spin`, `rdma`, `rdma_address`, `ucx`, `host_id` and `stall_after` count for a process as it starts, and in the program
itself when its outermost block is entered; `native_lib` and `libssl` when those libraries are loaded.
"""

_WIDTH: Final = 120
_LIMIT: Final = re.compile(r"`limits\.(\w+)`")


def page() -> str:
    """Return the text of docs/settings.md."""
    [struct] = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(struct, ast.ClassDef)
    _, *texts = (ast.literal_eval(node.value) for node in struct.body if isinstance(node, ast.Expr))
    return "\n".join((_HEAD, *(_section(*one) for one in zip(SETTINGS, texts, strict=True))))


def _section(setting: Setting, text: str) -> str:
    text, _, default = " ".join(text.split()).partition(" Default: ")
    default = _LIMIT.sub(lambda found: f"{getattr(limits, found[1]):g}", default.removesuffix("."))
    default = default or f"{_shown(getattr(Settings(), setting.name))} {setting.kind.unit}".rstrip()
    known = "" if setting.kind.unit else f" {setting.kind.known[0].upper()}{setting.kind.known[1:]}."
    return f"## {setting.name}\n\n`{setting.variable}`; default: {default}.\n\n{textwrap.fill(text + known, _WIDTH)}\n"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"`{value}`"


# ----   main   --------------------------------------------------------------------------------------------------------

sys.stdout.write(page())
