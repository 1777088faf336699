"""Forks that are not ours: they hold nothing of a mesh, end nothing, and cannot use it (O4)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.lifetime.program import Program

from trimesh import limits

pytestmark = pytest.mark.real


@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
@pytest.mark.parametrize("where", ["controller", "worker"])
def test_fork_holds_nothing_of_a_mesh(where: str, how: str, tmp_path: Path) -> None:
    """O4: our descriptors are closed in it, its handles are dead, and the mesh works after it has ended."""
    flags = ("-W", "ignore::DeprecationWarning")  # Python 3.12 warns of forks of a process with threads
    with Program(tmp_path, "forking", {"where": where, "how": how}, flags=flags) as program:
        child = program.event("child")
        program.event("works")
        program.say("leave")
        assert program.wait() == 0
        program.check_gone()
        assert program.stderr == ""

    # Every Trio run has sockets and an epoll of its own, which stay with the copy of the run; pipes are of
    # multiprocessing and the streams.
    kinds = [target.partition(":")[0] for target in child["has"] if not target.startswith("pipe:")]
    assert kinds == [kind for kind in program.event("baseline")["has"] if kind != "pipe"]
    assert len(child["before"]) > len(child["has"])
    for used in child["used"]:
        assert not used.startswith("no error")


def test_stopped_controller_does_not_end_the_job(tmp_path: Path) -> None:
    """O5: Ctrl-Z or a debugger for longer than any lease; SIGCONT goes on as if nothing had been."""
    with Program(tmp_path, "hold", {"during": [["sleep"]], "body": "cancel"}) as program:
        program.say("open")
        program.event("open")
        family = program.family()
        program.send(signal.SIGSTOP)
        time.sleep(limits.LEASE_SECONDS + 2 * limits.BEAT_SECONDS)  # the time is what is tested
        assert program.family() == family
        program.send(signal.SIGCONT)
        program.say("dump")
        program.event("dumped")
        assert program.family() == family
        program.say("leave")
        program.event("left all")
        program.say("end")
        assert program.wait() == 0
        assert program.stderr == ""


def test_orphaned_terminal_does_not_end_the_job(tmp_path: Path) -> None:
    """O5: SIGHUP is the user's, too: ignored as under nohup, nothing of the family minds."""
    with Program(tmp_path, "hold", {"during": [["sleep"]], "body": "cancel", "ignored": "SIGHUP"}) as program:
        program.say("open")
        pids = program.event("open")["pids"]
        program.send(signal.SIGHUP)
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
        program.say("leave")
        program.event("left all")
