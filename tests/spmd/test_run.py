"""Programs that torchrun could start, on the processes of a mesh; one with torch is examples/monarch/ddp.py."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import is_there, wait_gone

import trimesh
from trimesh import MeshErrorGroup, leaves, this_host
from trimesh.jobs import OutputLine
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
        with pytest.raises(TypeError, match="arguments of a script must be strings or paths, got 3: write '3'"):
            await trimesh.spmd.run(procs, PLAIN, 3)


LEAVING = SCRIPTS / "leaving.py"


def leave(path: str) -> int:
    runpy.run_path(str(LEAVING), {"PATH": path}, run_name="leaving")
    return 1


@pytest.mark.parametrize("kind", ["script", "module", "function"])
async def test_programs_end_without_finalization(kind: str, tmp_path: Path) -> None:
    """Threads end and atexit functions run, but what aborts an interpreter that is finalized does not lose the work."""
    file = tmp_path / "order"
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        if kind == "function":
            result = await trimesh.spmd.run(procs, leave, str(file))
            assert result.values() == (1,)
        elif kind == "script":
            result = await trimesh.spmd.run(procs, LEAVING, str(file))
        else:
            env = {"PYTHONPATH": str(SCRIPTS)}
            result = await trimesh.spmd.run(procs, "leaving", str(file), module=True, env=env)
    assert file.read_text() == "thread, then atexit"


async def test_scripts_run_as_by_the_interpreter(tmp_path: Path) -> None:
    """Its folder is the first of `sys.path`, its classes can be pickled, and errors show only its own frames."""
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    script = tmp_path / "main.py"
    script.write_text(
        "import pickle, sys, multiprocessing, beside\n"
        "class Mine: pass\n"
        "assert isinstance(pickle.loads(pickle.dumps(Mine())), Mine)\n"
        "assert 'annotations' not in globals() and __file__ == sys.argv[0]\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        assert isinstance(pool.apply(Mine), Mine)\n"
        "    if sys.argv[1] == 'raise':\n"
        "        raise LookupError(beside.VALUE)\n"
        "    sys.exit(sys.argv[1])\n"
    )
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.spmd.run(procs, script, "raise")
        [failed] = failures(caught.value)
        assert isinstance(failed, ScriptFailed)
        assert failed.program == f"{script} raise"
        assert failed.exit_code == 1
        assert failed.stderr_tail.splitlines() == [
            "Traceback (most recent call last):",
            f'  File "{script}", line 9, in <module>',
            "    raise LookupError(beside.VALUE)",
            "LookupError: 5",
        ]
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.spmd.run(procs, script, "a text")
        assert str(failures(caught.value)[0]).endswith("exited with 1; the end of its standard error:\na text")
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.spmd.run(procs, tmp_path / "missing.py")
        assert "can't open file" in str(failures(caught.value)[0])


@pytest.mark.daily
async def test_environment_is_that_of_torchrun() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        first, second = (await trimesh.spmd.env(procs)).values()
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


async def test_output_arrives_by_lines_with_ranks() -> None:
    """Each line, in order; also of a function; an error of the receiver ends the ranks."""
    shown: list[OutputLine] = []
    script = str(SCRIPTS / "shell.py")
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        await trimesh.spmd.run(procs, script, "many", "3000", output=shown.append)
        for rank in (0, 1):
            assert [one.text for one in shown if one.point.rank == rank] == list(map(str, range(3000)))
        assert {(one.point["gpus"], one.stream) for one in shown} == {(0, "stdout"), (1, "stdout")}

        def refuse(line: OutputLine) -> None:
            raise LookupError(line.text)

        with trio.fail_after(HANG_SECONDS), pytest.raises(LookupError, match="ready"):
            await trimesh.spmd.run(procs, script, "wait", output=refuse)
        with pytest.raises(ValueError, match="restarts must be a whole number >= 0, got -1"):
            await trimesh.spmd.run(procs, script, restarts=-1)
        with pytest.raises(TypeError, match="output must be a function of a line, such as print, or None, got 1"):
            await trimesh.spmd.run(procs, script, output=cast("Any", 1))


def attempt(path: str) -> str:
    print("in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
    if not os.path.exists(path):
        if os.environ["RANK"] == "0":
            Path(path).touch()
            raise LookupError("once")
        signal.pause()
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


async def test_restarts_of_a_function(tmp_path: Path) -> None:
    """All ranks run again; the results are of the last attempt."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        shown: list[str] = []
        with trio.fail_after(HANG_SECONDS):
            found = await trimesh.spmd.run(
                procs, attempt, str(tmp_path / "once"), restarts=3, output=lambda line: shown.append(line.text)
            )
        assert found.values() == ("1", "1")
        assert shown.count("in attempt 1") == 2
