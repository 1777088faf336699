"""How a kept job begins and ends: real processes, one keeper each."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.jobs.kept.keeping import Worker, below, double_on, keeper_of, kept_in, wait_gone
from tests.jobs.kept.queued import QueuedJob
from tests.patience import HANG_SECONDS

from trimesh import ConnectError, HostLost, SpawnError, jobs, leaves

pytest.importorskip("cryptography")
pytest.importorskip("cyclopts")

from trimesh._native import tls
from trimesh.cli.commands import run

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

KEEP = """
import sys, trio
from trimesh import jobs
from tests.jobs.kept.queued import QueuedJob

trio.run(lambda: jobs.keep("exp", QueuedJob(sys.argv[1]), lease=60))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the state is."""
    with kept_in(tmp_path):
        yield tmp_path


async def told(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command."""
    capfd.readouterr()
    code = await trio.to_thread.run_sync(run, arguments)
    out, err = capfd.readouterr()
    return code, out, err


async def test_end_of_the_lease_ends_everything(folder: Path) -> None:
    """H2, H13, H23: also what is attached, which hears why; the name is free."""
    with trio.fail_after(HANG_SECONDS):
        await jobs.keep("exp", jobs.LocalJob(1), lease=600)
        keeper, all_of_it = keeper_of(folder, "exp"), list[int]()
        with pytest.raises(BaseExceptionGroup) as caught:
            async with (
                jobs.attach("exp") as hosts,
                hosts.spawn_procs({}) as procs,
                procs.spawn("workers", Worker) as workers,
            ):
                assert list(await workers.double.call(1)) == [2]
                all_of_it += below(keeper)
                assert len(all_of_it) >= 6
                await jobs.extend("exp", lease=0.1)
                await trio.sleep_forever()
        [lost] = leaves(caught.value)
        assert isinstance(lost, HostLost)
        assert lost.reason == "time limit"
        assert "lease of the kept job exp" in str(lost)
        await wait_gone(all_of_it)
        assert await jobs.kept() == []
        assert list((folder / "trimesh" / "jobs").iterdir()) == []


async def test_commands_keep_a_job_whose_keeper_is_then_killed(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2, H13, H23: nothing of it is left; the state is refused in words, and stopping frees the name."""
    place = folder / "program"
    place.mkdir()
    (place / "trimesh.toml").write_text('[jobs.one]\nkind = "local"\nhosts = 1\n')
    (place / "script.py").write_text(
        "import sys, trio\nfrom trimesh import jobs\nasync def main():\n    async with jobs.default() as hosts:\n"
        "        print(len(hosts), sys.argv[1:], list(await hosts.run(['true'])), flush=True)\ntrio.run(main)\n"
    )
    monkeypatch.chdir(place)
    monkeypatch.setenv("TRIMESH_CONFIG", str(place / "trimesh.toml"))
    with trio.fail_after(HANG_SECONDS):
        assert (await told(capfd, "job", "list"))[0] == 3
        assert (await told(capfd, "job", "start", "exp", "--job", "two", "--lease", "1h"))[0] == 2
        assert (await told(capfd, "job", "start", "exp", "--job", "one", "--lease", "soon"))[0] == 2
        code, out, _ = await told(capfd, "job", "start", "exp", "--job", "one", "--lease", "90m", "--json")
        [made] = json.loads(out)
        assert (code, made["name"], made["status"], made["parts"]) == (0, "exp", "kept", {"hosts": 1})
        assert 5300 < made["until"] - made["since"] < 5500
        command = [sys.executable, "-m", "trimesh.cli", "job", "attach", "exp", "script.py", "--lr=1"]
        done = await trio.run_process(command, capture_stdout=True)
        assert done.stdout == b"1 ['--lr=1'] [0]\n"
        code, out, _ = await told(capfd, "job", "list")
        assert code == 0
        assert "exp  LocalJob  1 hosts" in out
        assert out.endswith("free\n")

        all_of_it = below(keeper_of(folder, "exp"))
        os.kill(keeper_of(folder, "exp"), signal.SIGKILL)
        await wait_gone(all_of_it)
        with pytest.raises(ConnectError, match=r"not kept any more: its keeper, process \d+, is gone"):
            await double_on("exp")
        code, out, _ = await told(capfd, "job", "list")
        assert code == 1
        assert "trimesh job stop exp frees the name" in out
        for command_, more in (("attach", ()), ("extend", ("--lease", "1h"))):
            assert (await told(capfd, "job", command_, "exp", *more))[0] == 3
        assert (await told(capfd, "job", "stop", "exp"))[0] == 0
        assert (await told(capfd, "job", "stop", "exp"))[0] == 3


@pytest.mark.stress
async def test_hosts_of_a_keeper_that_hangs_end_by_their_lease(folder: Path) -> None:
    """H2, H23: it is stopped by a signal; a program that attaches is told, and `stop` ends it all the same."""
    with trio.fail_after(HANG_SECONDS):
        await jobs.keep("exp", jobs.LocalJob(1), lease=600)
        keeper = keeper_of(folder, "exp")
        held = [pid for pid in below(keeper) if pid != keeper]
        os.kill(keeper, signal.SIGSTOP)
        await wait_gone(held)
        with pytest.raises(ConnectError, match="has not answered within limits"):
            await jobs.extend("exp", lease=60)
        [seen] = await jobs.kept()
        assert "has not answered" in seen.gone
        await jobs.stop("exp")
        await wait_gone([keeper])
        assert await jobs.kept() == []


@pytest.mark.stress
async def test_lease_ends_a_keeper_whose_python_does_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H23: a thread of C ends it, and with it what it holds."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))))
    (folder / "stuck.py").write_text(
        "import time\nfrom trimesh import limits\nfrom trimesh.jobs import LocalJob\n"
        "class StuckJob(LocalJob):\n    def host_id(self, rank):\n"
        "        import trio\n        limits.KEPT_END_SECONDS = 1.0\n        asked.append(rank)\n"
        "        if len(asked) == 2:  # of the seats: from now on the lease counts\n"
        "            trio.lowlevel.spawn_system_task(stick)\n        return ''\n"
        "asked = []\n"
        "async def stick():\n    import trio\n    await trio.sleep(1)\n    time.sleep(600)\n"
    )
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    job: Any = importlib.import_module("stuck").StuckJob(1)

    with trio.fail_after(HANG_SECONDS):
        await jobs.keep("exp", job, lease=2)
        keeper = keeper_of(folder, "exp")
        await wait_gone(below(keeper))
        assert "is gone" in await jobs.stop("exp")


async def test_keep_that_is_given_up_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """H13, H23: neither a cancel nor the death of the program, while the job waits in a queue."""
    waits, keeper = tmp_path / "waits", 0
    with trio.fail_after(HANG_SECONDS):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: jobs.keep("exp", QueuedJob(str(waits)), lease=60))
                await _until_there(waits)
                [seen] = await jobs.kept()
                keeper = seen.state.pid
                assert seen.state.status == "starting"
                with pytest.raises(ConnectError, match=f"process {keeper} waits for its hosts"):
                    await double_on("exp")
                scope.cancel()
        assert await jobs.kept() == []
        assert not waits.exists()
        await wait_gone([keeper])

        program = await trio.lowlevel.open_process([sys.executable, "-c", KEEP, str(waits)])
        await _until_there(waits)
        keeper = keeper_of(folder, "exp")
        program.kill()
        await program.wait()
        await wait_gone([keeper])
        assert await jobs.kept() == []
        assert not waits.exists()


async def test_job_that_cannot_be_had_is_told_in_its_words(folder: Path) -> None:
    with trio.fail_after(HANG_SECONDS):
        with pytest.raises(SpawnError, match="no nodes today"):
            await jobs.keep("exp", QueuedJob(""), lease=60)
        assert list((folder / "trimesh" / "jobs").iterdir()) == []


async def _until_there(path: Path) -> None:
    while not await trio.Path(path).exists():  # noqa: ASYNC110 - another process makes it
        await trio.sleep(0.01)


@pytest.mark.parametrize(
    "arguments",
    [
        ("a/b", jobs.LocalJob(1), 60),
        ("", jobs.LocalJob(1), 60),
        ("exp", jobs.LocalJob(1), 0),
        ("exp", jobs.LocalJob(1), float("nan")),
        ("exp", jobs.LocalJob(1), True),
        ("exp", jobs.LocalJob(1), 1e9),
        ("exp", jobs.KubernetesJob(1, image="i", port=4000), 60),
    ],
)
async def test_what_cannot_be_kept_is_refused(arguments: tuple[str, jobs.Job, float]) -> None:
    name, job, lease = arguments
    with pytest.raises(ValueError, match=r"must be|must have|listens at a port"):
        await jobs.keep(name, job, lease=lease)
