"""`import trimesh` is cheap: what is heavy loads when it is used."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

PROBE = """
import json, sys, time
start = time.perf_counter()
import trimesh
seconds = time.perf_counter() - start
with open("/proc/self/maps") as maps:
    libraries = sorted({line.split(None, 5)[5].strip() for line in maps if ".so" in line})
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules), "libraries": libraries}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"import trimesh took {found['seconds'] * 1e3:.0f} ms, {len(found['modules'])} modules")
    return found


OWN_MODULES_MAX = 120
ALL_MODULES_MAX = 400 if sys.version_info < (3, 14) else 415  # what we use of the library of 3.14 has 10 more
"""A count, not a time, so that it means the same everywhere. Raise it for what every program needs, and for no more."""


def test_import_stays_within_its_budget_of_modules(imported: dict[str, list[str]]) -> None:
    own = [name for name in imported["modules"] if name.partition(".")[0] == "trimesh"]

    assert len(own) <= OWN_MODULES_MAX
    assert len(imported["modules"]) <= ALL_MODULES_MAX


@pytest.mark.parametrize("heavy", ["IPython", "marimo", "torch", "numpy", "trimesh._native", "_cffi_backend"])
def test_import_loads_no_heavy_module(imported: dict[str, list[str]], heavy: str) -> None:
    assert [name for name in imported["modules"] if name == heavy or name.startswith(f"{heavy}.")] == []


def test_package_is_the_command() -> None:
    """`python -m trimesh` where the script is not on the path; a plain install is told which extra it needs."""
    blocked = "import sys, runpy; sys.modules['cyclopts'] = None; sys.argv[1:] = ['--help']; "
    script = f"{blocked} runpy.run_module('trimesh', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "the command trimesh needs the package cyclopts: pip install 'trimesh-actors[cli]'\n"
    pytest.importorskip("cyclopts")
    command = [sys.executable, "-m", "trimesh", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "autopsy" in done.stdout


def test_command_without_the_page_asks_for_its_extra_when_the_page_is_asked_for() -> None:
    pytest.importorskip("cyclopts")
    blocked = "import sys, runpy; sys.modules['starlette'] = None; "

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        script = f"{blocked} sys.argv[1:] = {list(arguments)}; runpy.run_module('trimesh', run_name='__main__')"
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert run("--help").returncode == 0
    done = run("dashboard")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "trimesh: dashboard needs starlette and anycorn: pip install 'trimesh-actors[dashboard]'\n"


def test_data_without_torch_asks_for_its_own_extra() -> None:
    """That has torch and pyarrow, both of which it needs."""
    script = "import sys; sys.modules['torch'] = None; import trimesh.data"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'trimesh-actors[data]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["aio", "blocking", "rdma", "testing"])
def test_package_is_loaded_when_it_is_used(imported: dict[str, list[str]], name: str) -> None:
    """`trimesh.testing.simulate` after `import trimesh` alone."""
    assert [module for module in imported["modules"] if module.startswith(f"trimesh.{name}")] == []
    script = f"import trimesh; assert all(getattr(trimesh.{name}, public) for public in trimesh.{name}.__all__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_loaded_later_loads_no_torch_unless_it_computes_with_it() -> None:
    """Programs without torch use it."""
    script = (
        "import sys, trimesh, trimesh.blocking; trimesh.aio, trimesh.observe, trimesh.programs, trimesh.service; "
        "trimesh.spmd, trimesh.connect, trimesh.heal, trimesh.DeviceMesh, trimesh.DeviceMeshError; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_import_maps_no_native_library(imported: dict[str, list[str]]) -> None:
    assert [path for path in imported["libraries"] if "libtrimesh" in path] == []
    assert any("libc" in path for path in imported["libraries"])


def test_what_is_not_installed_is_no_attribute() -> None:
    """For `hasattr`, `inspect.getmembers` and `from trimesh import *`; a `from` import says what to install."""
    script = textwrap.dedent("""
        import sys
        sys.modules["torch"] = None
        import inspect, trimesh
        assert not hasattr(trimesh, "distribute") and not hasattr(trimesh, "tensor") and hasattr(trimesh, "aio")
        assert "distribute" not in trimesh.__all__ and "Actor" in trimesh.__all__
        inspect.getmembers(trimesh)
        from trimesh import *
        try:
            from trimesh import distribute
        except ModuleNotFoundError as error:
            assert "trimesh-actors[torch]" in str(error)
        try:
            trimesh.distribute
        except AttributeError as error:
            assert "trimesh-actors[torch]" in str(error)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
