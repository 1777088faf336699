"""How the end of a process is told, what goes with it, and how it is brought about."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from tests.memory_groups import memory_group
from tests.runtime.conftest import SERVE, Start, ask, hear, nested, new_id, spec_of, tell
from tests.runtime.processes import Controller, freeze, state, suspended, wait_gone

from trimesh import limits
from trimesh._runtime.spawner.launcher import ProcLauncher, open_spawner
from trimesh._runtime.spawner.workers import ExecutingError, marked_proc
from trimesh._runtime.system import linux
from trimesh._runtime.system.child import end_child
from trimesh._runtime.system.exits import (
    ExitReport,
    OomLedger,
    decode_tail,
    memory_event_paths,
    parse_oom_kills,
    signal_name,
)

real = pytest.mark.real

# ---- diagnosis -------------------------------------------------------------------------------------------------------


@real
@pytest.mark.parametrize(
    ("how", "text", "code", "signum", "tail"),
    [
        ("system_exit", "", 7, None, ""),
        ("system_exit", "last words", 1, None, "last words\n"),
        ("exception", "bad value", 1, None, "ValueError: bad value\n"),
        ("segfault", "", None, signal.SIGSEGV, "Fatal Python error: Segmentation fault"),
    ],
)
async def test_report_tells_code_signal_and_last_words(
    start: Start, how: str, text: str, code: int | None, signum: int | None, tail: str
) -> None:
    """Z10: as the process ended, without being asked."""
    child = await start()

    await tell(child, "end", how, text)
    report = await child.wait_exited()

    assert (report.exit_code, report.signal) == (code, signum)
    assert (report.proc_id, report.pid, report.oom_killed) == (child.proc_id, child.pid, False)
    assert tail in report.stderr_tail
    assert abs(time.monotonic_ns() - report.ended_at) < 60e9
    assert child.report is report


@real
async def test_report_of_a_kill_comes_unasked(start: Start) -> None:
    """From the spawner, which is told by the kernel; it says when it has seen the end."""
    child = await start()

    began = time.monotonic_ns()
    os.kill(child.pid, signal.SIGKILL)
    report = await child.wait_exited()

    assert report.signal == signal.SIGKILL
    assert not report.oom_killed
    assert began <= report.ended_at <= time.monotonic_ns()
    assert report.describe() == "SIGKILL"
    assert report.error("text").reason == "killed"


@real
async def test_hook_runs_before_any_waiter_wakes(launcher: ProcLauncher) -> None:
    """LA-2: the choice what a death means is made before it is acted on."""
    order = list[str]()
    child = await launcher.launch(spec_of(), on_exit=lambda report: order.append(f"hook {report.exit_code}"))

    async def wait() -> None:
        await child.wait_exited()
        order.append("waiter")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await hear(child)
        await tell(child, "exit", 5)

    assert order == ["hook 5", "waiter", "waiter"]


@real
async def test_tail_is_the_last_bytes_of_stderr_only(start: Start) -> None:
    """Bounded by `limits.STDERR_TAIL_BYTES`, cut at a character."""
    child = await start()
    await ask(child, "print", "stdout", "not this\n")
    await ask(child, "print", "stderr", "é" * limits.STDERR_TAIL_BYTES + "end")

    await tell(child, "exit", 0)
    report = await child.wait_exited()

    assert report.stderr_tail == "é" * ((limits.STDERR_TAIL_BYTES - 3) // 2) + "end"


@real
async def test_exit_of_any_process_of_the_family_is_told(launcher: ProcLauncher, start: Start) -> None:
    """One that runs, one that has ended, one that never was; asked by its grandparent and by its owner."""
    ended, nest = await start(), await launcher.launch(nested(1))
    _, inner_pid = await hear(nest)
    inner_id = type(nest.proc_id)(nest.proc_id + 1)
    await tell(ended, "exit", 4)
    await ended.wait_exited()

    reports = dict[str, ExitReport]()

    async def wait_for_inner() -> None:
        reports["inner"] = await launcher.exit_of(inner_id)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_inner)
        await trio.testing.wait_all_tasks_blocked()
        os.kill(inner_pid, signal.SIGTERM)

    assert reports["inner"].signal == signal.SIGTERM
    assert (await launcher.exit_of(ended.proc_id)).exit_code == 4
    assert not (await launcher.exit_of(new_id())).is_known
    for request in ("exit_of", "wait"):
        await trio.to_thread.run_sync(nest.link.sendall, f'"{request}"\n'.encode())
        assert await hear(nest) == signal.SIGTERM


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (ExitReport(new_id(), 1, 3, None, False, "", 0), "exit code 3"),
        (ExitReport(new_id(), 1, None, 9, True, "", 0), "SIGKILL (out of memory)"),
        (ExitReport.unknown(new_id()), "lost without a diagnosis"),
    ],
)
def test_report_describes_itself(report: ExitReport, text: str) -> None:
    """Words for errors and logs."""
    assert report.describe() == text
    assert report.error("message", by="grace").by == "grace"
    assert report.is_known is (report.exit_code is not None or report.signal is not None)


def test_signal_name_knows_numbers_without_a_name() -> None:
    """Real-time signals have none."""
    assert signal_name(9) == "SIGKILL"
    assert signal_name(42) == "signal 42"


def test_decode_tail_never_fails() -> None:
    """Any bytes; a sequence cut at the start is left out, other rubbish is replaced."""
    assert decode_tail("aé".encode()[1:]) == "é"
    assert decode_tail("é".encode()[1:] + b"b") == "b"
    assert decode_tail(b"\xffb") == "\ufffdb"
    assert decode_tail(b"") == ""


# ---- what goes with a process ----------------------------------------------------------------------------------------


@real
@pytest.mark.parametrize("kind", ["group", "session", "daemon", "exec"])
async def test_foreign_children_go_with_their_worker(start: Start, kind: str) -> None:
    """The group, children in sessions of their own, daemons, and daemons that have executed something else."""
    other = await start()
    child = await start()
    kept, foreign = await ask(other, "fork", kind), await ask(child, "fork", kind)
    assert state(foreign)

    await tell(child, "exit", 0)
    await child.wait_exited()

    await wait_gone([foreign])
    assert state(kept)
    assert state(other.pid)


@real
async def test_foreign_children_go_in_the_middle_of_an_exec(start: Start) -> None:
    """A process that is between two programs shows no environment, and so no mark: it is looked at again."""
    child = await start()
    foreign = await ask(child, "fork_executing", 20)
    assert len(foreign) == 20

    os.kill(child.pid, signal.SIGKILL)
    await child.wait_exited()

    await wait_gone(foreign)


def test_mark_is_never_missed_in_the_middle_of_an_exec() -> None:
    """It is read, or said to be unreadable now: a process without one would be left alone."""
    again = 'exec "$0" -c "$1" "$0" "$1"'
    mark = {linux.MARKER: linux.marker_of(1, 2)}
    with subprocess.Popen(["/bin/sh", "-c", again, "/bin/sh", again], env={**os.environ, **mark}) as process:
        try:
            found = {_mark_now(process.pid) for _ in range(10_000)}
        finally:
            process.kill()
    assert found <= {(1, 2), "executing"}
    assert (1, 2) in found


def _mark_now(pid: int) -> tuple[int, int] | str | None:
    try:
        return marked_proc(pid)
    except ExecutingError:
        return "executing"


def test_process_without_an_environment_has_no_mark() -> None:
    """It is told from one whose environment is not laid out yet; so are zombies."""
    with subprocess.Popen(["/bin/sleep", "600"], env={}) as process:
        try:
            while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                pass
            assert marked_proc(process.pid) is None
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert marked_proc(process.pid) is None


@real
async def test_foreign_descendants_go_generation_by_generation(start: Start) -> None:
    """A tree below a child in its own session: each generation is adopted when the one above has ended."""
    child = await start()
    pids = await ask(child, "eval", FORK_TREE)
    assert len(pids) == 3
    assert all(map(state, pids))

    os.kill(child.pid, signal.SIGKILL)
    await child.wait_exited()

    await wait_gone(pids)


FORK_TREE = "import_module('tests.runtime.worker_entries').fork_tree(3)"


@real
async def test_workers_go_with_the_worker_that_owns_them(launcher: ProcLauncher) -> None:
    """M7: SIGKILL in the middle of a chain ends everything below it, nothing above."""
    top = await launcher.launch(nested(3))
    pids = await hear(top)
    assert len(pids) == 4

    os.kill(pids[1], signal.SIGKILL)

    await wait_gone(pids[1:])
    assert state(top.pid)


# ---- out of memory ---------------------------------------------------------------------------------------------------


def test_oom_count_is_read_from_both_versions() -> None:
    """cgroup v2's memory.events, v1's memory.oom_control, and neither."""
    assert parse_oom_kills("low 0\nhigh 3\nmax 7\noom 2\noom_kill 5\noom_group_kill 1\n") == 5
    assert parse_oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 6\n") == 6
    assert parse_oom_kills("oom_kill_disable 0\nunder_oom 0\n") is None
    assert parse_oom_kills("oom_kill x\n") is None


def test_oom_file_is_found_below_its_mount() -> None:
    """v2, v1 in a hybrid system, and a container whose cgroup path does not exist below the mount."""
    v2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
    v1 = "35 24 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n36 24 0:31 / /cpu rw - cgroup x rw,cpu\n"

    assert memory_event_paths("0::/user.slice/a\n", v2) == [
        "/sys/fs/cgroup/user.slice/a/memory.events",
        "/sys/fs/cgroup/memory.events",
    ]
    assert memory_event_paths("4:memory:/jobs/7\n2:cpu:/\n", v1) == [
        "/sys/fs/cgroup/memory/jobs/7/memory.oom_control",
        "/sys/fs/cgroup/memory/memory.oom_control",
    ]
    assert memory_event_paths("0::/../outside\n", v2)[0] == "/sys/fs/cgroup/memory.events"
    assert memory_event_paths("rubbish\n", "rubbish - x\n") == []


def test_oom_ledger_explains_as_many_kills_as_were_counted() -> None:
    """Each counted kill explains one death, soon after; an old one explains none."""
    ledger = OomLedger(5, now=0.0)

    assert not ledger.claim(5, 1.0)
    assert [ledger.claim(7, 2.0), ledger.claim(7, 2.1), ledger.claim(7, 2.2)] == [True, True, False]
    ledger.observe(8, 3.0)
    assert not ledger.claim(8, 3.0 + limits.OOM_CLAIM_SECONDS + 0.1)


@real
async def test_out_of_memory_is_told_from_a_kill() -> None:
    """Z10: by the kernel's own count, in a group with a limit; a plain SIGKILL after it is not mistaken."""
    with memory_group(256 << 20) as group:
        controller = Controller("report_oom", str(group / "cgroup.procs"))
        try:
            assert await controller.line() == [signal.SIGKILL, 1]
            assert await controller.line() == [signal.SIGKILL, 0]
            assert await controller.wait() == 0
        finally:
            controller.close()


# ---- the ladder ------------------------------------------------------------------------------------------------------


@real
async def test_ladder_ends_a_willing_process_by_sigterm(start: Start) -> None:
    """Z13: the first step is enough."""
    child = await start()

    report = await end_child(child, term_seconds=30)

    assert report is not None
    assert report.signal == signal.SIGTERM


@real
async def test_ladder_kills_what_ignores_sigterm(start: Start) -> None:
    """Z13: SIGTERM, the time it has, SIGKILL; also for its foreign children."""
    child = await start()
    await ask(child, "eval", "repr(import_module('signal').signal(15, import_module('signal').SIG_IGN))")
    foreign = await ask(child, "fork", "group")

    report = await end_child(child, term_seconds=0.05)

    assert report is not None
    assert report.signal == signal.SIGKILL
    await wait_gone([foreign])
    assert await end_child(child) is report


@real
async def test_ladder_ends_a_stopped_process(start: Start) -> None:
    """Z06: it is continued, so that SIGTERM reaches it."""
    child = await start()
    with suspended(child.pid):
        report = await end_child(child, term_seconds=30)

    assert report is not None
    assert report.signal == signal.SIGTERM


@real
async def test_ladder_ends_a_process_that_holds_the_interpreter_lock(start: Start) -> None:
    """Z07: SIGTERM has its default action, so Python need not run."""
    child = await start()
    await tell(child, "end", "hang")

    assert await end_child(child, term_seconds=30) is not None


@real
async def test_ladder_works_where_the_kernel_cannot_signal_groups_by_pidfd(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 6.9: through the spawner, which is the parent."""
    monkeypatch.setattr(linux, "_PIDFD_SIGNAL_PROCESS_GROUP", 1 << 20)
    child = await start()
    foreign = await ask(child, "fork", "group")

    report = await end_child(child, term_seconds=0)

    assert report is not None
    assert report.signal == signal.SIGKILL
    await wait_gone([foreign])


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup v1 freezer: what is frozen there does not die until it is thawed, as in an uninterruptible sleep."""
    group = Path(f"/sys/fs/cgroup/freezer/trimesh-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no cgroup v1 freezer can be made here")
    yield group
    for _ in range(100):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)


@real
async def test_ladder_abandons_a_process_stuck_in_the_kernel(
    launcher: ProcLauncher, start: Start, freezer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Z08: reported in the log and left after the hard deadline; its end is still told when the kernel lets it go."""
    child = await start()
    (freezer / "cgroup.procs").write_text(str(child.pid))
    freeze(freezer)
    try:
        with caplog.at_level(logging.ERROR):
            assert await end_child(child, term_seconds=0, kill_seconds=0.2) is None
        assert f"pid {child.pid}, state D" in caplog.text
        assert state(child.pid) == "D"
        other = await start()
        assert (await ask(other, "about"))["pid"] == other.pid
    finally:
        (freezer / "freezer.state").write_text("THAWED")

    assert (await child.wait_exited()).signal == signal.SIGKILL


@real
async def test_block_abandons_a_process_stuck_in_the_kernel(freezer: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Z08: leaving is bounded; whoever waits is told that nothing is known; it is gone as soon as it can be."""
    async with open_spawner(new_id(), entry=SERVE) as launcher:
        child = await launcher.launch(spec_of())
        await hear(child)
        (freezer / "cgroup.procs").write_text(str(child.pid))
        freeze(freezer)
        began = time.monotonic()
    try:
        assert time.monotonic() - began > limits.KILL_SECONDS - 0.1
        assert not (await child.wait_exited()).is_known
        assert f"pid {child.pid}, state D" in caplog.text
    finally:
        (freezer / "freezer.state").write_text("THAWED")
    await wait_gone([child.pid])
