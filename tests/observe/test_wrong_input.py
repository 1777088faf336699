"""Every command with what it cannot use: an error in words, its exit code, no traceback (Q19)."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.rows import rows

from trimesh import Actor, endpoint, this_host
from trimesh._runtime.recording import HISTORY_FILE

pytest.importorskip("cyclopts")

from trimesh.cli.commands import app, run

pytestmark = pytest.mark.real

OF_A_RUN = (
    ("ps",),
    ("top",),
    ("calls",),
    ("stack",),
    ("events",),
    ("logs",),
    ("metrics",),
    ("kill", "procs[gpus=0]"),
    ("cancel", "1.2@3"),
    ("stop",),
    ("debug",),
    ("dashboard",),
    ("query", "select 1"),
    ("autopsy",),
    ("report",),
    ("trace",),
)
"""Commands on a run, each with arguments that are right."""

OTHERS = ("doctor", "profile", "run", "spmd", "host", "job")
LINES_MAX = 12


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return exit code and error of a command that prints nothing else."""
    capfd.readouterr()
    code = run(arguments)
    out, err = capfd.readouterr()
    assert out == "", arguments
    assert err.startswith("trimesh: "), arguments
    assert "Traceback" not in err
    assert len(err.splitlines()) <= LINES_MAX
    return code, err


def test_every_command_is_in_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    """A new command is added here, and to a group of `trimesh --help`."""
    assert run(["--help"]) == 0
    said = capfd.readouterr().out
    groups = ("Look at a run", "Act on a run", "After a death", "Jobs and hosts", "Tools", "Options")
    assert sorted(groups, key=said.index) == list(groups)
    names = {name for name in app if not name.startswith("-")}
    assert names == {command for command, *_ in OF_A_RUN} | set(OTHERS)
    assert all(str(app[name].group) != "Options" for name in names)


@pytest.mark.daily
@pytest.mark.parametrize("command", OF_A_RUN, ids=lambda command: command[0])
def test_no_run_and_wrong_runs(
    command: tuple[str, ...], capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q19: 3 without a run, or with the number of another one; 2 for a number that is none, or an unknown option."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    code, err = refused(capfd, *command)
    assert code == 3
    assert "no run" in err or "no failed run" in err
    code, err = refused(capfd, *command, "--pid", "1")
    assert code == 3
    assert "process 1 " in err
    code, err = refused(capfd, *command, "--pid", "abc")
    assert code == 2
    assert "--pid takes a whole number, got 'abc'" in err
    code, err = refused(capfd, *command, "--pdi", "1")
    assert code == 2
    assert f"trimesh {command[0]} has no option --pdi; did you mean --pid?" in err
    assert f"see: trimesh {command[0]} --help" in err
    assert not os.listdir(here)


@rows(
    ("arguments", "code", "said"),
    [
        (("psx",), 2, "trimesh has no command 'psx'; did you mean ps?"),
        (("ps", "x"), 2, "got 'x' too many"),
        (("kill",), 2, "trimesh kill needs POINT"),
        (("query",), 2, "trimesh query needs SQL"),
        (("calls", "--pid"), 2, "--pid needs a value"),
        (("top", "--sort", "memry2"), 2, "got 'memry2'; did you mean memory?"),
        (("top", "--every", "nan"), 2, "--every must be a finite number of seconds >= 0, got nan"),
        (("top", "--every", "soon"), 2, "--every takes a number, got 'soon'"),
        (("trace", "--seconds", "-1"), 2, "--seconds must be a finite number of seconds >= 0, got -1.0"),
        (("profile", "--rate", "0"), 2, "--rate must be at least 1 sample a second, got 0"),
        (("autopsy", "99999999"), 3, "no run of process 99999999 has left flight records"),
        (("autopsy", "missing"), 3, "flight records of missing cannot be read: No such file or directory"),
        (("autopsy", "rubbish"), 3, "there is no flight record in rubbish: 1 file cannot be read as one"),
        (("trace", "--run", "rubbish"), 3, "there is no flight record in rubbish"),
        (("report", "--run", "rubbish"), 3, "there is no flight record in rubbish"),
        (("query", "select 1", "--run", "missing"), 3, "missing has no history"),
        (("query", "select * from procs", "--run", "rubbish"), 3, "cannot be read: file is not a database"),
        (("run", "missing.py"), 2, "run needs the file of a script, got 'missing.py'"),
        (("run",), 2, "trimesh run needs SCRIPT"),
        (("spmd", "missing.py"), 2, "spmd needs the file of a script, got 'missing.py', which does not exist"),
        (("spmd", "--procs", "0", "x.py"), 2, "--procs must be at least 1"),
        (("spmd", "--procs", "many", "x.py"), 2, "--procs takes a whole number, got 'many'"),
        (("job", "stops"), 2, "trimesh job has no command 'stops'; did you mean stop?"),
        (("job", "stop"), 2, "trimesh job stop needs NAME"),
        (("host", "join", "--token-file", "x"), 2, "host join needs an address of the program"),
        (("doctor", "--jsno"), 2, "trimesh doctor has no option --jsno; did you mean --json?"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...],
    code: int,
    said: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Q19: the rule, what came, and the nearest right name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rubbish").mkdir(exist_ok=True)
    (tmp_path / "rubbish" / "1").write_bytes(b"rubbish" * 1000)
    (tmp_path / "rubbish" / HISTORY_FILE).write_bytes(b"rubbish" * 1000)
    got, err = refused(capfd, *arguments)
    assert said in err
    assert got == code


class Keeper(Actor):
    @endpoint
    async def hold(self) -> None:
        """Wait for ever."""
        await trio.sleep_forever()

    @endpoint
    def say(self) -> None:
        """Print a line."""
        print("hello", flush=True)


READING = ("ps", "top --every 0.1", "logs", "report")
"""Tables, a table that is drawn again, lines as they come, and a text."""


@pytest.mark.usefixtures("patient")
async def test_output_that_cannot_be_written(tmp_path: Path):
    """Q19: a reader that has gone is no failure, a full disk is one; also at terminals of any width and encoding."""
    async with this_host().spawn_procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        keepers = await procs.spawn("keepers", Keeper)
        await keepers.say.call()
        nursery.start_soon(keepers.hold.call)
        await trio.to_thread.run_sync(_check_output, tmp_path)
        nursery.cancel_scope.cancel()


def _check_output(folder: Path) -> None:
    for command in READING:
        read, write = os.pipe()
        os.close(read)
        assert executed(command, stdout=write) == (0, ""), command
        os.close(write)
    with open("/dev/full", "wb") as full:
        code, err = executed("ps", stdout=full.fileno())
    assert (code, err) == (1, "trimesh: [Errno 28] No space left on device\n")
    code, err = executed("ps", stdout=None, before="exec >&-;")
    assert (code, err) == (0, "")
    with (folder / "out").open("wb") as out:
        assert executed("ps", stdout=out.fileno(), PYTHONIOENCODING="ascii") == (0, "")
    assert b"\\u2514\\u2500 procs[gpus=1]" in (folder / "out").read_bytes()
    for columns in (8, 80):
        assert b"procs[gpus=1]" in on_terminal(columns, "ps").replace(b"\r\n", b"")
        assert b"keepers[gpus=0].hold" in on_terminal(columns, "calls").replace(b"\r\n", b"")
    assert b"Traceback" not in on_terminal(8, "--help") + on_terminal(8, "query", "select * from procs")
    ours, theirs = pty.openpty()
    os.close(ours)  # a closed terminal
    with subprocess.Popen([sys.executable, "-m", "trimesh.cli", "ps"], stdout=theirs, stderr=theirs) as process:
        assert process.wait(HANG_SECONDS) == 1
    os.close(theirs)
    with subprocess.Popen(
        [sys.executable, "-m", "trimesh.cli", "logs", "-f"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as follower:
        assert follower.stdout is not None
        assert "hello" in follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        assert follower.communicate(timeout=HANG_SECONDS)[1] == ""
        assert follower.returncode == 130


def executed(command: str, *, stdout: int | None, before: str = "", **env: str) -> tuple[int, str]:
    """Run the command as a program; return its exit code and errors. A descriptor that is no file's is closed."""
    words = ["sh", "-c", f'{before} exec "$@"', "sh", sys.executable, "-m", "trimesh.cli", *command.split()]
    done = subprocess.run(
        words,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
        timeout=HANG_SECONDS,
        check=False,
    )
    return done.returncode, done.stderr


def on_terminal(columns: int, *arguments: str) -> bytes:
    """Return what a command prints at a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "trimesh.cli", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65_536)
        except OSError:  # the last one has closed the terminal
            break
        said += part
    os.close(ours)
    process.wait(HANG_SECONDS)
    return said
