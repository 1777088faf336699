"""The floors of docs/ARCHITECTURE.md: import-linter's contracts in pyproject.toml hold, and each of them can break."""

from __future__ import annotations

import graphlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"

PLANTED = [
    ("Floors", "_wire/messages.py", "from trimesh._runtime import proc"),
    ("Floors", "shape/extent.py", "from trimesh.events import records"),
    ("Pure floors", "_supervision/policy.py", "import time"),
    ("Pure floors", "_routing/collector.py", "import trio"),
    ("Nobody imports the package itself", "_runtime/proc.py", "import trimesh"),
    ("Only _native talks to the native library", "_transport/base.py", "import cffi"),
    ("Only the tensor floors import torch", "_wire/payload.py", "import torch"),
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


@pytest.mark.parametrize(("contract", "path", "line"), PLANTED)
def test_layers_break_by_planted_import(tmp_path: Path, contract: str, path: str, line: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    with (tmp_path / "src" / "trimesh" / path).open("a") as file:
        file.write(f"\n{line}\n")

    report = lint(tmp_path)

    broken = [entry for entry in report.splitlines() if " BROKEN" in entry]  # how many imports are ignored may follow
    assert any(entry.startswith(contract) for entry in broken), report


def test_layers_are_documented() -> None:
    architecture = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    packages = {path.parent.name for path in (ROOT / "src" / "trimesh").glob("*/__init__.py")}

    assert packages
    assert {package for package in packages if package not in architecture} == set()


# ---- the native library ----------------------------------------------------------------------------------------------

NATIVE = ROOT / "native" / "src"
NATIVE_PURE = {"body", "crossing", "frame", "limits", "session", "status"}


def native_imports() -> dict[str, set[str]]:
    """Return which files each file of the native library imports, without its tests."""
    texts = {path.stem: path.read_text() for path in NATIVE.glob("*.zig") if not path.stem.endswith(("test", "tests"))}
    return {name: set(re.findall(r'@import\("(\w+)\.zig"\)', text)) for name, text in texts.items() if name != "fuzz"}


def test_native_files_import_downwards() -> None:
    """TopologicalSorter raises CycleError, which names the cycle."""
    order = list(graphlib.TopologicalSorter(native_imports()).static_order())

    assert order.index("frame") < order.index("session") < order.index("abi")


def test_native_pure_files_import_pure_files_only() -> None:
    imports = native_imports()

    assert set(imports) >= NATIVE_PURE
    assert {name: imports[name] - NATIVE_PURE for name in sorted(NATIVE_PURE) if imports[name] - NATIVE_PURE} == {}
