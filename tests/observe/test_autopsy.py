"""Runs that have died: what they leave, and what is made of it (Q6, Q7)."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from tests.memory_groups import memory_group
from tests.observe.victims import Worker
from tests.patience import HANG_SECONDS
from tests.program_template import Script, open_script

import trimesh
from trimesh import configured, limits, observe, this_host
from trimesh._native import tls
from trimesh._runtime.recording import clean_up, run_folders
from trimesh.errors import ConnectError, leaves

pytest.importorskip("cyclopts")

from trimesh.cli.autopsy import autopsy_lines
from trimesh.cli.commands import run
from trimesh.cli.dashboard.problems import problems

pytestmark = pytest.mark.real

VICTIMS = Path(__file__).with_name("victims.py")


class Victim:
    """A program of `victims`, and how it is killed.

    Attributes:
        pid: Of its controller.
        workers: Of its processes.
    """

    def __init__(self, process: Script) -> None:
        self._process = process
        assert process.stdout is not None
        self.pid = process.pid
        self.workers = [int(pid) for pid in process.stdout.readline().split()]

    def killed_when(self, is_so: Callable[[observe.Autopsy], object]) -> observe.Autopsy:
        """Wait until an autopsy of the program is as it should be; kill all at once; return that of the dead."""
        ends_at = time.monotonic() + HANG_SECONDS
        while True:
            while not is_so(seen := observe.autopsy(pid=self.pid)):
                assert time.monotonic() < ends_at, seen.cause
                time.sleep(0.02)  # its processes need the processor, too
            self._send(signal.SIGSTOP)  # none sees another end, nor writes any more
            for pid in (*self.workers, self.pid):
                while state_of(pid) not in "TZX":
                    pass
            seen = observe.autopsy(pid=self.pid)
            assert seen.ended == "running"
            if is_so(seen):
                self._send(signal.SIGKILL)
                self.wait()
                return observe.autopsy()
            self._send(signal.SIGCONT)

    def _send(self, sent: signal.Signals) -> None:
        for pid in (*self.workers, self.pid):
            os.kill(pid, sent)

    def wait(self) -> int:
        """Return the exit code, when its processes have ended, too."""
        code = self._process.wait(HANG_SECONDS)
        for pid in self.workers:
            while state_of(pid) not in "ZX":
                pass
        return code


def state_of(pid: int) -> str:
    """Return the state of a process, as the kernel writes it; "X" when it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


@contextmanager
def victim(way: str, *before: str) -> Generator[Victim, None, None]:
    """Run a program; what stands before its command may put it into a group, say."""
    with open_script(VICTIMS, way, before=before) as process:
        try:
            yield Victim(process)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("way", "kind", "culprit"),
    [
        ("computes", "stuck", "procs[gpus=2]"),
        ("holds the GIL", "stuck", "procs[gpus=1]"),
        ("slow", "left behind", "workers[gpus=2]"),
        ("left", "left behind", "workers[gpus=1]"),
        ("deadlock", "deadlock", "workers[gpus="),
        ("leaks", "memory", "procs[gpus=2]"),
    ],
)
def test_culprit_of_a_run_that_hung_is_named(
    way: str, kind: str, culprit: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q6, Q7: also after SIGKILL of all its processes at once, with nothing prepared."""
    monkeypatch.setattr(limits, "STALL_SECONDS", 1.0)
    with victim(way) as one:
        found = one.killed_when(lambda seen: seen.cause.kind == kind and seen.cause.name.startswith(culprit))

    assert found.ended == "killed"
    assert (found.cause.kind, found.cause.name[: len(culprit)]) == (kind, culprit), found.cause
    assert found.job is not None
    assert found.job.pid == one.pid
    assert len(found.procs) == 5
    assert run(["autopsy"]) == 0
    said = capfd.readouterr().out
    assert f"run {one.pid}  " in said
    assert f"culprit: {found.cause.text}" in said


def test_rank_that_the_kernel_kills_for_want_of_memory_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Q6, Q7: the tenth incident: the largest process of a group, while the others do nothing wrong."""
    with memory_group(320 << 20) as group:
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        with victim("leaks", "sh", "-c", join, "sh") as one:
            code = one.wait()
        found = observe.autopsy()
    assert (code, found.ended) == (1, "error"), found.cause
    assert (found.cause.kind, found.cause.name) == ("died", "procs[gpus=2]")
    assert "SIGKILL (out of memory)" in found.cause.text
    assert run(["autopsy"]) == 0
    assert f"culprit: {found.cause.text}" in capfd.readouterr().out


def said_until(capfd: pytest.CaptureFixture[str], parts: tuple[str, ...], *arguments: str) -> list[str]:
    """Repeat a command until it says all of some texts; return its lines."""
    ends_at = time.monotonic() + HANG_SECONDS
    while True:
        capfd.readouterr()
        run(arguments)
        said = capfd.readouterr().out
        if all(part in said for part in parts):
            return said.splitlines()
        assert time.monotonic() < ends_at, said


def test_rank_that_has_left_a_collective_is_seen_while_the_run_lives(capfd: pytest.CaptureFixture[str]) -> None:
    """Q1, Q2: the others are in it, with one stack for all; it is in none."""
    with victim("left") as one:
        pid = ("--pid", str(one.pid))
        [stack] = [line for line in said_until(capfd, ("main thread x3",), "stack", *pid) if "main thread x3" in line]
        assert "procs[gpus=1]" not in stack
        assert "procs[gpus=0], procs[gpus=2], procs[gpus=3]" in stack
        lines = said_until(capfd, ("in meet_in_c",), "calls", *pid)
        assert not [line for line in lines if "workers[gpus=1].meet_in_c" in line]


def test_leak_in_one_rank_is_seen_while_the_run_lives(capfd: pytest.CaptureFixture[str]) -> None:
    """Q1: the memory of each process is shown."""
    with victim("leaks") as one:
        ends_at = time.monotonic() + HANG_SECONDS
        while time.monotonic() < ends_at:
            capfd.readouterr()
            run(["ps", "--json", "--pid", str(one.pid)])
            [seen] = json.loads(capfd.readouterr().out)
            sizes = {proc["name"]: proc["memory_bytes"] >> 20 for proc in seen["procs"]}
            if sizes["procs[gpus=2]"] > 300:
                break
    assert max(sizes, key=lambda name: sizes[name]) == "procs[gpus=2]"
    assert sizes["procs[gpus=2]"] > 300 > 3 * sizes["procs[gpus=1]"]


@pytest.mark.parametrize(
    ("way", "kind", "culprit", "told"),
    [
        ("keeps", "pinned", "procs[gpus=2]", "procs[gpus=2] has version "),
        ("publishes in vain", "unread", "workers[gpus=0]", "workers[gpus=0] has published "),
    ],
)
def test_versions_that_are_kept_or_not_read_are_named_by_all(
    way: str, kind: str, culprit: str, told: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q1, Q2, Q6, Q7: by `ps` and `calls --waits`, the page, a stack, and the autopsy of the dead."""
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.2)
    with victim(way) as one:
        pid = ("--pid", str(one.pid))
        said_until(capfd, (f"run {one.pid}: {told}",), "ps", *pid)
        said_until(capfd, (f"{kind}: {told}",), "calls", "--waits", *pid)
        said_until(capfd, ("workers.publish x1: workers[gpus=0]", "in publish"), "stack", *pid)
        with observe.find_run(one.pid) as asked:
            [problem] = [problem for problem in problems(asked.snapshot()) if problem.kind == kind]
        found = one.killed_when(lambda seen: seen.cause.kind == kind)
    assert told in problem.title
    assert problem.names == (culprit,)
    assert (found.ended, found.cause.kind, found.cause.name) == ("killed", kind, culprit), found.cause
    assert "workers[gpus=0]" in found.cause.text
    assert run(["autopsy"]) == 0
    assert f"culprit: {found.cause.text}" in capfd.readouterr().out


def test_host_that_was_lost_is_named() -> None:
    """Q7: by the error that has left the block."""
    if not tls.library()[0]:
        pytest.skip(tls.library()[1])
    with victim("loses a host") as one:
        assert one.wait() == 1
        found = observe.autopsy(pid=one.pid)

    assert found.ended == "error"
    assert found.error.startswith("HostLost")
    assert "agent" in found.cause.text
    [controller] = [proc for proc in found.procs if not proc.mesh]
    assert controller.state == "ended"


def test_stuck_process_is_shown_with_its_stack_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q7: the stack is what its owner has reported of the stall."""
    monkeypatch.setenv("TRIMESH_STALL_AFTER", "1")
    with victim("computes") as one:
        found = one.killed_when(lambda seen: seen.cause.stack and [proc.state for proc in seen.procs][:1] == ["stuck"])

    assert found.cause.kind == "stuck"
    assert found.cause.call == "workers[gpus=2].compute"
    assert "in compute" in found.cause.at
    stuck = found.procs[0]
    assert (stuck.name, stuck.state) == ("procs[gpus=2]", "stuck")
    assert [(call.name, call.outcome, call.caller) for call in stuck.calls[-2:]] == [
        ("workers[gpus=2].rank", "returned", "controller"),
        ("workers[gpus=2].compute", "running", "controller"),
    ]


@pytest.mark.daily
def test_member_that_has_died_is_named() -> None:
    """Q7: with how, and what it did; the error that has left the block is there, too."""
    with victim("dies") as one:
        assert one.wait() == 1
        found = observe.autopsy()

    assert (found.ended, found.cause.kind, found.cause.name) == ("error", "died", "procs[gpus=1]")
    assert "SIGKILL" in found.cause.text
    assert "while it ran workers[gpus=1].die" in found.cause.text
    assert found.error.startswith("ProcDied")
    assert found.procs[0].state == "dead"


def test_crash_is_named_by_its_signal_and_the_line_of_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    """Q7: not by the stack that the interpreter wrote."""
    with victim("crashes") as one:
        assert one.wait() == 1
        found = observe.autopsy()

    text = r"procs\[gpus=2\] has died first: it was killed by SIGSEGV \(pid \d+\), while it ran workers\[gpus=2\].crash"
    assert re.fullmatch(text, found.cause.text)
    assert re.fullmatch(r'File ".*/victims.py", line \d+ in crash', found.cause.at)
    assert run(["autopsy", str(one.pid)]) == 0
    said = capfd.readouterr().out
    assert said.splitlines()[0].endswith("  died with one of its processes")
    assert "Fatal Python error" not in said
    assert "ctypes" not in said


def test_endpoint_whose_error_has_left_the_block_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Q7: of the call that raised it."""
    with victim("fails") as one:
        assert one.wait() == 1
        found = observe.autopsy()

    assert (found.ended, found.cause.kind, found.cause.call) == ("error", "raised", "workers[gpus=3].fail")
    assert "ValueError: no such shard" in found.cause.text
    assert "victims.py" in found.cause.at
    assert found.cause.at.endswith(" in fail")
    calls = {call.name: call for proc in found.procs for call in proc.calls}
    assert calls["workers[gpus=3].fail"].outcome == "raised"
    assert calls["workers[gpus=3].fail"].error == "ValueError: no such shard"
    assert run(["autopsy"]) == 0
    said = capfd.readouterr().out
    assert said.splitlines()[0].endswith("  raised ValueError: no such shard")
    assert "(of the runtime)" not in said


@pytest.mark.daily
def test_healthy_run_that_is_ended_from_outside_has_no_culprit(capfd: pytest.CaptureFixture[str]) -> None:
    """Q7: its calls are named as what was under way; while it lives, its processes run."""
    with victim("slow") as one:
        living = one.killed_when(lambda seen: any(call.endpoint == "step" for call in seen.snapshot.calls))
        found = observe.autopsy()

    assert living.cause.kind == "none"
    assert (found.ended, found.cause.kind, found.cause.name) == ("killed", "none", "")
    assert "the oldest call, workers[gpus=2].step, was running for " in found.cause.text
    assert {proc.state for proc in found.procs} == {"cut off"}
    assert run(["autopsy"]) == 0
    said = capfd.readouterr().out
    assert said.splitlines()[0].endswith("  was killed from outside")
    assert "no culprit: it was ended from outside" in said


def test_process_of_a_run_that_lives_runs() -> None:
    """Q7: it was not cut off."""
    with victim("slow") as one:
        found = observe.autopsy(pid=one.pid)
        assert {proc.state for proc in found.procs} == {"running"}
        assert found.ended == "running"
        assert next(autopsy_lines(found, shows_all=False)).endswith("  still runs")


def test_run_that_ends_well_leaves_nothing(folder: Path) -> None:
    """Q6: neither files nor folders; autopsy says so."""
    with victim("well") as one:
        assert one.wait() == 0
    assert os.listdir(folder / ".records") == []
    with pytest.raises(ConnectError, match="ends well"):
        observe.autopsy()
    assert run(["autopsy"]) == 3


async def test_switched_off_there_is_no_record(folder: Path):
    """Q6: neither of the controller nor of its processes."""
    with configured(record="off"):
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Worker)
            await workers.rank.call()
            assert not (folder / ".records").exists()


@pytest.mark.daily
async def test_records_of_a_run_are_private_and_end_with_it(folder: Path):
    """Q6: a file for each process, in a folder that only this user may enter; an error that was caught keeps it."""
    with configured(history=0), pytest.raises(ExceptionGroup) as raised:
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            workers = await procs.spawn("workers", Worker)
            await workers.rank.call()
            [kept] = run_folders()
            files = sorted(kept.path.iterdir())
            assert len(files) == 3
            assert kept.path.stat().st_mode & 0o777 == 0o700
            assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
            raise ValueError("of the program")
    assert "of the program" in str([*leaves(raised.value)])
    assert sorted(kept.path.iterdir()) == files
    assert observe.autopsy().error == "ValueError: of the program"


async def test_newest_metrics_are_those_of_the_last_second(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Q7: of each process, without having been collected."""
    del folder
    monkeypatch.setattr(limits, "RECORD_SECONDS", 0.01)
    monkeypatch.setattr(limits, "RECORD_SHARE", 1.0)
    async with this_host().spawn_procs({"gpus": 1}):
        trimesh.log({"loss": 0.25}, step=812)
        found: list[str] = []
        while not found:
            await trio.lowlevel.checkpoint()
            post_mortem = await trio.to_thread.run_sync(lambda: observe.autopsy(pid=os.getpid()))
            lines = [line.strip() for line in autopsy_lines(post_mortem, shows_all=True) if "last metrics" in line]
            found = [line for line in lines if "loss" in line]  # those of earlier tests are of this process, too
    assert "loss 0.25 (step 812)" in found[0]


async def test_old_folders_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Q6: the oldest first, by number and by age; those of running runs never."""
    monkeypatch.setattr(limits, "RECORD_RUNS_MAX", 3)
    records = folder / ".records"
    for place in (folder, records):
        place.mkdir(mode=0o700)
    now = round(time.time() * 1000)
    old = [records / f"{now - age:013d}-1-a" for age in (10 * 86_400_000, 4_000, 3_000, 2_000)]
    for one in (*old, records / "unknown"):
        one.mkdir(mode=0o700)
    (old[3] / "a").touch()
    async with this_host().spawn_procs({"gpus": 1}):
        [mine] = {one.path for one in run_folders()} - set(old)
        assert {one.name for one in records.iterdir()} == {mine.name, old[2].name, old[3].name, "unknown"}
        clean_up(0)
        assert {one.name for one in records.iterdir()} == {mine.name, "unknown"}


def test_foreign_files_are_named_and_left_out(folder: Path) -> None:
    """Q7: whatever they are; a link is not followed."""
    with victim("dies") as one:
        one.wait()
    [kept] = run_folders()
    (kept.path / "1").write_bytes(b"rubbish" * 1_000)
    (kept.path / "2").mkdir()
    (kept.path / "3").symlink_to("/etc/passwd")
    os.mkfifo(kept.path / "4")
    found = observe.autopsy(kept.path)
    assert set(found.unreadable) == {"1", "2", "3", "4"}
    assert found.cause.name == "procs[gpus=1]"


def test_autopsy_is_one_json_document(capfd: pytest.CaptureFixture[str]) -> None:
    """Q7: the same that Python gets."""
    with victim("dies") as one:
        one.wait()
    capfd.readouterr()
    assert run(["autopsy", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["cause"]["name"] == "procs[gpus=1]"
    assert {proc["state"] for proc in said["procs"]} == {"dead", "ended"}


def test_report_of_a_dead_run_is_one_file(tmp_path: Path) -> None:
    """Q7: what its records say, and the machine."""
    with victim("dies") as one:
        one.wait()
    assert run(["report", str(tmp_path / "report.txt")]) == 0
    text = (tmp_path / "report.txt").read_text()
    assert "missing: the run itself: no run" in text
    assert "culprit: procs[gpus=1] has died first" in text
    assert "==== machine" in text


@pytest.mark.daily
def test_run_is_stopped_from_outside(capfd: pytest.CaptureFixture[str]) -> None:
    """Q5: as by a Ctrl-C: the program unwinds, nothing of it is left running; the record says so, the command, what."""
    with victim("slow") as one:
        assert run(["stop", "--pid", str(one.pid)]) == 0
        said = capfd.readouterr().out
        assert said.startswith(f"interrupted run {one.pid} (")
        assert said.endswith("): its blocks stop 4 processes, each within its grace\n")
        assert one.wait() in (1, -signal.SIGINT, 130)
    found = observe.autopsy()
    assert (found.ended, found.error) == ("error", "KeyboardInterrupt: ")
    assert next(autopsy_lines(found, shows_all=False)).endswith("  was stopped by Ctrl-C or trimesh stop")
    assert {proc.state for proc in found.procs} == {"ended"}
    assert run(["stop", "--pid", str(one.pid)]) == 3


def test_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match="no flight record"):
        observe.autopsy(tmp_path)
    with pytest.raises(ConnectError, match="cannot be read"):
        observe.autopsy(tmp_path / "missing")
