"""`trimesh spmd`: torchrun at the shell, by its output, exit codes and what it leaves behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.patience import HANG_SECONDS
from tests.rows import rows
from tests.runtime.processes import descendants, wait_gone

pytest.importorskip("cyclopts")

from trimesh.cli.commands import run
from trimesh.cli.spmd import before_script, last_traceback

pytestmark = pytest.mark.real

SCRIPT = str(Path(__file__).parent / "scripts" / "shell.py")


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run the command; a shell that starts one in the background may have left SIGINT ignored."""
    command = [sys.executable, "-m", "trimesh", "spmd", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(*arguments: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of the command."""
    with started(*arguments) as process:
        output, errors = process.communicate(timeout=HANG_SECONDS)
        return process.returncode, output, errors


def lines_with(word: str, count: int, process: subprocess.Popen[str]) -> list[str]:
    """Read so many lines of output with a word."""
    assert process.stdout is not None
    found = list[str]()
    while len(found) < count:
        line = process.stdout.readline()
        assert line, "the command has ended"
        found += [line] * (word in line)
    return found


def pids_in(lines: Sequence[str]) -> list[int]:
    return [int(line.split()[-1]) for line in lines]


@pytest.mark.torch
def test_failure_has_the_exit_code_of_torchrun_and_its_traceback_last() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, "fail"]
    theirs = subprocess.run(torchrun, capture_output=True, timeout=HANG_SECONDS, check=False)
    code, output, errors = ended("--nproc-per-node", "2", SCRIPT, "fail")
    assert code == theirs.returncode == 1
    assert "rank 1 | begins 1" in output.splitlines()
    shown = [line for line in errors.splitlines() if not line.startswith("rank ")]
    assert re.fullmatch(rf"trimesh: rank 1 on \S+: {SCRIPT} fail exited with 1", shown[0])
    assert shown[1] == "Traceback (most recent call last):"
    assert "LookupError: cause" in shown
    assert shown[-1] == "ValueError: rank one"
    assert len([line for line in shown if line.startswith("trimesh:")]) == 1
    streamed = [line.removeprefix("rank 1 | ") for line in errors.splitlines() if line.startswith("rank 1 | ")]
    assert shown[1:] == streamed


@pytest.mark.daily
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda one: one.name)
async def test_signals_end_all_ranks_with_grace(signum: signal.Signals) -> None:
    with started("--procs", "2", SCRIPT, "wait") as process:
        pids = pids_in(lines_with("ready", 2, process)) + descendants(process.pid)
        process.send_signal(signum)
        output, errors = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 128 + signum
    assert sorted(output.splitlines()) == ["rank 0 | saving 0", "rank 1 | saving 1"]
    assert errors == ""
    await wait_gone(pids)


async def test_second_interrupt_kills() -> None:
    with started("--grace", "600", SCRIPT, "refuse") as process:
        pids = pids_in(lines_with("ready", 1, process)) + descendants(process.pid)
        process.send_signal(signal.SIGINT)
        lines_with("refused", 1, process)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=HANG_SECONDS)[1] == ""
        assert process.returncode == 128 + signal.SIGINT
    await wait_gone(pids)


async def test_killed_command_leaves_nothing() -> None:
    with started("--procs", "2", SCRIPT, "wait") as process:
        pids = pids_in(lines_with("ready", 2, process)) + descendants(process.pid)
        process.kill()
    await wait_gone(pids)


@pytest.mark.daily
def test_restarts_of_all_ranks_have_a_new_rendezvous() -> None:
    code, output, errors = ended("--procs", "2", "--max-restarts", "2", SCRIPT, "again", "2")
    assert code == 0
    said = [json.loads(line.partition("attempt ")[2]) for line in output.splitlines()]
    assert {attempt for _, attempt, _, _ in said} == {"0", "1", "2"}
    assert len({run_id for _, _, _, run_id in said}) == 1
    assert sorted(rank for rank, attempt, _, _ in said if attempt == "2") == ["0", "1"]
    assert len({port for _, attempt, port, _ in said if attempt == "2"}) == 1
    assert re.search(r"(?m)^trimesh: restart 2 of 2 of all ranks: rank \d on \S+: .*again 2 exited with 1$", errors)

    code, _, errors = ended("--restarts", "1", SCRIPT, "again", "2")
    assert code == 1
    assert errors.endswith("ValueError: again\n")


@pytest.mark.parametrize("hosts", [(), ("--hosts", "2")])
async def test_killed_process_or_host_is_a_restart(hosts: Sequence[str]) -> None:
    with started("--procs", "1" if hosts else "2", *hosts, "--restarts", "1", SCRIPT, "again", "1", "wait") as process:
        lines_with("attempt", 2, process)
        name = "trimesh-agent" if hosts else "ranks.1"
        children = [pid for pid in descendants(process.pid) if name_of(pid) == name]
        os.kill(children[-1], signal.SIGKILL)
        output, errors = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 0, errors
    assert len(re.findall(r'^rank \d \| attempt \["\d", "1"', output, re.MULTILINE)) == 2
    assert "HostLost" in errors if hosts else "ProcDied" in errors
    await wait_gone(children)


def test_everything_behind_the_script_is_of_the_script() -> None:
    """Ranks count over hosts, which are one machine here; `--env` reaches them."""
    code, output, _ = ended(
        *("--procs", "2", "--hosts", "2", "--env", "TOLD=a=b"), *(SCRIPT, "tell", "--procs", "9", "--env", "x", "-m")
    )
    assert code == 0
    told = sorted(json.loads(line.partition(" | ")[2]) for line in output.splitlines())
    rest = ["--procs", "9", "--env", "x", "-m"]
    assert told == [[str(rank), "4", str(rank), "a=b", rest] for rank in range(4)]


def test_hosts_are_those_of_a_job_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "trimesh.toml").write_text('[jobs.lab]\nkind = "local"\nhosts = 2\n')
    with started("--job", "lab", "--hosts", "1", SCRIPT, "tell", cwd=tmp_path) as process:
        assert process.communicate(timeout=HANG_SECONDS)[0] == 'rank 0 | ["0", "1", "0", null, []]\n'
        assert process.returncode == 0
    with started("--job", "lab", "--hosts", "3", SCRIPT, "tell", cwd=tmp_path) as process:
        errors = process.communicate(timeout=HANG_SECONDS)[1]
        assert (process.returncode, errors) == (2, "trimesh: --hosts must be at most 2, the hosts of the job, got 3\n")


def test_no_line_is_lost_and_modules_run(tmp_path: Path) -> None:
    code, output, _ = ended("--procs", "2", SCRIPT, "many", "20000")
    assert code == 0
    for prefix in ("rank 0 | ", "rank 1 | "):
        lines = [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]
        assert lines == list(map(str, range(20000)))
    with started("--module", "json.tool", "--help", cwd=tmp_path) as process:
        assert process.communicate(timeout=HANG_SECONDS)[0].startswith("rank 0 | usage: ")


def test_ranks_have_colors_on_a_terminal() -> None:
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    try:
        with started(SCRIPT, "tell", stdout=slave, env=env) as process:
            assert process.wait(HANG_SECONDS) == 0
            assert os.read(master, 1000).startswith(b'\x1b[36mrank 0\x1b[0m | ["0"')
    finally:
        os.close(master)
        os.close(slave)


@rows(
    "arguments, text",
    [
        (["--rdzv_endpoint=h:1", "t.py"], "leave --rdzv_endpoint=h:1 out"),
        (["--standalone", "t.py"], "leave --standalone out"),
        (["--procs", "0", SCRIPT], "--procs must be at least 1"),
        (["--nnodes", "0", SCRIPT], "--hosts must be at least 1"),
        (["--restarts", "-1", SCRIPT], "--restarts must be a number of restarts >= 0"),
        (["--grace", "inf", SCRIPT], "--grace must be a finite number of seconds"),
        (["missing.py"], "got 'missing.py', which does not exist"),
        (["json.tool"], "write --module json.tool for a module"),
        (["--env", "A", SCRIPT], "write --env NCCL_DEBUG=INFO"),
        (["--job", "nowhere", SCRIPT], "nowhere"),
    ],
)
def test_wrong_options_are_answered(
    arguments: list[str], text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMESH_JOB", "")
    assert run(["spmd", *arguments]) == 2
    assert text in capfd.readouterr().err


def test_script_begins_behind_the_options() -> None:
    for given, script in (
        (["--procs", "2", "t.py", "--procs", "3"], 3),
        (["--procs=2", "-m", "t", "-m"], 3),
        (["--max_restarts", "3", "--env", "A=1", "t.py"], 5),
        (["t.py"], 1),
    ):
        words = ["spmd", *given]
        assert before_script(words) == [*words[:script], "--", *words[script:]]
    assert before_script(["spmd", "--procs", "2", "--", "-odd.py"]) == ["spmd", "--procs", "2", "--", "-odd.py"]


CAUSE = """Traceback (most recent call last):
  File "t.py", line 1
OSError

During handling of the above exception, another exception occurred:

"""
LAST = """Traceback (most recent call last):
  File "t.py", line 2
ValueError"""
GROUP = """  + Exception Group Traceback (most recent call last):
  | ExceptionGroup: several (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    | ValueError"""


def test_last_traceback_has_its_causes() -> None:
    for text, shown in (
        (f"a log\n{CAUSE}{LAST}", CAUSE + LAST),
        (f"{LAST}\nretried\n{LAST}", LAST),
        (f"a log\n{GROUP}", GROUP),
        ("a log", "a log"),
    ):
        assert last_traceback(text.splitlines()) == shown.splitlines()
