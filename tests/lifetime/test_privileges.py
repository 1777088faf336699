"""Processes that give privileges up, and systems that refuse calls: bounded ends, errors in words, nothing regained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.program import PROGRAMS, ROOT, Program
from tests.native import sandbox

pytestmark = pytest.mark.real

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
sandboxed = pytest.mark.skipif(bool(sandbox.why_not()), reason=sandbox.why_not())

ENV = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", PROGRAMS, ROOT)))}


def run(folder: Path, **plan: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the program to its end; return its last event and all facts."""
    with Program(folder, "privileges", plan, env=ENV) as program:
        over = program.event("over")
        assert program.wait() == 0
        program.check_gone()
        return over, program.said("facts")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can write into; those of pytest are for one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


@pytest.mark.parametrize("where", ["setup", "controller", "worker"])
def test_set_id_calls_reach_the_native_threads(where: str, tmp_path: Path) -> None:
    """`setgid` returns in processes that run both native threads: libc waits until each of its threads has obeyed."""
    over, facts = run(tmp_path, drop="nothing", where=where, threads=True)
    assert over["error"] is None
    assert len(facts) == 1


@as_root
def test_block_is_left_after_its_controller_became_another_user(open_folder: Path) -> None:
    """The spawner may not be signalled any more: it is told by its connection, and everything ends."""
    over, facts = run(open_folder, drop="user", where="controller")
    assert over["error"] is None
    assert len(facts) == 1


GIVEN_UP = {"user": pytest.param("user", marks=as_root), "rest": "rest"}


@pytest.mark.parametrize("drop", GIVEN_UP.values(), ids=GIVEN_UP)
def test_new_process_has_what_the_asking_one_has(drop: str, tmp_path: Path) -> None:
    """What was given up in `setup=` does not come back by asking the spawner, which has it, for a process."""
    over, facts = run(tmp_path, drop=drop, nested={})
    assert over["error"] is None
    worker, nested = ({name: said[name] for name in said if name not in ("of", "at", "pid")} for said in facts)
    assert nested == worker
    if drop == "user":
        assert set(worker["users"]) == {"65534"}
        assert int(worker["capabilities"][2], 16) == 0
    else:
        assert (worker["no_new_privs"], worker["niceness"], len(worker["cores"])) == ("1", 3, 1)


@as_root
def test_module_is_preloaded_as_the_asking_user(open_folder: Path) -> None:
    """Nothing that a worker names is imported with privileges that it lacks."""
    module = open_folder / "preloaded_by_whom.py"
    module.write_text(f"import os; open({str(open_folder / 'proof')!r}, 'w').write(str(os.getuid()))")
    over, _ = run(open_folder, drop="user", nested={"preload": ["preloaded_by_whom"]}, modules=str(open_folder))
    assert over["error"] is None
    assert (open_folder / "proof").read_text() == "65534"


@sandboxed
def test_what_cannot_be_handed_on_is_refused(tmp_path: Path) -> None:
    """A filter of system calls cannot be copied to a new process: there is none, and the error says why."""
    with Program(tmp_path, "privileges", {"drop": "calls", "nested": {}}, env=ENV) as program:
        failed = program.event("failed")
        assert program.event("over")["error"] is None
        assert program.wait() == 0
    [leaf] = failed["error"]["leaves"]
    assert leaf["type"] == "SpawnError"
    assert "seccomp filters" in leaf["text"]


@sandboxed
def test_mesh_without_pidfd_send_signal(tmp_path: Path) -> None:
    """Where the call is refused, processes are signalled by their parents, and the block ends."""
    over, facts = run(tmp_path, refused=["pidfd_send_signal"])
    assert over["error"] is None
    assert facts


@sandboxed
@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open"])
def test_refused_call_is_named(call: str, tmp_path: Path) -> None:
    """A mesh that needs a call that is refused is an error that names the call."""
    over, _ = run(tmp_path, refused=[call])
    [leaf] = over["error"]["leaves"]
    assert leaf["type"] == "SpawnError"
    assert f"refuses {call}" in leaf["text"]


@as_root
def test_missing_proc_is_named() -> None:
    """Without /proc there is an error that says so."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    code = """
import trio, trimesh
async def main():
    async with trimesh.this_host().spawn_procs({"n": 1}):
        pass
trio.run(main)
"""
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'umount -l /proc && exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        env={**os.environ, **ENV},
        check=False,
    )
    if "umount" in ended.stderr:
        pytest.skip("mounts cannot be changed here")
    assert ended.returncode == 1
    assert "SpawnError" in ended.stderr
    assert "/proc is not mounted" in ended.stderr
