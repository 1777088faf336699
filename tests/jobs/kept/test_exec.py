"""`trimesh job exec`: commands on the hosts of a kept job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from tests.jobs.kept.keeping import kept_in, wait_gone
from tests.patience import HANG_SECONDS

from trimesh import jobs

pytest.importorskip("cryptography")
pytest.importorskip("cyclopts")

from trimesh._native import tls
from trimesh.cli.commands import run

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


@pytest.fixture(scope="module", autouse=True)
def _lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep a job `lab` of two hosts for the tests of this file."""
    with kept_in(tmp_path_factory.mktemp("state")):
        trio.run(_keep)
        yield
        assert "nothing of it is left" in trio.run(jobs.stop, "lab")


async def _keep() -> None:
    with trio.fail_after(HANG_SECONDS):
        await jobs.keep("lab", jobs.LocalJob({"trainers": 1, "others": 1}, apart=True), lease=3600)


def test_command_runs_on_the_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    """H1: output has hosts in front, on its own stream; the exit code is the worst one."""
    assert run(["job", "exec", "lab", "--", "sh", "-c", "echo out; echo err >&2"]) == 0
    out, err = capfd.readouterr()
    assert sorted(line.partition("[")[2] for line in out.splitlines()) == ["hosts=0] | out", "hosts=1] | out"]
    assert sorted(line.partition("[")[2] for line in err.splitlines()) == ["hosts=0] | err", "hosts=1] | err"]
    assert run(["job", "exec", "lab", "--at", "hosts=1", "--", "sh", "-c", "echo --at; exit 7"]) == 7
    assert capfd.readouterr().out.endswith("/1 | --at\n")
    assert run(["job", "exec", "lab", "--at", "hosts=0:1", "--", "sh", "-c", "kill -9 $$"]) == 137
    assert run(["job", "exec", "lab", "--at", "trainers", "--", "/nowhere/command"]) == 127
    err = capfd.readouterr().err
    assert "No such file" in err
    assert "[hosts=0]: " in err


def test_wrong_hosts_are_answered(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, code, text in (
        (["lab", "--at", "hosts=9", "--", "true"], 2, "trimesh: --at: "),
        (["lab", "--at", "hosts=x", "--", "true"], 2, "it takes hosts=0, hosts=0:4 or the name of a part"),
        (["lab", "--at", "judges", "--", "true"], 2, "no hosts are named 'judges'; names: 'trainers', 'others'"),
        (["lab"], 2, "write trimesh job exec lab -- nvidia-smi -L"),
        (["nowhere", "--", "true"], 3, "nowhere"),
    ):
        assert run(["job", "exec", *arguments]) == code
        assert text in capfd.readouterr().err


async def test_interrupt_ends_the_command() -> None:
    command = [sys.executable, "-m", "trimesh", "job", "exec", "lab", "--at", "hosts=0", "--", "sh", "-c"]
    with subprocess.Popen([*command, "echo $$; sleep 600"], stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[-1])
        assert Path(f"/proc/{pid}").exists() and os.getpid() != pid  # noqa: ASYNC240, PT018
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_SECONDS) == 130
    await wait_gone([pid])
