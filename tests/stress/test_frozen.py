"""A process that the kernel itself holds, in state D, by the freezer of cgroup v1 (Z08)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.lifetime.processes import look
from tests.lifetime.program import Program
from tests.runtime.processes import freeze

FREEZER = Path("/sys/fs/cgroup/freezer")

pytestmark = [
    pytest.mark.real,
    pytest.mark.stress,
    pytest.mark.skipif(not os.access(FREEZER / "tasks", os.W_OK), reason="the freezer of cgroup v1 is not ours to use"),
]


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freeze a process; SIGKILL has to wait until this is left."""
    group = FREEZER / f"trimesh-{secrets.token_hex(4)}"
    group.mkdir()
    process = look(pid)
    try:
        (group / "cgroup.procs").write_text(str(pid))
        freeze(group)
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        while process is not None and process.state:  # a zombie is in the group until it has been reaped
            os.sched_yield()
        group.rmdir()


@pytest.mark.parametrize("body", ["hear", "cancel"])
def test_frozen_process_is_given_up(body: str, tmp_path: Path) -> None:
    """Z08: the block is left, the leaf names the state; the process ends as soon as it can."""
    with Program(tmp_path, "hold", {"grace": 0.4, "body": body}) as program:
        program.say("open")
        pids = program.event("open")["pids"]
        with frozen(pids[0]):
            program.say("leave")
            raised = program.event("raised")
            assert [one.pid for one in program.family() - {program.process}] == [pids[0]]
        program.say("end")
        assert program.wait() == 0
        program.check_gone()

    [leaf] = raised["error"]["leaves"]
    assert (leaf["type"], leaf["point"]) == ("ProcDied", {"n": 0})
    assert "(state D)" in leaf["text"]
