"""Programs that torchrun could start, on the processes of a mesh; one with torch is examples/monarch/ddp.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import is_there, wait_gone

import trimesh
from trimesh import MeshErrorGroup, leaves, this_host
from trimesh.spmd import ScriptFailed

pytestmark = pytest.mark.real

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN = SCRIPTS / "plain.py"


def failures(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    return list(leaves(group))


@pytest.mark.daily
async def test_first_failure_ends_the_others() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
            await trimesh.spmd.run(procs, PLAIN, "exit", "1", "7", grace=1)
        [failed] = failures(caught.value)
        assert isinstance(failed, ScriptFailed)
        assert (failed.exit_code, failed.signal) == (7, None)
        assert "the end of rank 1" in str(failed)

        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.spmd.run(procs.slice(gpus=0), PLAIN, "signal", str(signal.SIGKILL.value))
        [failed] = failures(caught.value)
        assert isinstance(failed, ScriptFailed)
        assert (failed.exit_code, failed.signal) == (None, signal.SIGKILL)
        assert "was ended by SIGKILL" in str(failed)

        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.spmd.run(procs.slice(gpus=0), PLAIN, "recorded")
        assert "the recorded traceback" in str(failures(caught.value)[0])


async def test_cancel_leaves_nothing(tmp_path: Path) -> None:
    """Not what ignores SIGTERM, nor what the program has started."""
    files = [tmp_path / "0", tmp_path / "1"]
    for file in files:
        os.mkfifo(file)
    async with this_host().spawn_procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: trimesh.spmd.run(procs, PLAIN, "stay", str(tmp_path), grace=0.1))
        pids = [int(pid) for file in files for pid in (await trio.to_thread.run_sync(file.read_text)).split()]
        assert [is_there(pid) for pid in pids] == [True] * 4
        nursery.cancel_scope.cancel()
    await wait_gone(pids)


def rank_and_size(extra: int) -> tuple[int, int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), extra


def fail_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        raise LookupError("of the function")


async def test_function_gives_its_results() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        found = await trimesh.spmd.run(procs, rank_and_size, 5)
        assert found.values() == ((0, 2, 5), (1, 2, 5))
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.spmd.run(procs, fail_on, 1)
        [error] = failures(caught.value)
        assert isinstance(error, LookupError)
        assert "in fail_on" in "".join(getattr(error, "__notes__", []))
        with pytest.raises(TypeError, match="arguments of a script must be strings, got 3: write '3'"):
            await trimesh.spmd.run(procs, PLAIN, 3)


@pytest.mark.daily
async def test_environment_is_that_of_torchrun() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        first, second = (await trimesh.spmd.env(procs)).values()
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
