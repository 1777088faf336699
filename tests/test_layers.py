"""The floors of docs/ARCHITECTURE.md: import-linter's contracts in pyproject.toml hold, and each of them can break."""

from __future__ import annotations

import graphlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"

PLANTED = [
    ("Floors", "_wire/messages.py", "from trimesh._runtime.life import proc"),
    ("Floors", "shape/extent.py", "from trimesh.events import records"),
    ("Pure floors", "_supervision/policy.py", "import time"),
    ("Pure floors", "_routing/collector.py", "import trio"),
    ("No module imports the package itself", "_runtime/life/proc.py", "import trimesh"),
    ("Only _native talks to the native library", "_transport/interface.py", "import cffi"),
    ("Only the floors of tensors and data import torch", "_wire/pickled/payload.py", "import torch"),
    ("Rooms of _runtime", "_runtime/actors/cell.py", "from trimesh._runtime.life import proc"),
    ("Rooms of tensor", "tensor/controller/team.py", "from trimesh.tensor.session import mesh"),
    ("The ranks' rooms of tensor", "tensor/kernels/values.py", "from trimesh.tensor.controller import team"),
    ("Rooms of testing", "testing/plans/armed.py", "from trimesh.testing.real import links"),
]


def lint(root: Path) -> str:
    """Run import-linter over the tree at `root` and return its report, one line a contract."""
    done = subprocess.run(
        [sys.executable, "-c", LINT], cwd=root, env={"PYTHONPATH": "src"}, capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return done.stdout


def test_layers_hold() -> None:
    report = lint(ROOT)

    assert "0 broken" in report, report


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each broken contract when all imports are planted: one graph of the modules takes a second."""
    root = tmp_path_factory.mktemp("planted")
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for _, path, line in PLANTED:
        with (root / "src" / "trimesh" / path).open("a") as file:
            file.write(f"\n{line}\n")
    said = lint(root).partition("Broken contracts\n")[2]
    parts = re.split(r"^(.+)\n-+\n\n", said, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("contract", "path", "line"), PLANTED)
def test_layers_break_by_planted_import(broken: dict[str, str], contract: str, path: str, line: str) -> None:
    module = "trimesh." + path.removesuffix(".py").replace("/", ".")
    package, name = re.search(r"(?:from ([\w.]+) )?import (\w+)$", line).groups()  # type: ignore[union-attr]
    imported = re.escape(name) if package is None else rf"{re.escape(package)}(\.{name})?"
    [said] = [text for name, text in broken.items() if name.startswith(contract)]

    assert re.search(rf"{re.escape(module)}\b[^>]*-> {imported}\b", said), said


USERS = """
import grimp, json
graph = grimp.build_graph("trimesh", exclude_type_checking_imports=True, cache_dir=None)
print(json.dumps({module: sorted(graph.find_downstream_modules(module)) for module in graph.modules}))
"""
"""Prints which modules import a module, directly or not. A process of its own: grimp leaves threads behind."""


def test_modules_import_no_others_in_a_circle() -> None:
    users = json.loads(subprocess.check_output([sys.executable, "-c", USERS], cwd=ROOT, text=True))

    knots = {frozenset({one, *(other for other in users[one] if one in users[other])}) for one in users}

    assert [set(knot) for knot in knots if len(knot) > 2] == []  # of two, one imports the other in a function


def test_modules_import_no_others_of_the_package_by_string() -> None:
    by_string = re.compile(r"""import_module\(\s*f?["']trimesh""")
    source = ROOT / "src" / "trimesh"
    found = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if by_string.search(path.read_text())}

    assert found == {"__init__.py", "_native/lib.py"}  # its own attributes; what the build makes


def test_layers_are_documented() -> None:
    """Each package is a box of the picture, in the order of the contract."""
    docs = ROOT / "docs"
    boxes = re.findall(r"^box (\w+) ", (docs / "pictures" / "floors.txt").read_text(), re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    *layers, below = next(one["layers"] for one in contracts if one["name"].startswith("Floors"))

    assert boxes == [name for layer in layers for name in re.findall(r"\w+", layer)]
    assert [name for name in below.split(" | ") if f"`{name}`" not in (docs / "ARCHITECTURE.md").read_text()] == []


# ---- the rooms of the runtime ----------------------------------------------------------------------------------------

RUNTIME = ROOT / "src" / "trimesh" / "_runtime"
FROM_RUNTIME = re.compile(r"from trimesh\._runtime\.([\w.]+) import (?:\(([^)]*)\)|([^(\n#]+))")

REACHED_INTO = {
    *("actors.agent", "actors.cell", "actors.context", "calls.outgoing"),
    *("life.current", "life.current", "life.family", "life.proc", "life.worker"),
    *("peers.host", "peers.incoming", "peers.deaths", "peers.peer", "peers.peer"),
    *("system.exits", "system.seeds", "system.records", "system.seeds"),
    *("tasks.crossing", "tasks.crossing", "tasks.interrupt"),
    *("values.endpoint_spec", "values.codec", "values.endpoint_spec", "watch.report"),
}
"""Modules of the runtime that packages above import past the doors of its rooms. There may only be fewer."""


def test_packages_above_the_runtime_come_in_by_the_doors_of_its_rooms() -> None:
    """A door is what the `__init__.py` of a room exports. The test kit takes the runtime apart, so it does not."""
    doors = {path.parent.name: path.read_text() for path in RUNTIME.glob("*/__init__.py")}
    past: dict[str, set[str]] = {}
    for path in (ROOT / "src" / "trimesh").rglob("*.py"):
        package = path.relative_to(ROOT / "src" / "trimesh").parts[0]
        for room, several, one in FROM_RUNTIME.findall(path.read_text()) if package != "_runtime" else ():
            names = {name.strip() for name in (several or one).split(",") if name.strip()}
            closed = {name for name in names if room in doors and f'"{name}"' not in doors[room]}
            past.setdefault(package, set()).update({room} if "." in room else {f"{room}.{name}" for name in closed})

    assert {package for package, modules in past.items() if modules} == {"aio", "blocking", "testing"}
    assert set().union(*past.values()) == REACHED_INTO


def test_doors_export_no_function_that_is_named_as_a_module_of_the_room() -> None:
    """Otherwise `from trimesh._runtime.life import dump` is the one or the other, by what was imported before."""
    doors = {path: path.read_text() for path in (ROOT / "src" / "trimesh").rglob("__init__.py")}
    exported = re.compile(r"^(?:from [\w.]+ import (?:\(([^)]*)\)|(.*)))", re.MULTILINE)
    names = {
        path.parent: {name.strip() for found in exported.findall(text) for one in found for name in one.split(",")}
        for path, text in doors.items()
    }

    assert [
        folder / name for folder, exports in names.items() for name in exports if (folder / f"{name}.py").exists()
    ] == []


def test_rooms_of_the_package_are_small_enough_to_be_seen_at_once() -> None:
    sizes = {folder: len(list(folder.glob("*.py"))) for folder in (ROOT / "src" / "trimesh").rglob("")}

    assert {folder: size for folder, size in sizes.items() if size > 20} == {}


# ---- the native library ----------------------------------------------------------------------------------------------

NATIVE = ROOT / "native" / "src"
ROOMS = ["", "protocol", "system", "tls", "relay", "rings", "links", "grants", "copying", "tcp", "ucx", "mover", "abi"]
"""From the ground up. Rooms import from rooms below; "" has what all have."""

STRANGERS = [{"protocol", "system"}, {"rings", "grants"}, {"links", "grants"}, {"links", "copying"}, {"tcp", "ucx"}]
"""Rooms that do not import each other, though one stands above the other in the list."""

ROOTS = {"library", "tests", "fuzz"}
IMPORT = re.compile(r'@import\("([\w/.]+)\.zig"\)')


def room_of(name: str) -> str:
    return name.rpartition("/")[0]


def native_imports() -> dict[str, set[str]]:
    """Return which files each file of the native library imports; without tests, fuzz targets and roots."""
    found = {}
    for path in sorted(NATIVE.rglob("*.zig")):
        name = path.relative_to(NATIVE).with_suffix("").as_posix()
        if name not in ROOTS and not path.stem.startswith("fuzz_") and not path.stem.endswith(("test", "stage")):
            found[name] = {
                (path.parent / other).resolve().relative_to(NATIVE).as_posix()
                for other in IMPORT.findall(path.read_text())
            }
    return found


def test_native_files_import_downwards() -> None:
    """TopologicalSorter raises CycleError, which names the cycle."""
    order = list(graphlib.TopologicalSorter(native_imports()).static_order())

    assert order.index("protocol/frame") < order.index("protocol/session") < order.index("abi/abi")


def test_native_rooms_import_downwards() -> None:
    used = {(room_of(name), room_of(other)) for name, others in native_imports().items() for other in others}

    assert {room for pair in used for room in pair} == set(ROOMS)
    assert [pair for pair in sorted(used) if ROOMS.index(pair[0]) < ROOMS.index(pair[1])] == []
    assert [pair for pair in sorted(used) if set(pair) in STRANGERS] == []


def test_native_rooms_are_small_enough_to_be_seen_at_once() -> None:
    sizes = {room: len(list((NATIVE / room).glob("*.zig"))) for room in ROOMS}

    assert {room: size for room, size in sizes.items() if size > 15} == {}


def test_native_protocol_is_pure() -> None:
    """It knows bounds and itself; the kernel and libc begin above it."""
    imports = native_imports()
    protocol = {name for name in imports if room_of(name) == "protocol"}

    assert {
        name: imports[name] - protocol - {"limits"} for name in protocol if imports[name] - protocol - {"limits"}
    } == {}
