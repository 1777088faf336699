"""The seam between users' awaits and Trio: everything public goes through it, and it costs next to nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import trio

from trimesh._runtime.tasks import crossing

SOURCE = Path(crossing.__file__).parents[2]
PUBLIC = ["actor/*.py", "_runtime/channels/ports.py", "_runtime/channels/receiver.py", "_runtime/watch/events.py"]
INSIDE = {"Functions", "Holding", "Home", "MeshView", "PipedCommand", "Sending", "UnsentCall"}
"""Classes there that no user sees."""

SEAM = {"in_trio", "in_trio_taking", "in_trio_block", "in_trio_now"}
AWAITED = {"__aenter__", "__anext__", "__await__"}


def public_functions() -> dict[str, set[str]]:
    """Return, for each function of a public class that users await, the names that its code uses."""
    found = {}
    for path in sorted(path for pattern in PUBLIC for path in SOURCE.glob(pattern)):
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        for cls in (cls for cls in classes if cls.name not in INSIDE and cls.name[0] != "_"):
            for node in cls.body:
                is_awaited = isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("_")
                if is_awaited or getattr(node, "name", "") in AWAITED:
                    names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
                    found[f"{path.name}: {cls.name}.{node.name}"] = names
    return found


def test_every_public_coroutine_function_crosses_the_seam():
    """K04: what users await works from asyncio: it goes through `in_trio` or `in_trio_block`."""
    functions = public_functions()

    assert len(functions) >= 7
    assert [name for name, used in functions.items() if not used & SEAM] == []


async def test_seam_returns_what_it_was_given_in_trio():
    """The cost in Trio is one look, and no frame or coroutine more."""

    async def work() -> None:
        await trio.lowlevel.checkpoint()

    assert crossing.in_trio(work) is work
    assert crossing.in_trio_now(len) is len


def test_import_loads_no_asyncio():
    """K04: `import trimesh` leaves asyncio alone; `trimesh.aio` is loaded when it is used."""
    script = """
import sys, trimesh
assert not [name for name in sys.modules if name.startswith("asyncio")]
assert trimesh.aio.spawn_procs
assert "asyncio" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
